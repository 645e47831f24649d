"""Causal attention inside documents of many lengths at once, by torch's flash kernel on GPUs.

Shapes: T tokens of all documents end to end, H heads, K head size; `offsets` [documents + 1] int32 say where they lie.
Reference twin: `nn.attention.by_document`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.kernels.partial_attention import has_flash


def has_varlen(q: Tensor) -> bool:
    """Whether torch has this kernel for such tensors."""
    return q.device.type == "cuda" and has_flash(q)


def attend_varlen(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    offsets: Tensor,
    longest: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Causal softmax(scale q k^T) v inside each document. 3 x [T, H, K] -> [T, H, K]; differentiable.

    Args:
        q_THK, k_THK, v_THK: fp16 or bf16 on a GPU.
        offsets: where each document begins, and the end of the last one, int32 on the same device.
        longest: tokens of the longest document.
        dropout: of the probabilities.
        scale: 1 / sqrt(K) unless given.
    """
    found = torch.ops.aten._flash_attention_forward(
        *(x.contiguous() for x in (q_THK, k_THK, v_THK)),
        offsets,
        offsets,
        longest,
        longest,
        dropout,
        True,  # causal
        False,  # no mask of the dropout is wanted
        scale=scale,
    )
    context: Tensor = found[0]
    return context
