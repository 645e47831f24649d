"""Puts in the wrong numbers that `spoil_text` describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalith.train.spoil_text import SPIKE, VALUES, Spoil


class Spoiler:
    """Carries out what strikes this rank.

    Args:
        spoils: of the run.
        chunks: the parts of the model here.
        rank: of this process.
    """

    def __init__(self, spoils: Sequence[Spoil], chunks: Sequence[nn.Module], rank: int) -> None:
        self._left: dict[Spoil, float] = {}
        self._rank, self._step, self._micro_batch = rank, 0, 0
        for spoil in spoils:
            self.add(spoil)
        self._weights = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        modules = {name: module for chunk in chunks for name, module in chunk.named_modules()}
        for spoil in self._left:
            if spoil.point in ("activation", "grad") and spoil.module in modules:
                modules[spoil.module].register_forward_hook(self._after(spoil))

    def add(self, spoil: Spoil) -> None:
        """One more, of a loss."""
        if spoil.rank in (None, self._rank):
            self._left[spoil] = math.inf if spoil.times is None else spoil.times

    def begin(self, step: int) -> None:
        """A step is about to be computed."""
        self._step = step
        for spoil in self._left:
            parameter = self._weights.get(spoil.module)
            if spoil.point == "weight" and parameter is not None and self._strikes(spoil, spoil.micro_batch):
                with torch.no_grad():
                    parameter.view(-1)[0] = VALUES[spoil.action]

    def on(self, micro_batch: int) -> None:
        """A pass of this micro-batch begins."""
        self._micro_batch = micro_batch

    def loss(self, loss: Tensor, micro_batch: int) -> Tensor:
        """The summed loss of a micro-batch, spoiled or not."""
        for spoil in self._left:
            if spoil.point == "loss" and self._strikes(spoil, micro_batch):
                return loss * VALUES.get(spoil.action, SPIKE)
        return loss

    def _strikes(self, spoil: Spoil, micro_batch: int) -> bool:
        if (spoil.step, spoil.micro_batch) != (self._step, micro_batch) or self._left[spoil] < 1:
            return False
        self._left[spoil] -= 1
        return True

    def _after(self, spoil: Spoil) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if not self._strikes(spoil, self._micro_batch):
                return None
            mark = torch.zeros_like(output)
            mark.view(-1)[0] = VALUES[spoil.action]
            if spoil.point == "activation":
                return output + mark
            output.register_hook(lambda grad: grad + mark)
            return None

        return hook
