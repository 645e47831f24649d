"""The vocabulary loss: output projection and cross-entropy as one operation.

For hidden states h [T, D], output weight W [V, D] and targets t [T]:

    logits = h W^T            [T, V], kept once, in the dtype of h
    loss_i = log sum_v exp(logits_iv - max_i) + max_i - logits_i,t_i          in at least fp32
    dlogits = (softmax(logits) - onehot(t)) * dloss                           written over the logits
    dh = dlogits W,  dW = dlogits^T h

The plain formulation holds the logits, their fp32 copy, their log-softmax and the gradient of each; here one
[T, V] buffer serves all of them, and the fp32 work is done on a few rows at a time. On a CPU these fit the cache, and
the operations on them are the fastest there are for CPUs. Elsewhere each operation is a pass over memory, and torch's
softmax kernels do in one pass what are six: for a logit in half precision both passes of the loss move 18 bytes, or 34
where torch's softmax cannot read its dtype and write fp32, instead of 82. What concerns one logit of a token is done
for all tokens at once, so that a pass over a chunk is two launches. Why the gradient is not formed in the forward
pass, without storing the logits: docs/decisions/0017-logits-are-stored.md.

With label smoothing a the target distribution gives a / (V - 1) to every other token. With s = a V / (V - 1)

    loss_i = log sum_v exp(logits_iv) - (1 - s) logits_i,t_i - s mean_v logits_iv
    dlogits = (softmax(logits) - (1 - s) onehot(t) - s / V) * dloss

With a bias b [V] of the vocabulary logits = h W^T + b and db = sum_T dlogits. Where there is no target the loss is the
logarithm of the sum alone, which a mask takes out of the mean.

On several ranks each holds V/n rows of W and the logits of these. The logarithm of the sum and the target's logit of
each part become those of the whole by a maximum and one sum of [T] over the ranks; dh, a sum over the vocabulary, is
collected while dW is computed. Where hidden states are parts of the sequence they are gathered for both passes, again
for the second one, while dh is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.device import is_host
from megalith.nn.embedding import local_rows
from megalith.nn.linear import linear
from megalith.nn.placement import Placement, Split
from megalith.nn.precision import FactoryKwargs, at_least_fp32, product_dtype
from megalith.nn.region import SOLO, Region, enter
from megalith.nn.sink import GradientSink

CHUNK_ELEMENTS = 1 << 20  # of [rows, V] in fp32 work at once: 4 MiB, within a core's share of cache
CHUNK_ELEMENTS_ON_DEVICE = 1 << 24  # 64 MiB: few launches, and still a part of the logits only


def _in_chunks(logits_TV: Tensor, work: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows at a time: which, and memory for them in the dtype `work`, the same each time."""
    rows, columns = logits_TV.shape
    elements = CHUNK_ELEMENTS if is_host(logits_TV.device) else CHUNK_ELEMENTS_ON_DEVICE
    step = min(rows, max(1, elements // columns))
    memory = torch.empty(step, columns, dtype=work, device=logits_TV.device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        yield part, memory[: part.stop - start]


def _exp(x: Tensor) -> Tensor:
    """Compute e^x in place, by the power of two: torch's exp2 for CPUs takes a quarter of the time of its exp."""
    return x.mul_(math.log2(math.e)).exp2_()


def _log_sum_exp(
    logits_TV: Tensor, rows_T: Tensor, chosen_T: Tensor, *, with_sum: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the log-sum-exp of each row, [T, V] -> [T] in at least fp32, and with `with_sum` the sum of each row.

    `rows_T` says which logit of each row is `chosen_T`. The fused softmax returns its logarithmic probability too, of
    which the log-sum-exp is the difference.
    """
    work = at_least_fp32(logits_TV.dtype)
    result = torch.empty(logits_TV.shape[0], dtype=work, device=logits_TV.device)
    if _has_fused_softmax(logits_TV):
        for rows, chunk in _in_chunks(logits_TV, work):
            torch.log_softmax(logits_TV[rows], dim=-1, dtype=work, out=chunk)
            torch.gather(chunk, 1, rows_T[rows, None], out=result[rows, None])
        return chosen_T - result, logits_TV.sum(dim=-1, dtype=work) if with_sum else None, result
    sums = torch.empty_like(result) if with_sum else None
    for rows, chunk in _in_chunks(logits_TV, work):
        chunk.copy_(logits_TV[rows])
        if sums is not None:
            sums[rows] = chunk.sum(dim=-1)
        peak = chunk.amax(dim=-1, keepdim=True)
        result[rows] = _exp(chunk.sub_(peak)).sum(dim=-1).log_() + peak.squeeze(-1)
    return result, sums, None


def _has_fused_softmax(logits: Tensor) -> bool:
    """Return whether torch's softmax is faster than the operations that it consists of."""
    return not is_host(logits.device)


def _of_all_ranks(log_sum_T: Tensor, chosen_T: Tensor, region: Region) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the target's logit over the whole vocabulary from those of each shard."""
    peak = region.all_reduce_max(log_sum_T)
    total, chosen = region.all_reduce_sum(torch.stack((torch.exp(log_sum_T - peak), chosen_T.to(peak.dtype))))
    return total.log() + peak, chosen


def _logits_gradient(
    logits_TV: Tensor, log_sum_T: Tensor, rows_T: Tensor, held_T: Tensor, grad_T: Tensor, each: float
) -> None:
    """Overwrite the logits with (softmax - held x onehot - each) * grad.

    `log_sum` is the log-sum-exp of the whole vocabulary; `held` is the weight of the target where it is among these
    logits, else 0; `each` that of every token.
    """
    for rows, chunk in _in_chunks(logits_TV, log_sum_T.dtype):
        _exp(chunk.copy_(logits_TV[rows]).sub_(log_sum_T[rows, None]))
        if each:
            chunk.sub_(each)
        chunk.scatter_add_(1, rows_T[rows, None], -held_T[rows, None])
        logits_TV[rows] = chunk.mul_(grad_T[rows, None])


def _fused_logits_gradient(
    logits_TV: Tensor,
    log_share_T: Tensor,
    log_probability_T: Tensor,
    rows_T: Tensor,
    held_T: Tensor,
    grad_T: Tensor,
    each: float,
) -> None:
    """Compute `_logits_gradient` from the softmax over the logits here, which have a share of the whole vocabulary.

    What concerns one logit of each token is done for all tokens at once, from its probability here.
    """
    scale_T, each_T = torch.exp(log_share_T) * grad_T, -each * grad_T
    for rows, chunk in _in_chunks(logits_TV, scale_T.dtype):
        torch.softmax(logits_TV[rows], dim=-1, dtype=chunk.dtype, out=chunk)
        torch.addcmul(each_T[rows, None], chunk, scale_T[rows, None], out=logits_TV[rows])
    # in at least fp32: the difference may be small
    target_T = torch.exp(log_probability_T) * scale_T - held_T * grad_T + each_T
    logits_TV.scatter_(1, rows_T[:, None], target_T[:, None].to(logits_TV.dtype))


class LogitsBuffer:
    """The memory of the logits, lent from a forward pass to its backward pass and used again by the next.

    On a CPU writing to fresh memory of this size costs as much as a third of the product that fills it. While it is
    lent, another forward pass gets memory of its own. On an accelerator, whose allocator keeps freed memory, the layers
    may have it in between.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a [rows, columns] tensor with arbitrary contents."""
        memory, self._memory = self._memory, None
        wanted = rows * columns
        if memory is None or memory.numel() < wanted or memory.dtype != dtype or memory.device != device:
            memory = torch.empty(wanted, dtype=dtype, device=device)
        return memory[:wanted].view(rows, columns)

    def give_back(self, logits: Tensor) -> None:
        """End a loan."""
        self._memory = logits.view(-1) if is_host(logits.device) else None


def _logits(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, buffer: LogitsBuffer) -> Tensor:
    dtype = product_dtype(hidden_TD)
    logits = buffer.take(hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.dtype, hidden_TD.device)
    if dtype == hidden_TD.dtype:
        torch.mm(hidden_TD, weight_VD.t(), out=logits)
    else:
        logits.copy_(torch.mm(hidden_TD.to(dtype), weight_VD.to(dtype).t()))
    return logits if bias_V is None else logits.add_(bias_V)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_VD: nn.Parameter,
        bias_V: nn.Parameter | None,
        targets: Tensor,
        sink: GradientSink | None,
        buffer: LogitsBuffer,
        region: Region,
        vocab_size: int,
        smoothing: float,
        absent: int | None,
        differentiated: bool,
    ) -> Tensor:
        logits = _logits(region.gather(hidden).wait().reshape(-1, hidden.shape[-1]), weight_VD, bias_V, buffer)
        part = region.shard(vocab_size, even=False)
        wanted_T = targets.reshape(-1)
        without_T = torch.zeros_like(wanted_T, dtype=torch.bool) if absent is None else wanted_T == absent
        rows, elsewhere = local_rows(wanted_T.masked_fill(without_T, 0), part, vocab_size)
        elsewhere |= without_T
        # Megatron: the smoothed loss is (1 - s) * loss + s * mean over the vocabulary, s = smoothing * V / (V - 1).
        uniform_share = smoothing * vocab_size / max(1, vocab_size - 1)
        own_chosen = logits.gather(1, rows[:, None]).squeeze(1)
        own_log_sum, own_sum, probability = _log_sum_exp(logits, rows, own_chosen, with_sum=smoothing > 0.0)
        held = (~elsewhere).to(own_log_sum.dtype) * (1.0 - uniform_share)
        own_chosen = own_chosen * held
        if own_sum is not None:
            own_chosen += own_sum * (uniform_share / vocab_size)
        log_sum, chosen = _of_all_ranks(own_log_sum, own_chosen, region)
        if differentiated:
            ctx.save_for_backward(hidden, weight_VD, rows, held, own_log_sum, log_sum, probability)
            ctx.logits, ctx.sink, ctx.buffer, ctx.region = logits, sink, buffer, region
            ctx.each = uniform_share / vocab_size
        else:
            buffer.give_back(logits)
        return (log_sum - chosen).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, rows, held, own, log_sum, probability = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        assert logits is not None, "the vocabulary loss was differentiated twice; its logits are overwritten once"
        arriving = ctx.region.gather(hidden) if ctx.needs_input_grad[1] else None
        grad = grads[0].reshape(-1).to(log_sum.dtype)
        if probability is None:
            _logits_gradient(logits, log_sum, rows, held, grad, ctx.each)
        else:
            _fused_logits_gradient(logits, own - log_sum, probability, rows, held, grad, ctx.each)
        dtype = product_dtype(hidden)
        dh = torch.mm(logits.to(dtype), weight.to(dtype)).to(hidden.dtype)
        leaving = ctx.region.reduce(dh.view(*grads[0].shape, hidden.shape[-1]))
        db = logits.to(at_least_fp32(weight.dtype)).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        whole, dw = None if arriving is None else arriving.wait().reshape(-1, hidden.shape[-1]), None
        if whole is not None and ctx.sink is None:
            dw = torch.mm(logits.to(dtype).t(), whole.to(dtype)).to(weight.dtype)
        elif whole is not None:
            ctx.sink.accumulate_linear(weight, logits, whole, buffer_reused=True)
        ctx.buffer.give_back(logits)
        return leaving.wait(), dw, db, None, None, None, None, None, None, None, None


def vocabulary_loss(
    hidden: Tensor,
    weight: nn.Parameter,
    targets: Tensor,
    sink: GradientSink | None,
    buffer: LogitsBuffer,
    region: Region = SOLO,
    vocab_size: int | None = None,
    *,
    bias: nn.Parameter | None = None,
    smoothing: float = 0.0,
    absent: int | None = None,
) -> Tensor:
    """Return the cross-entropy of the next token, for each token.

    Shapes: hidden [..., D], a part of the sequence where the region holds parts; weight [V, D], the rows that are
        here; targets [...] (ids below the vocabulary's size), of the whole sequence; bias [V], the part that is here
        -> loss [...], in at least fp32.
    Memory: one [T, V] tensor of `buffer` from forward to backward, in the dtype of `hidden`.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the loss over a parallel vocabulary).

    `vocab_size` is that of the whole vocabulary: the rows of `weight` unless given. `smoothing` is the part of the
    target distribution that goes to the other tokens, and `absent` the label that marks no target.
    """
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    size = weight.shape[0] if vocab_size is None else vocab_size
    loss: Tensor = _VocabularyLoss.apply(
        hidden, weight, bias, targets, sink, buffer, region, size, smoothing, absent, differentiated
    )
    return loss


def whole_logits(
    hidden: Tensor,
    weight: nn.Parameter,
    region: Region,
    vocab_size: int,
    bias: nn.Parameter | None = None,
    *,
    row: int | None = None,
) -> Tensor:
    """Return the logits of the whole vocabulary on every rank, with autograd's gradient.

    Shapes: hidden [..., D], a part of the sequence where the region holds parts -> [..., V], of the whole sequence, or
        of its `row` alone.
    """
    entered = enter(hidden, region)
    logits = linear(entered if row is None else entered[row], weight, bias, None)
    part = region.shard(vocab_size, even=False)
    if part.size == vocab_size:
        return logits
    return region.all_reduce_sum(nn.functional.pad(logits, (part.start, vocab_size - part.stop)))


class OutputLayer(nn.Module):
    """The rows of this rank of the output weight [V, D], absent where it is the word embedding, and of a bias [V]."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        region: Region,
        *,
        weight: bool = True,
        bias: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.vocab_size, rows = vocab_size, region.shard(vocab_size, even=False).size
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, **factory)) if weight else None
        self.bias = nn.Parameter(torch.empty(rows, **factory)) if bias else None

    def placements(self) -> dict[str, Placement]:
        return {name: Split(0, self.vocab_size) for name, _ in self.named_parameters()}
