"""Causal attention inside documents of many lengths at once, by torch's flash kernel on GPUs.

Shapes: T tokens of all documents end to end, H heads, K head size; `offsets` [documents + 1] int32 say where they lie.
Reference twin: `nn.attend.by_document`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.kernels.partial_attention import has_flash


def has_varlen(q: Tensor) -> bool:
    """Whether torch has this kernel for such tensors."""
    return q.device.type == "cuda" and has_flash(q)


class _VarlenAttention(torch.autograd.Function):
    """Keeps q, k, v, the context, its lse and the state of the dropout."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, dropout: float, scale: float
    ) -> Tensor:
        places = (offsets, offsets, longest, longest, dropout)
        context, lse, *state, _ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *places,
            True,  # causal
            False,  # the mask of the dropout is not wanted
            scale=scale,
        )
        ctx.save_for_backward(q, k, v, context, lse, offsets, *state)
        ctx.options = longest, dropout, scale
        return torch.as_tensor(context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, context, lse, offsets, *state = ctx.saved_tensors
        longest, dropout, scale = ctx.options
        places = (offsets, offsets, longest, longest, dropout)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, context, lse, *places, True, *state, scale=scale
        )
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
    """Causal softmax(scale q k^T) v inside each document. 3 x [T, H, K] -> [T, H, K].

    Args:
        q_THK, k_THK, v_THK: fp16 or bf16 on a GPU.
        offsets: where each document begins, and the end of the last one, int32 on the same device.
        longest: tokens of the longest document.
        dropout: of the probabilities.
        scale: of the scores.
    """
    inputs = (x.contiguous() for x in (q_THK, k_THK, v_THK))
    context: Tensor = _VarlenAttention.apply(*inputs, offsets, longest, dropout, scale)
    return context
