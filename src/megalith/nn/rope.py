"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in Megatron's two layouts.

Half rotation pairs element i with element i + R/2 of the rotated part; interleaved rotation (GPT-J) pairs 2i with
2i + 1. Only the first R = percent * K elements of a head of size K are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalith.nn.precision import at_least_fp32

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each position and element, [S, 1, 1, R] each, in the dtype of the heads."""


class Scaling(Protocol):
    """A change of the rotary frequencies for sequences longer than those of the pretraining."""

    @property
    def amplitude(self) -> float:
        """Factor of the rotated part of a head."""
        ...

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies to use, in radians per position, [R / 2]."""
        ...


@dataclass(frozen=True)
class Interpolation:
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595), on top of another scaling or of none."""

    factor: float
    of: Scaling | None = None

    @property
    def amplitude(self) -> float:
        return 1.0 if self.of is None else self.of.amplitude

    def scaled(self, frequencies: Tensor) -> Tensor:
        return (frequencies if self.of is None else self.of.scaled(frequencies)) / self.factor


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv:2309.00071).

    A frequency that turns at least `beta_fast` times over the `original` length stays, one that turns at most
    `beta_slow` times is divided by `factor`, and between the two lies a mixture of both, linear in the number of the
    frequency. Rotated heads grow by `amplitude`, the temperature of the paper.

    Attributes:
        mscale, mscale_all_dim: the amplitude is the quotient of 0.1 x mscale x ln(factor) + 1 of both.
        rounded: the bounds of the mixture are whole numbers.
    """

    factor: float
    original: int
    base: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounded: bool = True

    @property
    def amplitude(self) -> float:
        if self.factor <= 1.0:
            return 1.0
        growth = 0.1 * math.log(self.factor)
        return (growth * self.mscale + 1.0) / (growth * self.mscale_all_dim + 1.0)

    def _number_of(self, turns: float, size: int) -> float:
        """Return the fractional index of the frequency that turns this often over the original length."""
        return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def scaled(self, frequencies: Tensor) -> Tensor:
        size = 2 * frequencies.shape[0]
        low, high = self._number_of(self.beta_fast, size), self._number_of(self.beta_slow, size)
        if self.rounded:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low if high != low else 0.001
        numbers = torch.arange(size // 2, dtype=frequencies.dtype, device=frequencies.device)
        stretched = ((numbers - low) / width).clamp(0, 1)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)


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

    @property
    def amplitude(self) -> float:
        return 1.0

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per position."""
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
    scaling: Scaling | None = None,
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
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = doubled.cos() * amplitude, doubled.sin() * amplitude
    return cos.to(dtype)[:, None, None, :], sin.to(dtype)[:, None, None, :]


class RotationTable:
    """How each position turns a head, computed once: a table from position 0 on, which grows with the texts.

    Not a buffer of a module: it is not saved. Arguments as of `rotation`.
    """

    def __init__(
        self, size: int, base: float, *, interleaved: bool, dtype: torch.dtype, scaling: Scaling | None = None
    ) -> None:
        self._size, self._base, self._interleaved, self._dtype = size, base, interleaved, dtype
        self._scaling = scaling
        self._table: Rotation | None = None

    def __call__(self, positions_S: Tensor, length: int) -> Rotation:
        """Return the rotations of these positions, all of which are below `length`. [S] -> 2 x [S, 1, 1, R]."""
        table = self._table
        if table is None or table[0].shape[0] < length or table[0].device != positions_S.device:
            rows = 1 << (length - 1).bit_length()  # doubled, so that a growing text seldom needs a new one
            with torch.inference_mode(False):  # tables built in inference mode could not be used in training
                table = rotation(
                    torch.arange(rows, device=positions_S.device),
                    self._size,
                    self._base,
                    interleaved=self._interleaved,
                    dtype=self._dtype,
                    scaling=self._scaling,
                )
            self._table = table
        cos, sin = table
        return cos[positions_S], sin[positions_S]


def rotate(x_SBHK: Tensor, rope: Rotation, *, interleaved: bool) -> Tensor:
    """Rotate the first R elements of each head. [S, B, H, K], 2 x [S, 1, 1, R] -> [S, B, H, K]."""
    cos, sin = rope
    size = cos.shape[-1]
    head, rest = x_SBHK[..., :size], x_SBHK[..., size:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = head * cos + turned * sin
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
