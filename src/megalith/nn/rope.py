"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in Megatron's two layouts.

Half rotation pairs element i with element i + R/2 of the rotated part; interleaved rotation (GPT-J) pairs 2i with
2i + 1. Only the first R = percent * K elements of a head of size K are rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.nn.precision import at_least_fp32


def rotary_size(head_size: int, percent: float) -> int:
    """Return R, the number of elements of a head that are rotated."""
    return int(head_size * percent)


def rotary_angles(positions_S: Tensor, size: int, base: float, *, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """Return the angle of each position and element.

    Shapes: [S] -> [S, 1, 1, R], ready to be applied to [S, B, H, K].
    Units: radians, in at least fp32.
    """
    work = at_least_fp32(dtype)
    exponents = torch.arange(0, size, 2, dtype=work, device=positions_S.device) / size
    angles = torch.outer(positions_S.to(work), 1.0 / (base**exponents))
    doubled = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return doubled[:, None, None, :]


def rotate(x_SBHK: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first R elements of each head. [S, B, H, K], [S, 1, 1, R] -> [S, B, H, K]."""
    size = angles.shape[-1]
    head, rest = x_SBHK[..., :size], x_SBHK[..., size:]
    cos, sin = angles.cos().to(x_SBHK.dtype), angles.sin().to(x_SBHK.dtype)
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = head * cos + turned * sin
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
