"""How main parameters change: AdamW, SGD with momentum and Lion, each a rule without state of its own.

The optimizer keeps the state of each parameter under the names that Megatron's checkpoints have, and hands it to the
rule with the gradients. These three look at each element alone, so that they may be applied to any part of a parameter
(ZeRO) and to any piece of it after another; `muon` needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

States = Mapping[str, Sequence[Tensor]]
"""Kind of state -> the tensor of each parameter."""


@dataclass(frozen=True)
class Work:
    """What one step of an update rule is about.

    Attributes:
        names: of the parameters.
        params, grads: of one dtype each; the parameters are changed in place.
        states: of each parameter, as of the rule's `kinds`; changed in place.
        lr, weight_decay: of these parameters in this step.
        step: applied steps before this one.
    """

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: States
    lr: float
    weight_decay: float
    step: int


class UpdateRule(Protocol):
    """A way to change parameters.

    Attributes:
        kinds: names of the states of a parameter, which begin as zeros.
    """

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def settings(self) -> dict[str, Any]:
        """What the groups in a checkpoint say of the rule, beside the rate and the decay."""
        ...

    def update(self, work: Work) -> None:
        """Change the parameters and their states in place."""
        ...


_ADAM_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter 2019, arXiv:1711.05101; the arithmetic is torch's fused kernel's."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, **_ADAM_FIXED}

    def update(self, work: Work) -> None:
        params, states = list(work.params), work.states
        counts = torch.full((len(params),), float(work.step), dtype=torch.float32, device=params[0].device)
        adamw(
            params,
            list(work.grads),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=work.lr,
            weight_decay=work.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, and with the weight decay in the gradient, as Megatron's is.

    Source: docs/reference/training.md#optimizers.
    """

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def settings(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": True,
        }

    def update(self, work: Work) -> None:
        # A buffer of zeros and no dampening make the first step what it is without a buffer: the gradient itself.
        buffers: list[Tensor | None] = [None] * len(work.params)
        if self.momentum:
            buffers = list(work.states["momentum_buffer"])
        sgd(
            list(work.params),
            list(work.grads),
            buffers,
            fused=True,
            weight_decay=work.weight_decay,
            momentum=self.momentum,
            lr=work.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    beta1: float
    beta2: float

    kinds = ("exp_avg",)

    def settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2)}

    def update(self, work: Work) -> None:
        moments, params, grads = list(work.states["exp_avg"]), list(work.params), list(work.grads)
        updates = torch._foreach_lerp(moments, grads, 1.0 - self.beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1.0 - work.lr * work.weight_decay)
        torch._foreach_add_(params, updates, alpha=-work.lr)
        torch._foreach_lerp_(moments, grads, 1.0 - self.beta2)
