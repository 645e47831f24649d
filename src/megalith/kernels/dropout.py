"""Random masks that are drawn twice instead of kept: forward, and again from their seed backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DropoutMasks:
    """Masks that are the same in the same order whenever they are drawn from the same seed."""

    def __init__(self, probability: float, seed: int, device: torch.device) -> None:
        self._keep = 1.0 - probability
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def mask(self, like: Tensor) -> Tensor:
        """0 or 1 / (1 - p) for each element."""
        return torch.empty_like(like).bernoulli_(self._keep, generator=self._generator).div_(self._keep)


@dataclass(frozen=True)
class Dropout:
    """With which probability an element becomes zero, and the seed that decides which ones."""

    probability: float
    seed: int

    @classmethod
    def draw(cls, probability: float) -> Dropout | None:
        """With a seed from torch's default stream, so that a resumed run draws the same; None without dropout."""
        return cls(probability, int(torch.randint(2**62, ()))) if probability > 0.0 else None

    def of_block(self, number: int) -> Dropout:
        """For one of several blocks that are masked independently."""
        return Dropout(self.probability, self.seed + number)

    def masks(self, device: torch.device) -> DropoutMasks:
        """The masks, from the first."""
        return DropoutMasks(self.probability, self.seed, device)
