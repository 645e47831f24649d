"""Attention on a CPU over whole matrices of scores, where torch has no fused kernel: a bias that learns, dropout.

    P = softmax(scale q k^T + bias)      dP = dO v^T         dS = P * (dP - sum_j dP_ij P_ij)
    O = P v          dv = P^T dO         dq = scale dS k     dk = scale dS^T q        dbias = dS, summed where shared

With dropout P v becomes (P * M / (1 - p)) v for a random mask M, and dP is masked alike. The masks are drawn again in
the backward pass from a seed, which comes from torch's default stream, so that a resumed run draws the same.

Why: torch SDPA falls back to separate operations here. Each of them fills a fresh matrix [B, H, Q, S], and more of them
look for rows without a key. Here the bias is where the product is added, the softmax and its backward pass happen in
place, and P alone is kept. Samples follow each other, so that other matrices are as large as those of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith.kernels.dropout import Dropout, DropoutMasks


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None, scale: float, out: Tensor) -> None:
    """Of one sample: [H, Q, K], [H, S, K], [H, Q, S], [1 or H, 1 or Q, S] -> out [H, Q, S].

    What is hidden gets a score far below all others, and not minus infinity, so that a query without a key gets
    numbers too: they mean nothing, but they cannot spread as NaN.
    """
    if hidden is not None:
        out.copy_(bias) if bias is not None else out.zero_()
        bias = out.masked_fill_(hidden, torch.finfo(out.dtype).min / 2)
    if bias is None:
        _scaled_product(q, k.transpose(1, 2), scale, out)
    else:
        torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale, out=out)


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """out = scale a b of two batches of matrices."""
    torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def _of_sample(x: Tensor, number: int) -> Tensor:
    """Of [B, H, Q, S] or, the same for all samples, [H, Q, S]."""
    return x if x.dim() < 4 else x[number]


class _WholeAttention(torch.autograd.Function):
    """On [B, H, Q, K], 2 x [B, H, S, K], a bias [H, Q, S] or [B, H, Q, S] and what is hidden."""

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
            torch.ops.aten._softmax_backward_data.out(work, kept, -1, q.dtype, grad_input=work)
            if dbias is not None:
                _of_sample(dbias, number).add_(work)
            _scaled_product(work, k[number], ctx.scale, dq[number])
            _scaled_product(work.transpose(1, 2), q[number], ctx.scale, dk[number])
        return dq, dk, dv, dbias, None, None, None


def _dropped(probabilities: Tensor, masks: DropoutMasks | None) -> tuple[Tensor, Tensor | None]:
    """The probabilities that are left, and the mask of them."""
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
    """softmax(scale q k^T + bias) v, with dropout of the probabilities.

    Shapes: [Q, B, H, K], 2 x [S, B, H, K], bias [H, Q, S] or [B, H, Q, S] -> [Q, B, H, K].
    Memory: q, k, v and the probabilities are kept for the backward pass; no dropout masks.
    Reference twin: `nn.attend.attend_fused`.

    Args:
        q_QBHK, k_SBHK, v_SBHK: queries, keys and values.
        bias: added to the scaled scores; it gets a gradient.
        hidden: True where a query may not look, [Q, S] or [B, 1, Q or 1, S].
        dropout: probability with which a weight becomes zero.
        scale: of the products of queries and keys.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_QBHK, k_SBHK, v_SBHK))
    context: Tensor = _WholeAttention.apply(q, k, v, bias, hidden, Dropout.draw(dropout), scale)
    return context.permute(2, 0, 1, 3)
