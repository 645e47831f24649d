"""Losses that users register: the vocabulary whose logits may be divided over the ranks, as their functions see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError
from megalith.nn.embedding import local_rows
from megalith.nn.linear import linear
from megalith.nn.precision import at_least_fp32
from megalith.nn.region import SOLO, Region, enter
from megalith.nn.sink import GradientSink
from megalith.registry import Registered


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The output layer of a model: logits of the tokens of this rank, and what they are together on all ranks.

    All sums and maxima are over the tensor-parallel ranks that share the vocabulary; their results are equal on them.

    Attributes:
        size: V, of all ranks.
    """

    size: int
    _region: Region = SOLO
    _project: Callable[[Tensor], Tensor] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's columns of the logits: [..., D] -> [..., V here]; for losses on hidden states."""
        assert self._project is not None, "this loss has its logits"
        return self._project(_Whole.apply(hidden, self._region, False))

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Return the log-sum-exp over the whole vocabulary. [..., V of this rank] -> [...], at least fp32."""
        own = logits.to(at_least_fp32(logits.dtype)).logsumexp(-1)
        if self._region.size == 1:
            return own
        peak = self._region.all_reduce_max(own.detach())
        return self._region.all_reduce_sum((own - peak).exp()).log() + peak

    def chosen(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of tokens, of whichever rank. [..., V of this rank], [...] -> [...], at least fp32."""
        rows, elsewhere = local_rows(ids, self._region.shard(self.size, even=False), self.size)
        own = logits.gather(-1, rows[..., None]).squeeze(-1).to(at_least_fp32(logits.dtype))
        return self._region.all_reduce_sum(own.masked_fill(elsewhere, 0.0))

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token. [..., V of this rank], [...] -> [...], at least fp32."""
        return self.log_sum_exp(logits) - self.chosen(logits, labels)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; the gradient passes."""
        return self._region.all_reduce_sum(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, without a gradient."""
        return self._region.all_reduce_max(x.detach())


class _Whole(torch.autograd.Function):
    """Hidden states of the whole sequence (`gathers`), or for the part of the vocabulary here, whose gradients add up.

    Between the two a function of the hidden states is the same on all ranks, and so is its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, gathers: bool) -> Tensor:
        ctx.region, ctx.gathers = region, gathers
        y = region.gather(x).wait() if gathers else x
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        return (ctx.region.local_sequence(grad) if ctx.gathers else ctx.region.all_reduce_sum(grad)), None, None


def registered_loss(
    loss: Registered,
    hidden_SBD: Tensor,
    weight_VD: nn.Parameter,
    labels_BS: Tensor,
    mask_BS: Tensor,
    sink: GradientSink | None,
    region: Region,
    vocab_size: int,
) -> Tensor:
    """Return the loss of each token [B, S] by a registered function; arguments as of `nn.loss.vocabulary_loss`.

    Raises:
        ConfigError: As of `checked`.
    """

    def project(x: Tensor) -> Tensor:
        return linear(x, weight_VD, None, sink)

    if loss.entry.options["on"] == "hidden":
        whole: Tensor = _Whole.apply(hidden_SBD, region, True)
        given, vocabulary = whole.transpose(0, 1), Vocabulary(vocab_size, region, project)
    else:
        given = project(enter(hidden_SBD, region)).transpose(0, 1)
        vocabulary = Vocabulary(vocab_size, region)
    return checked(loss, given, labels_BS, mask_BS, vocabulary)


def checked(loss: Registered, given: Tensor, labels_BS: Tensor, mask_BS: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Call a registered loss.

    Raises:
        ConfigError: It does not return the loss of each token, or one without a gradient.
    """
    losses = loss(given, labels_BS, mask_BS, vocabulary)
    if not isinstance(losses, Tensor) or losses.shape != labels_BS.shape:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"--loss {loss} returns {found}; return the loss of each token [B, S], {list(labels_BS.shape)}, without "
            "the mask"
        )
    if torch.is_grad_enabled() and given.requires_grad and not losses.requires_grad:
        raise ConfigError(f"--loss {loss} returns losses without a gradient; compute them from its first argument")
    return losses.to(at_least_fp32(losses.dtype))
