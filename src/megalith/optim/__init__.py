"""Optimisation: gradient buffers, loss scaling, clipping and update rules over the master weights."""

from megalith.optim.build import build_optimizer
from megalith.optim.gradients import GradientBuffers
from megalith.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from megalith.optim.optimizer import Optimizer, StepOutcome
from megalith.optim.rules import UpdateBatch, UpdateRule

__all__ = [
    "ConstantLossScale",
    "DynamicLossScale",
    "GradientBuffers",
    "LossScale",
    "Optimizer",
    "StepOutcome",
    "UpdateBatch",
    "UpdateRule",
    "build_optimizer",
]
