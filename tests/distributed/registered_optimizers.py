"""Optimizers that runs of tests register with --import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megalith.optim import UpdateBatch, UpdateRule
from megalith.registry import mark


@dataclass
class SignSettings:
    sign_momentum: float = 0.9


@mark("optimizer", "my-sign", settings=SignSettings, unit="element")
class Sign(UpdateRule):
    """A step of the length lr against a running mean of the gradients."""

    state_names = ("mean",)

    def __init__(self, settings: SignSettings) -> None:
        self.momentum = settings.sign_momentum

    def update(self, batch: UpdateBatch) -> None:
        for param, grad, mean in zip(batch.params, batch.grads, batch.states["mean"], strict=True):
            mean.lerp_(grad, 1.0 - self.momentum)
            param.mul_(1.0 - batch.lr * batch.weight_decay).sub_(mean.tanh(), alpha=batch.lr)


@mark("optimizer", "my-shampoo", unit="matrix")
class Shampoo(UpdateRule):
    """One-sided Shampoo: a state of another shape than the matrix, which has to be whole."""

    state_names = ("factor", "mean")

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"factor": (shape[0], shape[0]), "mean": shape}

    def update(self, batch: UpdateBatch) -> None:
        for number, (param, grad) in enumerate(zip(batch.params, batch.grads, strict=True)):
            factor, mean = batch.states["factor"][number], batch.states["mean"][number]
            factor.lerp_(grad @ grad.t(), 0.5)
            mean.lerp_(grad, 0.5)
            param.sub_(torch.linalg.solve(factor + torch.eye(len(factor)), mean), alpha=batch.lr)


@dataclass
class NAdamSettings:
    momentum_decay: float = 4e-3


NAdam = mark("optimizer", "nadam", settings=NAdamSettings, unit="element")(torch.optim.NAdam)
Muon = mark("optimizer", "torch-muon", unit="matrix")(torch.optim.Muon)
