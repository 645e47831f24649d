"""Optimisation: gradient buffers, loss scaling, clipping and AdamW over the main parameters."""

from megalith.optim.gradients import GradientBuffers
from megalith.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from megalith.optim.optimizer import Optimizer, StepOutcome, build_optimizer

__all__ = [
    "ConstantLossScale",
    "DynamicLossScale",
    "GradientBuffers",
    "LossScale",
    "Optimizer",
    "StepOutcome",
    "build_optimizer",
]
