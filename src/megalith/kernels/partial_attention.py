"""Attention to a part of the keys, and the merge of such parts to attention over all keys.

For scores s_j = q k_j / sqrt(K) over a part A of the keys

    lse_A = log sum_{j in A} exp(s_j)            context_A = sum_{j in A} exp(s_j - lse_A) v_j

and for two parts (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889)

    lse = log(exp lse_A + exp lse_B)             context = exp(lse_A - lse) context_A + exp(lse_B - lse) context_B

The backward pass of a part needs the context and the lse of **all** keys and nothing else of the other parts:

    P_ij = exp(s_ij - lse_i)      D_i = dO_i . O_i      dv = P^T dO      dS = P * (dO v^T - D)
    dq = dS k / sqrt(K)           dk = dS^T q / sqrt(K)

With dropout P v becomes (P * M / (1 - p)) v with a random mask M, and dO v^T is masked alike; lse is unchanged.

A sink, one more key with the score z and no value, is a part with lse_B = z and context_B = 0 (Xiao et al. 2024,
arXiv:2309.17453). Its gradient is - sum_i exp(z - lse_i) D_i.

Shapes: q [B, H, Q, K], k and v [B, G, S, K] (H a multiple of G), lse [B, H, Q] in at least fp32; any strides. torch's
flash kernels are used where available; products in blocks of queries are their reference twin and the fallback: for
dropout, and for dtypes and devices without a flash kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.device import capability_of, is_host
from megalith.kernels.cpu.attention import BLOCK
from megalith.kernels.dropout import Dropout
from megalith.kernels.torch_private import flash_backward, flash_forward, has_cpu_flash, varlen_backward, varlen_forward

HiddenRows = Callable[[slice], Tensor]
"""The rows of a mask, True where masked out, for some of the queries: [Q, S] or [B, 1, Q, S]."""


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    hidden: HiddenRows | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    flash: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention to these keys alone.

    Args:
        causal: query i attends to keys 0 to i (as many keys as queries); else to all.
        window: with `causal`, to keys i - window to i only.
        hidden: instead of `causal`, a mask. The lse of a query without any key in this part is -inf.

    Returns:
        The context [B, H, Q, K] and the lse [B, H, Q].
    """
    q, k, v = map(_dense_heads, (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if flash and dropout is None and window is None and hidden is None and has_flash(q):
        return flash_forward(q, k, v, causal, scale)
    return _blocks_forward(q, *_expand_heads(q, k, v), _Mask(causal, window, hidden, scale), dropout)


def attend_part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    hidden: HiddenRows | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    flash: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a part of the keys, in the shapes of q, k, v and in their dtype or a wider one.

    `grad`, `context` and `lse` are those of all keys; the other arguments are those of `attend_part`.
    """
    grad, q, k, v = map(_dense_heads, (grad, q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    flash = flash and dropout is None and window is None and hidden is None and has_flash(q)
    if flash and not is_host(q.device):
        return flash_backward(grad, q, k, v, context, lse, causal, scale)
    heads = _expand_heads(q, k, v)  # on a CPU flash attention computes the heads of a group on one thread
    if flash:
        dq, dk, dv = flash_backward(grad, q, *heads, context, lse, causal, scale)
    else:
        mask = _Mask(causal, window, hidden, scale)
        dq, dk, dv = _blocks_backward(grad, q, *heads, context, lse, mask, dropout)
    return dq, _sum_groups(dk, k.shape[1]), _sum_groups(dv, k.shape[1])


class _GroupedAttention(torch.autograd.Function):
    """Attention to all keys; keeps key-value heads as they are, without copies for their groups, and no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
        dropout: Dropout | None,
    ) -> Tensor:
        ctx.options = {"causal": causal, "window": window, "scale": scale, "dropout": dropout}
        context, lse = attend_part(q, k, v, **ctx.options)
        if sink is not None:
            add_sink(context, lse, sink)
        ctx.save_for_backward(q, k, v, context, lse, sink)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, lse, sink = ctx.saved_tensors
        dq, dk, dv = attend_part_backward(grads[0], q, k, v, context, lse, **ctx.options)
        dq, dk, dv = (d.to(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))
        return dq, dk, dv, sink_gradient(sink, lse, context, grads[0]), None, None, None, None


def attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute attention to all keys as `attend_part` does, and to a sink. Shapes as of this module -> [B, H, Q, K].

    The bits of both passes on a CPU are those of SDPA on copies. Reference twin: `nn.attend.attend_fused`.
    """
    context: Tensor = _GroupedAttention.apply(q, k, v, sink_H, causal, window, scale, dropout)
    return context


def add_sink(context: Tensor, lse: Tensor, sink_H: Tensor) -> None:
    """Add a sink to (context, lse) in place. [.., H, Q, K], [.., H, Q], [H]."""
    with_sink = torch.logaddexp(lse, sink_H.to(lse.dtype)[:, None])
    context *= torch.exp(lse - with_sink)[..., None]
    lse.copy_(with_sink)


def sink_gradient(sink_H: Tensor | None, lse: Tensor, context: Tensor, grad: Tensor) -> Tensor | None:
    """Return the gradient of the sinks [H], given what all queries got; shapes as of `add_sink`."""
    if sink_H is None:
        return None
    lost = torch.exp(sink_H.to(lse.dtype)[:, None] - lse) * (grad.to(lse.dtype) * context.to(lse.dtype)).sum(-1)
    return -lost.sum(-1).view(-1, len(sink_H)).sum(0).to(sink_H.dtype)


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
    window: int | None
    hidden: HiddenRows | None
    scale: float

    def keys(self, rows: slice, length: int) -> slice:
        """Return the keys that any of the queries `rows` attends to."""
        if not self.causal or self.hidden is not None:
            return slice(0, length)
        return slice(0 if self.window is None else max(0, rows.start - self.window), rows.stop)

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """Return scores of the queries `rows` to the keys of `keys`, -inf where masked."""
        keys = self.keys(rows, k.shape[2])
        scores = torch.matmul(q[:, :, rows] * self.scale, k[:, :, keys].transpose(2, 3)).to(_wide(q.dtype))
        if self.hidden is not None:
            scores.masked_fill_(self.hidden(rows), -math.inf)
        elif self.causal:
            size, number = scores.shape[2:]
            later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            scores[..., number - size :].masked_fill_(later, -math.inf)
            if self.window is not None and self.window < number - 1:
                gone = torch.ones(size, number, dtype=torch.bool, device=q.device).tril(number - size - self.window - 1)
                scores.masked_fill_(gone, -math.inf)
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
        context[:, :, rows] = torch.matmul(probabilities.to(q.dtype), v[:, :, seen.keys(rows, v.shape[2])])
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
        keys = seen.keys(rows, k.shape[2])
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


def has_varlen(q: Tensor, *, window: bool = False, sink: bool = False) -> bool:
    """Return whether torch has `attend_varlen`'s kernel for such tensors, and for a window or a sink."""
    if is_host(q.device) or not has_flash(q):
        return False
    return capability_of(q.device).has_windowed_flash or not (window or sink)


class _VarlenAttention(torch.autograd.Function):
    """Causal attention within sequences or documents; keeps q, k, v, context, lse and the dropout state."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        offsets: Tensor | None,
        longest: int,
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Tensor:
        places = (offsets, offsets, longest, longest, dropout)
        context, lse, *state = varlen_forward(q, k, v, *places, scale=scale, window=window)
        if sink is not None:
            add_sink(context.transpose(-3, -2), lse, sink)
        ctx.save_for_backward(q, k, v, context, lse, sink, offsets, *state)
        ctx.options = longest, dropout, scale, window
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, lse, sink, offsets, *state = ctx.saved_tensors
        longest, dropout, scale, window = ctx.options
        kept = (q, k, v, context, lse, offsets, offsets, longest, longest, dropout, *state)
        dq, dk, dv = varlen_backward(grads[0].contiguous(), *kept, scale=scale, window=window)
        dsink = sink_gradient(sink, lse, *(x.transpose(-3, -2) for x in (context, grads[0])))
        return dq, dk, dv, dsink, None, None, None, None, None


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    longest: int,
    *,
    dropout: float = 0.0,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax(scale q k^T) v within each document or sequence with torch's flash kernel on GPUs.

    Shapes: [T, H, K], 2 x [T, G, K] -> [T, H, K], tokens of all documents packed; `offsets` (int32, on the device)
    are the starts of the documents, and T. Or [B, S, H, K], 2 x [B, S, G, K] -> [B, S, H, K] without offsets. In fp16
    or bf16. Memory: no scores, no mask. Reference twins: `nn.attend.by_document`, `nn.attend.attend_fused`.
    """
    inputs = (_dense_heads(x) if offsets is None else x.contiguous() for x in (q, k, v))
    context: Tensor = _VarlenAttention.apply(*inputs, sink_H, offsets, longest, dropout, scale, window)
    return context


def attend_last(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, sink_H: Tensor | None = None
) -> Tensor:
    """Attend causally from the last Q of S positions with `attend_varlen`'s kernel, which keeps nothing for gradients.

    Shapes: [B, Q, H, K], 2 x [B, S, G, K] -> [B, Q, H, K]. The kernel aligns causality and window with the last key.
    """
    places = (None, None, q.shape[1], k.shape[1], 0.0)
    context, lse, *_ = varlen_forward(*map(_dense_heads, (q, k, v)), *places, scale=scale, window=window)
    if sink_H is not None:
        add_sink(context.transpose(1, 2), lse, sink_H)
    return context
