"""The router: a linear layer whose logits choose the experts of each token, with what keeps their load balanced."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.moe.balance import Auxiliary, Peers, balancing_scores, switch_loss, z_loss
from megalith.nn.moe.routing import Choice, RoutingRule, choose, count_choices, quantile_offsets
from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs, product_dtype_on
from megalith.nn.region import Region

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of balancing loss -> the name that Megatron records it under."""


@dataclass(frozen=True)
class RouterSettings:
    """A router beyond its rule.

    Attributes:
        rule: how tokens choose.
        balancing: kind of auxiliary loss -> its coefficient.
        z_coefficient: of the z-loss; none if None.
        biased: the choice is corrected by a bias of each expert that is moved by its load, not
            learned (arXiv:2408.15664).
        jitter: inputs are multiplied in training by uniform numbers from 1 - jitter to 1 + jitter; none if None.
        dtype: in which logits and scores are computed; that of the hidden states if None.
        bias: the projection to logits has a learned bias.
        random: logits are random numbers, for benchmarks of equal loads; gradients pass as if they were its own.
    """

    rule: RoutingRule
    balancing: Mapping[str, float] = field(default_factory=dict)
    z_coefficient: float | None = None
    biased: bool = False
    jitter: float | None = None
    dtype: torch.dtype | None = None
    bias: bool = False
    random: bool = False


class Router(nn.Module):
    """[S, B, D] -> the experts of each of the S B tokens.

    Args:
        layer: number of this layer in the model, for logs.

    Attributes:
        expert_bias: [E] fp32 buffer, if the choice is biased.
        qb_beta: [E] fp32 buffer of quantile balancing: offsets that are subtracted from the logits for the choice.
        offsets_E, offset_batches: sum of the offsets computed for the micro-batches of this step, and their number.
        load_E: choices of each expert by tokens of this rank in this step, fp32.
        step_load_E, micro_batches: the same of all ranks, for the balance over the step, and the micro-batches in it.
        mean_loads: mean loads of micro-batches whose forward pass may be recomputed, in that order.
    """

    def __init__(
        self,
        settings: RouterSettings,
        layer: int,
        hidden_size: int,
        region: Region,
        peers: Peers,
        auxiliary: Auxiliary,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.settings, self.layer, self.region, self.peers, self.auxiliary = settings, layer, region, peers, auxiliary
        experts = settings.rule.experts
        self.weight = nn.Parameter(torch.empty(experts, hidden_size, **factory))
        self.bias: Tensor | None
        bias = nn.Parameter(torch.empty(experts, **factory)) if settings.bias else None
        self.register_parameter("bias", bias)
        none_yet = torch.zeros(experts, dtype=torch.float32, device=factory["device"])
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", none_yet if settings.biased else None)
        self.qb_beta: Tensor | None
        self.register_buffer("qb_beta", none_yet.clone() if settings.rule.quantiles else None)
        self.offsets_E: Tensor
        self.load_E: Tensor
        self.step_load_E: Tensor
        for name in ("offsets_E", "load_E", "step_load_E"):
            self.register_buffer(name, none_yet.clone(), persistent=False)
        self.offset_batches = self.micro_batches = self.begun = 0
        self.mean_loads: deque[Tensor] = deque()

    def placements(self) -> dict[str, Placement]:
        """Return `Replicated` for every parameter."""
        return {name: Replicated() for name, _ in self.named_parameters()}

    def begin_step(self) -> None:
        """Reset the load counters at the start of a step, also after an interrupted one."""
        self.begun += 1
        self.load_E.zero_()
        self.step_load_E.zero_()
        self.micro_batches = 0
        self.offsets_E.zero_()
        self.offset_batches = 0
        self.mean_loads.clear()

    def forward(self, x_SBD: Tensor) -> Choice:
        """Choose the experts of the tokens, flattened to T = S B."""
        settings = self.settings
        learning = self.training and torch.is_grad_enabled()
        x_TD = x_SBD.reshape(-1, x_SBD.shape[-1])
        if settings.jitter is not None and self.training:
            with self.region.hidden_rng(settings.jitter):
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1.0 - settings.jitter, 1.0 + settings.jitter)
        logits_TE = self.logits(x_TD)
        if settings.random:
            with self.region.hidden_rng(1.0):
                logits_TE = logits_TE + (torch.randn_like(logits_TE) - logits_TE).detach()
        if learning and settings.z_coefficient is not None:
            part = z_loss(logits_TE) / self.peers.sharing
            logits_TE = self._attach(logits_TE, part, settings.z_coefficient, "z_loss", len(x_TD))
        bias_E = self.expert_bias if self.qb_beta is None else self.qb_beta
        choice = choose(logits_TE, settings.rule, bias_E=bias_E, training=self.training)
        if not learning:
            return choice
        if not self.auxiliary.again:
            self._count_offsets(logits_TE)
            self.load_E += count_choices(choice.experts_TK.flatten(), settings.rule.experts)
        if not settings.balancing:
            return choice
        weights_TK = self._balanced(choice, logits_TE, x_SBD.shape[0])
        return Choice(choice.experts_TK, weights_TK)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the router logits, [T, D] -> [T, E], in the dtype that routing computes in."""
        dtype = self.settings.dtype or x_TD.dtype
        wide = product_dtype_on(x_TD.device, dtype)
        bias_E = None if self.bias is None else self.bias.to(wide)
        return torch.nn.functional.linear(x_TD.to(wide), self.weight.to(wide), bias_E).to(dtype)

    def _count_offsets(self, logits_TE: Tensor) -> None:
        if self.qb_beta is not None:
            everywhere_TE = self.peers.all_of_micro_batch(logits_TE)
            self.offsets_E += quantile_offsets(everywhere_TE, self.settings.rule, self.qb_beta)
            self.offset_batches += 1

    def _balanced(self, choice: Choice, logits_TE: Tensor, length: int) -> Tensor:
        """Return the weights, with the balancing losses of these tokens attached."""
        rule, peers, weights_TK = self.settings.rule, self.peers, choice.weights_TK
        scores_TE, best_TE = balancing_scores(logits_TE, rule)
        if rule.own is not None:
            best_TE = torch.zeros_like(best_TE).scatter_(1, choice.experts_TK, True)
        here = len(scores_TE)
        shared = here * peers.sharing
        for kind, coefficient in self.settings.balancing.items():
            if kind == "seq_aux_loss":
                load = peers.sum_of_micro_batch(best_TE.reshape(length, -1).sum(0))
                whole = length * peers.sharing
                loss = switch_loss(scores_TE.reshape(length, -1), load, rule, scored=whole, counted=whole)
                loss = loss / (here // length)
            elif kind == "global_aux_loss":
                load = self.mean_loads.popleft() if self.auxiliary.again else self._mean_load(best_TE)
                loss = switch_loss(scores_TE, load, rule, scored=shared, counted=here * peers.all)
            else:
                load = peers.sum_of_micro_batch(best_TE.sum(0))
                loss = switch_loss(scores_TE, load, rule, scored=shared, counted=shared)
            weights_TK = self._attach(weights_TK, loss, coefficient, NAMES[kind], here)
        return weights_TK

    def _mean_load(self, best_TE: Tensor) -> Tensor:
        """Return the load of a micro-batch over all ranks, averaged over the step so far."""
        self.step_load_E += self.peers.sum_of_step(best_TE.sum(0))
        self.micro_batches += 1
        load_E = self.step_load_E / self.micro_batches
        self.mean_loads.append(load_E)
        return load_E

    def _attach(self, x: Tensor, loss: Tensor, coefficient: float, name: str, tokens: int) -> Tensor:
        return self.auxiliary.attach(x, loss, coefficient, name, self.layer, tokens * self.peers.sharing)
