"""Auxiliary losses that balance the load of the experts, and how they join the backward pass.

An auxiliary loss is not an output of the model: it would have to travel from each layer through the pipeline to the
main loss. `Auxiliary.attach` ties it to a tensor on the way instead: the forward pass leaves that tensor as it
is, and the backward pass through it starts the gradient of the auxiliary loss too. The value is recorded there, once
for each micro-batch, however often the forward pass is computed.

Shapes: T tokens of this rank, E experts, K experts for each token. Where ranks share the tokens of a micro-batch,
the loss of each is a partial sum; their sum is the loss of one process.

| kind           | balanced over                                    | source                           |
|----------------|--------------------------------------------------|----------------------------------|
| aux_loss       | the tokens of a micro-batch                      | Switch, arXiv:2101.03961, eq. 4  |
| seq_aux_loss   | each sequence for itself                         | DeepSeek-V2, arXiv:2405.04434    |
| global_aux_loss| all tokens of the step so far, of all replicas   | arXiv:2501.11873                 |
| z-loss         | (keeps logits small)                             | ST-MoE, arXiv:2202.08906, eq. 5  |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.nn.moe.dispatch import LOCAL_DISPATCHER, Dispatcher
from megalith.nn.moe.routing import SEPARATE_SCORES, RoutingRule, at_least
from megalith.nn.region import Region


class Peers:
    """Port to the ranks that hold other tokens; the default is a single process.

    Attributes:
        sharing: number of ranks that share the sequences of a micro-batch.
        all: number of ranks with different tokens, replicas included.
        dispatcher: sends tokens to the experts of other ranks.
        region_of_experts: the ranks that shard each expert and have different tokens; None if these are the ranks of
            the layer's region.
    """

    sharing = 1
    all = 1
    dispatcher: Dispatcher = LOCAL_DISPATCHER
    region_of_experts: Region | None = None

    def sum_of_micro_batch(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks that share the micro-batch; no gradient passes."""
        return x

    def all_of_micro_batch(self, x: Tensor) -> Tensor:
        """Gather the rows of `x` [T, ...] of all ranks that share the micro-batch, in any order; without gradient."""
        return x.detach()

    def sum_of_step(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks with different tokens; no gradient passes."""
        return x


class Alone(Peers):
    """All tokens and all experts are on this rank."""


@dataclass
class Auxiliary:
    """The auxiliary losses of a model: the scale of their gradients, and their values.

    Attributes:
        scale: factor of the main loss of a micro-batch before the backward pass.
        per_token: the main loss is a sum over tokens instead of a mean; then these are, too.
        again: a forward pass is being recomputed, which must not count anything twice.
        recorded: name -> layer -> sum over the micro-batches whose backward pass is complete; partial sums if ranks
            share a micro-batch.
    """

    scale: float = 1.0
    per_token: bool = False
    again: bool = False
    recorded: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Mark the block as the recomputation of a forward pass, which counts nothing again."""
        before, self.again = self.again, True
        try:
            yield
        finally:
            self.again = before

    def attach(self, x: Tensor, loss: Tensor, coefficient: float, name: str, layer: int, tokens: int) -> Tensor:
        """Return `x`, through which the gradient of `coefficient * loss` (a scalar) joins the backward pass.

        The loss is recorded under `name` and `layer`, without the coefficient; `tokens` are those of the micro-batch.
        """
        factor = self.scale * coefficient * (tokens if self.per_token else 1)
        attached: Tensor = _Attach.apply(x, loss, factor, self, name, layer)
        return attached

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Add the loss of a micro-batch."""
        layers = self.recorded.setdefault(name, {})
        layers[layer] = layers[layer] + value if layer in layers else value


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, factor: float, auxiliary: Auxiliary, name: str, layer: int
    ) -> Tensor:
        ctx.loss, ctx.factor, ctx.auxiliary, ctx.place = loss.detach(), factor, auxiliary, (name, layer)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        ctx.auxiliary.record(*ctx.place, ctx.loss)
        return grads[0], torch.full_like(ctx.loss, ctx.factor), None, None, None, None


def balancing_scores(logits_TE: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Return scores over all experts that sum to one, and how often each is among the K best.

    The bias for the choice, groups and capacities do not matter here.

    Returns:
        scores [T, E] in at least fp32, and the map of the K best [T, E], bool.
    """
    if rule.score in SEPARATE_SCORES:
        scores_TE = SEPARATE_SCORES[rule.score](logits_TE)
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    else:
        scores_TE = torch.softmax(at_least(logits_TE), dim=-1)
    best_TK = scores_TE.detach().topk(rule.top_k, dim=-1).indices
    return scores_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, best_TK, True)


def switch_loss(scores_TE: Tensor, load_E: Tensor, rule: RoutingRule, *, scored: int, counted: int) -> Tensor:
    """Return E sum_e f_e p_e of this rank's scores: 1 when all experts have equal shares.

    Args:
        scores_TE: of the tokens that are here; p_e is their sum over `scored`.
        load_E: how often each expert is chosen; f_e is that over K `counted`.
        rule: E and K. With sequences side by side, [S, B E], the result is the sum of the losses of the sequences.
        scored: tokens of the micro-batch, on all ranks that share it.
        counted: tokens whose choices are counted.
    """
    return (scores_TE.sum(0) * load_E).sum() * (rule.experts / (rule.top_k * scored * counted))


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of the logits."""
    return torch.logsumexp(at_least(logits_TE), dim=-1).square().mean()
