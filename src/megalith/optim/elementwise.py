"""The optimizers that update element by element: AdamW, SGD and Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalith.config import OptimizerConfig
from megalith.device import is_host
from megalith.kernels.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_
from megalith.optim.rules import UpdateBatch, UpdateRule, run_update
from megalith.registry import mark

_ADAM_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


@mark("optimizer", "adam", unit="element", mup="adam")
@dataclass(frozen=True)
class AdamW(UpdateRule):
    """Loshchilov and Hutter 2019, arXiv:1711.05101; the arithmetic is torch's fused kernel's."""

    beta1: float
    beta2: float
    eps: float

    state_names = ("exp_avg", "exp_avg_sq")

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> AdamW:
        return cls(config.adam_beta1, config.adam_beta2, config.adam_eps)

    def group_settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, **_ADAM_FIXED}

    def update(self, batch: UpdateBatch) -> None:
        self.update_divided(batch, None)

    def update_divided(self, batch: UpdateBatch, divisor: Tensor | None) -> None:
        """Update with the gradients divided by a number in fp32 on the device, in the same pass."""
        params, states = list(batch.params), batch.states
        counts = torch.full((len(params),), float(batch.steps_done), dtype=torch.float32, device=params[0].device)
        adamw(
            params,
            list(batch.grads),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=batch.lr,
            weight_decay=batch.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@mark("optimizer", "sgd", unit="element", mup="sgd")
@dataclass(frozen=True)
class SGD(UpdateRule):
    """Stochastic gradient descent with momentum, and with the weight decay in the gradient, as Megatron's is.

    Source: docs/reference/training.md#optimizers.
    """

    momentum: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> SGD:
        return cls(config.sgd_momentum)

    def group_settings(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": True,
        }

    def update(self, batch: UpdateBatch) -> None:
        self.update_divided(batch, None)

    def update_divided(self, batch: UpdateBatch, divisor: Tensor | None) -> None:
        """Update with the gradients divided by a number in fp32 on the device, in the same pass."""
        # A buffer of zeros and no dampening make the first step what it is without a buffer: the gradient itself.
        buffers: list[Tensor | None] = [None] * len(batch.params)
        if self.momentum:
            buffers = list(batch.states["momentum_buffer"])
        sgd(
            list(batch.params),
            list(batch.grads),
            buffers,
            fused=True,
            grad_scale=divisor,
            weight_decay=batch.weight_decay,
            momentum=self.momentum,
            lr=batch.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@mark("optimizer", "lion", unit="element")
@dataclass(frozen=True)
class Lion(UpdateRule):
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    beta1: float
    beta2: float

    state_names = ("exp_avg",)

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Lion:
        return cls(config.lion_beta1, config.lion_beta2)

    def group_settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2)}

    def update(self, batch: UpdateBatch) -> None:
        moments, params, grads = list(batch.states["exp_avg"]), list(batch.params), list(batch.grads)
        updates = foreach_lerp(moments, grads, 1.0 - self.beta1)
        foreach_sign_(updates)
        foreach_mul_(params, 1.0 - batch.lr * batch.weight_decay)
        foreach_add_(params, updates, alpha=-batch.lr)
        foreach_lerp_(moments, grads, 1.0 - self.beta2)


def run_scaled(rule: UpdateRule, batch: UpdateBatch, scale: float) -> None:
    """Update parameters by a rule with `scale` x the gradients, which are overwritten.

    On an accelerator AdamW and SGD read the gradients once: torch's kernels, which were written for a loss scale,
    divide by 1 / scale. On a CPU the product is a pass of its own, whose bits are those of Megatron.

    Raises: as `run_update`.
    """
    if scale == 1.0:
        run_update(rule, batch)
    elif isinstance(rule, AdamW | SGD) and type(rule).update in _DIVIDING and not is_host(batch.params[0].device):
        divisor = torch.full((), 1.0 / scale, dtype=torch.float32, device=batch.params[0].device)
        rule.update_divided(batch, divisor)
    else:
        foreach_mul_(list(batch.grads), scale)
        run_update(rule, batch)


_DIVIDING = (AdamW.update, SGD.update)  # a subclass may have another update
