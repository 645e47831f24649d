"""Attention on a CPU for cases in which torch has no fused kernel or a slow one.

| function                   | for                                                 | kept for the backward pass      |
|----------------------------|-----------------------------------------------------|---------------------------------|
| `blocked_causal_attention` | causal masks in bf16, with dropout or with a window | q, k, v                         |
| `whole_attention`          | a bias that learns, masks with dropout, few scores  | q, k, v and the probabilities   |

    P = softmax(scale q k^T + bias)      dP = dO v^T         dS = P * (dP - sum_j dP_ij P_ij)
    O = P v          dv = P^T dO         dq = scale dS k     dk = scale dS^T q        dbias = dS, summed where shared

With dropout P v becomes (P * M / (1 - p)) v for a random mask M, and dP is masked alike. The masks are drawn again in
the backward pass from a seed; the seed comes from torch's default stream, so that a resumed run draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megalith.kernels.dropout import Dropout, DropoutMasks
from megalith.kernels.torch_private import softmax_backward

BLOCK = 128  # queries per block: [N, 128, S] scores of a few heads fit into the cache


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def _first(start: int, window: int | None) -> int:
    """Return the first key that any query from `start` on attends to."""
    return 0 if window is None else max(0, start - window)


def _part(x_NSK: Tensor, rows: slice) -> Tensor:
    """Return some rows in the layout that is fastest for matrix products of this dtype.

    In bf16 operands are made contiguous before they are transposed: torch 2.13 passes the transpose of a contiguous
    matrix to oneDNN as it is, but copies that of a slice element by element, which costs four times a copy of rows. The
    bits are the same. In fp32 MKL accepts slices.
    """
    part = x_NSK[:, rows]
    return part.contiguous() if x_NSK.dtype == torch.bfloat16 else part


def _probabilities(q_NQK: Tensor, k_NSK: Tensor, mask_QQ: Tensor, window: int | None) -> Tensor:
    """Return probabilities of Q queries over S keys; the last key is that of the last query. -> [N, Q, S]."""
    scores = torch.bmm(q_NQK, k_NSK.transpose(1, 2))
    size, keys = scores.shape[1:]
    scores[:, :, keys - size :] += mask_QQ[:size, :size]
    if window is not None and window < keys - 1:
        gone = torch.ones(size, keys, dtype=torch.bool, device=scores.device).tril(keys - size - window - 1)
        scores.masked_fill_(gone, -math.inf)
    return torch.softmax(scores, dim=-1)


class _BlockedAttention(torch.autograd.Function):
    """Causal attention in blocks of queries: q [N, S, K], N = batch * heads, already scaled; k and v [M, S, K].

    N is a multiple of M = batch * groups; keys and values are repeated for the query heads of their group in each pass
    and kept as they are.

    Queries in block [s, e) attend to keys below e only, so a block takes three products on [N, e - s, e] scores, with
    the triangle inside the block masked. The backward pass recomputes the probabilities from q and k. With a sliding
    window of w keys before each query, only keys from s - w on are used.

    Why: in bf16 torch's flash kernel for CPUs runs its small products at a fraction of the speed of `bmm`, and it does
    not support dropout. Measured on two threads (benchmarks/results/attention-cpu.json): in bf16 2.3 times as fast
    at 512 tokens, level in the backward pass at 2048; in fp32 without dropout 0.7 to 1.2 times, so SDPA is used there.
    In half precision scores and probabilities are rounded to the dtype of the inputs, as in Megatron's local attention.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout | None, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.dropout, ctx.window = dropout, window
        k, v = _expand(k, q), _expand(v, q)
        masks = None if dropout is None else dropout.masks(q.device)
        mask = _block_mask(q)
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)  # positions first, as the caller has them
        for start, end in _blocks(q.shape[1]):
            keys = slice(_first(start, window), end)
            probabilities = _probabilities(_part(q, slice(start, end)), _part(k, keys), mask, window)
            if masks is not None:
                probabilities *= masks.mask(probabilities)
            out[:, start:end] = torch.bmm(probabilities, v[:, keys])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, *kv = ctx.saved_tensors
        k, v = (_expand(x, q) for x in kv)
        masks = None if ctx.dropout is None else ctx.dropout.masks(q.device)
        mask, grad = _block_mask(q), grads[0]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for start, end in _blocks(q.shape[1]):
            rows, keys = slice(start, end), slice(_first(start, ctx.window), end)
            q_block, grad_block, k_block, v_block = _part(q, rows), _part(grad, rows), _part(k, keys), _part(v, keys)
            probabilities = _probabilities(q_block, k_block, mask, ctx.window)
            d_probabilities = torch.bmm(grad_block, v_block.transpose(1, 2))
            dropped = probabilities
            if masks is not None:
                kept = masks.mask(probabilities)
                dropped = probabilities * kept
                d_probabilities *= kept
            _accumulate(dv[:, keys], torch.bmm(dropped.transpose(1, 2), grad_block), end - start)
            d_scores = softmax_backward(d_probabilities, probabilities)
            dq[:, rows] = torch.bmm(d_scores, k_block)
            _accumulate(dk[:, keys], torch.bmm(d_scores.transpose(1, 2), q_block), end - start)
        return dq, _sum_groups(dk, len(kv[0])), _sum_groups(dv, len(kv[1])), None, None


def _accumulate(total_NSK: Tensor, part_NSK: Tensor, new: int) -> None:
    """Add to the rows of a sum but the last `new`, which have no value yet and get one."""
    old = total_NSK.shape[1] - new
    total_NSK[:, :old] += part_NSK[:, :old]
    total_NSK[:, old:] = part_NSK[:, old:]


def _expand(x_MSK: Tensor, q_NSK: Tensor) -> Tensor:
    """Repeat each key-value head for the query heads of its group. [M, S, K] -> [N, S, K]."""
    repeats = q_NSK.shape[0] // x_MSK.shape[0]
    return x_MSK if repeats == 1 else x_MSK.repeat_interleave(repeats, dim=0)


def _sum_groups(x_NSK: Tensor, heads: int) -> Tensor:
    """Sum over the query heads of each group. [N, S, K] -> [heads, S, K]."""
    return x_NSK if len(x_NSK) == heads else x_NSK.unflatten(0, (heads, -1)).sum(1)


def _block_mask(q: Tensor) -> Tensor:
    return torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype, device=q.device).triu_(1)


def blocked_causal_attention(
    q_SBHK: Tensor,
    k_SBGK: Tensor,
    v_SBGK: Tensor,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal softmax(scale q k^T) v over equally many queries and keys, with dropout of the probabilities.

    Shapes: [S, B, H, K], 2 x [S, B, G, K], H a multiple of G -> [S, B, H, K].
    Memory: q, k and v are kept for the backward pass; no scores and no dropout masks.
    Reference twin: `nn.attend.attend_fused`.

    `scale` is 1 / sqrt(K) unless given; with a `window` each query attends to itself and `window` keys before it.
    """
    length, batch, heads, size = q_SBHK.shape
    flat = [x.permute(1, 2, 0, 3).reshape(-1, length, size) for x in (q_SBHK, k_SBGK, v_SBGK)]
    scaled = flat[0] * (size**-0.5 if scale is None else scale)
    out: Tensor = _BlockedAttention.apply(scaled, *flat[1:], Dropout.draw(dropout), window)
    return out.transpose(0, 1).view(length, batch, heads, size)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None, scale: float, out: Tensor) -> None:
    """Compute the scores of one sample: [H, Q, K], [H, S, K], [H, Q, S], [1 or H, 1 or Q, S] -> out [H, Q, S].

    Masked scores are far below all others instead of -inf, so that a query without a key gets meaningless but finite
    numbers instead of NaN.
    """
    if hidden is not None:
        out.copy_(bias) if bias is not None else out.zero_()
        bias = out.masked_fill_(hidden, torch.finfo(out.dtype).min / 2)
    if bias is None:
        _scaled_product(q, k.transpose(1, 2), scale, out)
    else:
        torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale, out=out)


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Compute out = scale a b for two batches of matrices."""
    torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def _of_sample(x: Tensor, number: int) -> Tensor:
    """Return the part of one sample from [B, H, Q, S], or [H, Q, S] that all samples share."""
    return x if x.dim() < 4 else x[number]


class _WholeAttention(torch.autograd.Function):
    """Attention with whole score matrices: [B, H, Q, K], 2 x [B, H, S, K], bias [H, Q, S] or [B, H, Q, S], mask.

    Why: torch SDPA falls back to separate operations in these cases, each of which allocates a matrix [B, H, Q, S], and
    some of which search for rows without a key. Here the product is added to the bias, the softmax and its backward
    pass are in place, and only P is kept. Samples are computed one after the other, in matrices of one sample.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        hidden: Tensor | None,
        dropout: Dropout | None,
        scale: float,
    ) -> Tensor:
        probabilities, out = q.new_empty(*q.shape[:3], k.shape[2]), torch.empty_like(q)
        masks = None if dropout is None else dropout.masks(q.device)
        for number, kept in enumerate(probabilities):
            added, gone = (None if x is None else _of_sample(x, number) for x in (bias, hidden))
            _scores(q[number], k[number], added, gone, scale, kept)
            torch.softmax(kept, dim=-1, out=kept)
            out[number] = torch.bmm(_dropped(kept, masks)[0], v[number])
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.dropout, ctx.scale, ctx.bias_shape = dropout, scale, None if bias is None else bias.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        dbias = q.new_zeros(ctx.bias_shape) if ctx.needs_input_grad[3] else None
        masks = None if ctx.dropout is None else ctx.dropout.masks(q.device)
        work = torch.empty_like(probabilities[0])
        for number, kept in enumerate(probabilities):
            grad = grads[0][number]
            dropped, mask = _dropped(kept, masks)
            torch.bmm(dropped.transpose(1, 2), grad, out=dv[number])
            torch.bmm(grad, v[number].transpose(1, 2), out=work)
            if mask is not None:
                work *= mask
            softmax_backward(work, kept, out=work)
            if dbias is not None:
                _of_sample(dbias, number).add_(work)
            _scaled_product(work, k[number], ctx.scale, dq[number])
            _scaled_product(work.transpose(1, 2), q[number], ctx.scale, dk[number])
        return dq, dk, dv, dbias, None, None, None


def _dropped(probabilities: Tensor, masks: DropoutMasks | None) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities after dropout, and their mask (None without dropout)."""
    if masks is None:
        return probabilities, None
    mask = masks.mask(probabilities)
    return probabilities * mask, mask


def whole_attention(
    q_QBHK: Tensor,
    k_SBHK: Tensor,
    v_SBHK: Tensor,
    *,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
    scale: float,
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v, with dropout of the probabilities.

    Shapes: [Q, B, H, K], 2 x [S, B, H, K], bias [H, Q, S] or [B, H, Q, S] -> [Q, B, H, K].
    Memory: q, k, v and the probabilities are kept for the backward pass; no dropout masks.
    Reference twin: `nn.attend.attend_fused`.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_QBHK, k_SBHK, v_SBHK))
    context: Tensor = _WholeAttention.apply(q, k, v, bias, hidden, Dropout.draw(dropout), scale)
    return context.permute(2, 0, 1, 3)
