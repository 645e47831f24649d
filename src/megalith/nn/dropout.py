"""Dropout of hidden states, which on several ranks must be drawn alike where these hold the same states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.kernels.dropout import dropout
from megalith.nn.region import Region


class HiddenDropout(nn.Module):
    """Zero each element with `probability` in training and scale the rest (Srivastava et al. 2014). Any shape.

    `own`: the states are no hidden states but those of this rank alone, such as its attention heads.
    """

    def __init__(self, probability: float, region: Region, *, own: bool = False) -> None:
        super().__init__()
        self.probability, self.region, self.own = probability, region, own

    @staticmethod
    def drop(x: Tensor, probability: float) -> Tensor:
        """Return x with elements dropped; `megalith prove` has masks that are the same in every layout."""
        return dropout(x, probability)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        if self.region.needs_grad_reduce and self.region.name is not None and torch.compiler.is_compiling():
            from megalith.nn import operators  # it loads the compiler

            return x * operators.kept(x, self.probability, self.region.name) / (1.0 - self.probability)
        rng = self.region.local_rng if self.own else self.region.hidden_rng
        with rng(self.probability):
            return self.drop(x, self.probability)
