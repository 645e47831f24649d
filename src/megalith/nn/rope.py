"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in Megatron's two layouts.

Half rotation pairs element i with element i + R/2 of the rotated part; interleaved rotation (GPT-J) pairs 2i with
2i + 1. Only the first R = percent * K elements of a head of size K are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.nn.precision import at_least_fp32

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each position and element, [S, 1, 1, R] each, in the dtype of the heads."""


@dataclass(frozen=True)
class LongContext:
    """The scaling of rotary frequencies of Llama 3.1, for sequences longer than those of its pretraining.

    Waves longer than `original / low` are stretched by `factor`, those shorter than `original / high` stay, and between
    the two lies a mixture of both.
    Source: Megatron-LM `RotaryEmbedding._apply_scaling`, with its constants.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The frequencies to use, in radians per position."""
        waves = 2 * math.pi / frequencies
        share = (self.original / waves - self.low) / (self.high - self.low)
        stretched = torch.where(waves > self.original / self.low, frequencies / self.factor, frequencies)
        mixture = (1 - share) * stretched / self.factor + share * stretched
        between = (waves >= self.original / self.high) & (waves <= self.original / self.low)
        return torch.where(between, mixture, stretched)


def rotation(
    positions_S: Tensor,
    size: int,
    base: float,
    *,
    interleaved: bool,
    dtype: torch.dtype,
    scaling: LongContext | None = None,
) -> Rotation:
    """Return how each position turns a head; the same for all layers.

    Shapes: [S] -> 2 x [S, 1, 1, R], ready to be applied to [S, B, H, K]. R = size.
    Units:  angles are radians, computed in at least fp32.
    """
    work = at_least_fp32(dtype)
    exponents = torch.arange(0, size, 2, dtype=work, device=positions_S.device) / size
    frequencies = 1.0 / (base**exponents)
    angles = torch.outer(positions_S.to(work), frequencies if scaling is None else scaling.scaled(frequencies))
    doubled = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return doubled.cos().to(dtype)[:, None, None, :], doubled.sin().to(dtype)[:, None, None, :]


def rotate(x_SBHK: Tensor, turn: Rotation, *, interleaved: bool) -> Tensor:
    """Rotate the first R elements of each head. [S, B, H, K], 2 x [S, 1, 1, R] -> [S, B, H, K]."""
    cos, sin = turn
    size = cos.shape[-1]
    head, rest = x_SBHK[..., :size], x_SBHK[..., size:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = head * cos + turned * sin
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
