"""How main parameters change: AdamW, SGD with momentum and Lion, each a rule without state of its own.

The optimizer keeps the state of each parameter under the names that Megatron's checkpoints have, and hands it to the
rule with the gradients. These three look at each element alone, so that they may be applied to any part of a parameter
(ZeRO) and to any piece of it after another; `muon` needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalith.kernels.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_
from megalith.nn.precision import at_least_fp32

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
        updates = foreach_lerp(moments, grads, 1.0 - self.beta1)
        foreach_sign_(updates)
        foreach_mul_(params, 1.0 - work.lr * work.weight_decay)
        foreach_add_(params, updates, alpha=-work.lr)
        foreach_lerp_(moments, grads, 1.0 - self.beta2)


PIECE_ON_CPU, PIECE_ELEMENTS = 1 << 18, 1 << 24
"""Of a piece: with its companions in fp32 4 MiB on a CPU, within the cache of a core, and 256 MiB elsewhere."""


@dataclass
class Widened:
    """An elementwise rule over tensors of several dtypes (`--use-precision-aware-optimizer`), with arithmetic in fp32.

    What is stored is rounded, what is computed is not: each piece of a parameter is widened, updated and rounded again,
    a piece at a time, so that the fp32 copies stay in the cache and never exist for a whole model. The numbers are
    stored without a scale per tensor: that is enough for bf16 moments and for fp16 main parameters, and not for moments
    in fp16 or fp8, whose squares would vanish; a rule of the configuration refuses these.

    Attributes:
        rule: what is done in fp32.
    """

    rule: UpdateRule
    _rooms: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.rule.kinds

    def settings(self) -> dict[str, Any]:
        return self.rule.settings()

    def update(self, work: Work) -> None:
        self.update_scaled(work, 1.0, None)

    def update_scaled(self, work: Work, scale: float, weights: Sequence[Tensor] | None) -> None:
        """Update with `scale` x the gradients, and round the new parameters to `weights` where there are such.

        Both are done while a piece is in the cache: in passes of their own they would take half as long again.
        """
        piece = PIECE_ON_CPU if work.params[0].device.type == "cpu" else PIECE_ELEMENTS
        for number, name in enumerate(work.names):
            held = [work.params[number], work.grads[number], *(work.states[kind][number] for kind in self.kinds)]
            flat = [tensor.view(-1) for tensor in held]
            weight = None if weights is None else weights[number].view(-1)
            for start in range(0, flat[0].numel(), piece):
                parts = [tensor[start : start + piece] for tensor in flat]
                wide = [self._wide(place, part) for place, part in enumerate(parts)]
                if scale != 1.0:
                    wide[1].mul_(scale)
                states = {kind: [wide[2 + place]] for place, kind in enumerate(self.kinds)}
                self.rule.update(replace(work, names=[name], params=wide[:1], grads=wide[1:2], states=states))
                for part, result in zip((parts[0], *parts[2:]), (wide[0], *wide[2:]), strict=True):
                    if part is not result:
                        part.copy_(result)
                if weight is not None:
                    weight[start : start + piece].copy_(parts[0])

    def _wide(self, place: int, part: Tensor) -> Tensor:
        """The part itself where it is wide enough, else a copy in a room that is used again."""
        dtype = at_least_fp32(part.dtype)
        if part.dtype == dtype:
            return part
        room = self._rooms.get((place, part.device))
        if room is None or room.numel() < part.numel():
            room = self._rooms[place, part.device] = torch.empty(part.numel(), dtype=dtype, device=part.device)
        return room[: part.numel()].copy_(part)


STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of the command line."""
