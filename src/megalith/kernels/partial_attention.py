"""Attention to a part of the keys, and the merge of such parts to attention over all keys.

For scores s_j = q k_j / sqrt(K) over a part A of the keys

    lse_A = log sum_{j in A} exp(s_j)            context_A = sum_{j in A} exp(s_j - lse_A) v_j

and for two parts (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889)

    lse = log(exp lse_A + exp lse_B)             context = exp(lse_A - lse) context_A + exp(lse_B - lse) context_B

The backward pass of a part needs the context and the lse of **all** keys and nothing else of the other parts:

    P_ij = exp(s_ij - lse_i)      D_i = dO_i . O_i      dv = P^T dO      dS = P * (dO v^T - D)
    dq = dS k / sqrt(K)           dk = dS^T q / sqrt(K)

With dropout P v becomes (P * M / (1 - p)) v with a random mask M, and dO v^T is masked alike; lse is unchanged.

Shapes: q [B, H, Q, K], k and v [B, G, S, K] (H a multiple of G), lse [B, H, Q] in at least fp32; any strides. torch's
flash kernels are used where available; products in blocks of queries are their reference twin and the fallback: for
dropout, and for dtypes and devices without a flash kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.device import capability_of, is_host
from megalith.kernels.cpu.attention import BLOCK
from megalith.kernels.dropout import Dropout
from megalith.kernels.torch_private import flash_backward, flash_forward, has_cpu_flash, varlen_backward, varlen_forward


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    hidden: Tensor | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    flash: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention to these keys alone.

    Args:
        causal: query i attends to keys 0 to i (as many keys as queries); else to all.
        hidden: instead of `causal`, a mask [Q, S] or [B, 1, Q, S], True where masked out. The lse of a query without
            any key in this part is -inf.

    Returns:
        The context [B, H, Q, K] and the lse [B, H, Q].
    """
    q, k, v = map(_dense_heads, (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if flash and dropout is None and hidden is None and has_flash(q):
        return flash_forward(q, k, v, causal, scale)
    return _blocks_forward(q, *_expand_heads(q, k, v), _Mask(causal, hidden, scale), dropout)


def attend_part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    hidden: Tensor | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    flash: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a part of the keys, in the shapes of q, k, v and in their dtype or a wider one.

    `grad`, `context` and `lse` are those of all keys; the other arguments are those of `attend_part`.
    """
    grad, q, k, v = map(_dense_heads, (grad, q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    flash = flash and dropout is None and hidden is None and has_flash(q)
    if flash and not is_host(q.device):
        return flash_backward(grad, q, k, v, context, lse, causal, scale)
    heads = _expand_heads(q, k, v)  # on a CPU flash attention computes the heads of a group on one thread
    if flash:
        dq, dk, dv = flash_backward(grad, q, *heads, context, lse, causal, scale)
    else:
        dq, dk, dv = _blocks_backward(grad, q, *heads, context, lse, _Mask(causal, hidden, scale), dropout)
    return dq, _sum_groups(dk, k.shape[1]), _sum_groups(dv, k.shape[1])


class _GroupedAttention(torch.autograd.Function):
    """Attention to all keys by the flash kernel; keeps key-value heads as they are, without copies for their groups."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        context, lse = attend_part(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, context, lse)
        ctx.options = causal, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        causal, scale = ctx.options
        return *attend_part_backward(grads[0], *ctx.saved_tensors, causal=causal, scale=scale), None, None


def attend_groups(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Compute attention to all keys by the flash kernel of `has_flash`. Shapes as of this module -> [B, H, Q, K].

    The bits of both passes on a CPU are those of SDPA on copies. Reference twin: `nn.attend.attend_fused`.
    """
    context: Tensor = _GroupedAttention.apply(q, k, v, causal, scale)
    return context


def merge_parts(context: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a part to (context, lse) in place; both are in at least fp32."""
    share = torch.sigmoid(more_lse - lse)[..., None]
    context.lerp_(more.to(context.dtype), share)
    lse.copy_(torch.logaddexp(lse, more_lse))


def has_flash(q: Tensor) -> bool:
    """Return whether torch has a flash kernel for such tensors that returns the lse."""
    if is_host(q.device):
        return has_cpu_flash()
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0  # torch pads other head sizes before this operation
        and q.shape[-1] <= 256
        and "flash" in capability_of(q.device).attention
    )


def _expand_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with one head per query head."""
    repeats = q.shape[1] // k.shape[1]
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads of each group: [B, H, S, K] -> [B, G, S, K]."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


@dataclass(frozen=True)
class _Mask:
    """Mask of the keys that the queries may attend to, and the scale of the scores."""

    causal: bool
    hidden: Tensor | None
    scale: float

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """Return scores of the queries `rows`, -inf where masked; under a causal mask only to the last seen key."""
        causal = self.causal and self.hidden is None
        keys = k[:, :, : rows.stop] if causal else k
        scores = torch.matmul(q[:, :, rows] * self.scale, keys.transpose(2, 3)).to(_wide(q.dtype))
        if causal:
            size = rows.stop - rows.start
            later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            scores[..., rows.start :].masked_fill_(later, -math.inf)
        elif self.hidden is not None:
            scores.masked_fill_(self.hidden[..., rows, :], -math.inf)
        return scores


def _blocks_forward(q: Tensor, k: Tensor, v: Tensor, seen: _Mask, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    context, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q.dtype))
    masks = None if dropout is None else dropout.masks(q.device)
    for rows in _blocks(q.shape[2]):
        scores = seen.scores(q, k, rows)
        lse[:, :, rows] = scores.logsumexp(-1)
        finite = lse[:, :, rows, None].clamp(min=torch.finfo(lse.dtype).min)  # for queries without a key
        probabilities = (scores - finite).exp()
        if masks is not None:
            probabilities *= masks.mask(probabilities)
        context[:, :, rows] = torch.matmul(probabilities.to(q.dtype), v[:, :, : scores.shape[-1]])
    return context, lse


def _blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor, lse: Tensor, seen: _Mask, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    delta = (grad.to(wide) * context.to(wide)).sum(-1, keepdim=True)
    masks = None if dropout is None else dropout.masks(q.device)
    for rows in _blocks(q.shape[2]):
        scores = seen.scores(q, k, rows)
        keys = slice(scores.shape[-1])
        probabilities = (scores - lse[:, :, rows, None]).exp()
        d_probabilities = torch.matmul(grad[:, :, rows], v[:, :, keys].transpose(2, 3)).to(wide)
        dropped = probabilities
        if masks is not None:
            kept = masks.mask(probabilities)
            dropped = probabilities * kept
            d_probabilities *= kept
        dv[:, :, keys] += torch.matmul(dropped.to(q.dtype).transpose(2, 3), grad[:, :, rows])
        d_scores = (probabilities * (d_probabilities - delta[:, :, rows]) * seen.scale).to(q.dtype)
        dq[:, :, rows] = torch.matmul(d_scores, k[:, :, keys])
        dk[:, :, keys] += torch.matmul(d_scores.transpose(2, 3), q[:, :, rows])
    return dq, dk, dv


def has_varlen(q: Tensor) -> bool:
    """Return whether torch has `attend_varlen`'s kernel for such tensors."""
    return not is_host(q.device) and has_flash(q)


class _VarlenAttention(torch.autograd.Function):
    """Causal attention within documents of many lengths; keeps q, k, v, context, lse and the dropout state."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, dropout: float, scale: float
    ) -> Tensor:
        places = (offsets, offsets, longest, longest, dropout)
        context, lse, *state = varlen_forward(q, k, v, *places, scale=scale)
        ctx.save_for_backward(q, k, v, context, lse, offsets, *state)
        ctx.options = longest, dropout, scale
        return torch.as_tensor(context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, context, lse, offsets, *state = ctx.saved_tensors
        longest, dropout, scale = ctx.options
        places = (offsets, offsets, longest, longest, dropout)
        dq, dk, dv = varlen_backward(grads[0].contiguous(), q, k, v, context, lse, *places, *state, scale=scale)
        return dq, dk, dv, None, None, None, None


def attend_varlen(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    offsets: Tensor,
    longest: int,
    *,
    dropout: float = 0.0,
    scale: float,
) -> Tensor:
    """Compute causal softmax(scale q k^T) v within each document with torch's flash kernel on GPUs. 3 x [T, H, K] ->
    [T, H, K].

    T tokens of all documents are packed, in fp16 or bf16; `offsets` (int32, on the device) are the starts of the
    documents, and T. Reference twin: `nn.attend.by_document`.
    """
    inputs = (x.contiguous() for x in (q_THK, k_THK, v_THK))
    context: Tensor = _VarlenAttention.apply(*inputs, offsets, longest, dropout, scale)
    return context
