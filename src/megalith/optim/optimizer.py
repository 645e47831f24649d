"""AdamW over the main parameters: unscale, check, norm, clip, update, copy back.

The order and the arithmetic of a step are Megatron's (spec/training-behaviour.md sections 2 and 11). With fp16 and
bf16 the model's weights are rounded copies of fp32 main parameters, which the optimizer owns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.nn.precision import at_least_fp32
from megalith.nn.sink import attach_sink
from megalith.optim.gradients import GradientBuffers
from megalith.optim.loss_scale import LossScale, build_loss_scale

CLIP_EPSILON = 1.0e-6  # Megatron's guard of the division by the norm


@dataclass(frozen=True)
class StepOutcome:
    """What a step did.

    Attributes:
        applied: False when an overflow or a norm that is not finite made the step a skip.
        grad_norm: L2 norm of the unscaled gradients before clipping; None where an overflow was found first.
        num_zeros: Count of exact zeros before clipping, where it was asked for.
    """

    applied: bool
    grad_norm: float | None
    num_zeros: float | None


@dataclass(frozen=True)
class _Group:
    """Parameters that share their weight-decay multiplier, by name in module order."""

    wd_mult: float
    names: tuple[str, ...]


def _decays(name: str, parameter: Tensor) -> bool:
    return not (name.endswith(".bias") or parameter.dim() == 1)


def _groups(parameters: dict[str, nn.Parameter]) -> list[_Group]:
    """Megatron's order: what decays first, then biases and everything one-dimensional."""
    names = {True: tuple[str, ...](), False: tuple[str, ...]()}
    for name, parameter in parameters.items():
        names[_decays(name, parameter)] += (name,)
    return [_Group(float(decays), names[decays]) for decays in (True, False) if names[decays]]


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with main parameters, loss scale and clipping.

    Args:
        model: The model; its parameters get preallocated gradients and its layers a sink that writes to them.
        config: Betas, epsilon and clipping.
        precision: Of the weights, the gradients and the loss scale.
        count_zeros: Count exact zeros of the gradients in each step.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, precision: PrecisionConfig, *, count_zeros: bool = False
    ) -> None:
        self._config, self._count_zeros = config, count_zeros
        self._params = dict(model.named_parameters())
        self._groups = _groups(self._params)
        some = next(iter(self._params.values()))
        work = at_least_fp32(some.dtype)
        self.gradients = GradientBuffers(list(self._params.items()), work if precision.grads_in_fp32 else some.dtype)
        attach_sink(model, self.gradients)
        self._has_main = work != some.dtype
        self._main = {name: p.detach().to(work) if self._has_main else p for name, p in self._params.items()}
        self._scale: LossScale = build_loss_scale(precision)
        self._checks_overflow = precision.fp16 or (precision.bf16 and precision.loss_scale is not None)
        self._scales = precision.fp16
        self._adam = self._build_adam()

    def _build_adam(self) -> torch.optim.AdamW:
        fixed = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}  # keys of Megatron's groups
        groups = [
            {"params": [self._main[name] for name in group.names], "wd_mult": group.wd_mult, **fixed}
            for group in self._groups
        ]
        config = self._config
        adam = torch.optim.AdamW(
            groups, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
        )
        for main in self._main.values():
            adam.state[main] = {
                "step": torch.zeros((), dtype=torch.float32, device=main.device),
                "exp_avg": torch.zeros_like(main, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(main, requires_grad=False),
            }
        return adam

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is to be multiplied by before the backward pass."""
        return self._scale.value

    @property
    def step_count(self) -> int:
        """The number of applied steps."""
        return int(self._adam.state[next(iter(self._main.values()))]["step"].item())

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self.gradients.begin()

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> StepOutcome:
        """Update the parameters with the gradients gathered since `zero_grad`.

        Args:
            lr: Learning rate of this step.
            weight_decay: Decoupled weight decay of the parameters that decay.
        """
        self.gradients.finish()
        grads = self._main_grads()
        if self._checks_overflow and self._unscale(list(grads.values())):
            self._scale.update(overflow=True)
            return StepOutcome(applied=False, grad_norm=None, num_zeros=None)
        norm = _global_norm(list(grads.values()))
        self._scale.update(overflow=not math.isfinite(norm))
        zeros = self._zeros(grads) if self._count_zeros else None
        if not math.isfinite(norm):
            return StepOutcome(applied=False, grad_norm=norm, num_zeros=zeros)
        self._clip(list(grads.values()), norm)
        self._update(grads, lr, weight_decay)
        return StepOutcome(applied=True, grad_norm=norm, num_zeros=zeros)

    def _main_grads(self) -> dict[str, Tensor]:
        """The gradients in the dtype of the main parameters, in group order."""
        grads = self.gradients.grads
        return {name: grads[name].to(self._main[name].dtype) for group in self._groups for name in group.names}

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Divide the gradients by the loss scale in place; return whether one is not finite."""
        device = grads[0].device
        found = torch.zeros(1, dtype=torch.float32, device=device)
        inverse = torch.full((1,), self._scale.inverse, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        return bool(found.item())

    def _zeros(self, grads: dict[str, Tensor]) -> float:
        nonzero = torch.stack([torch.count_nonzero(grad) for grad in grads.values()]).sum()
        return float(sum(grad.numel() for grad in grads.values()) - int(nonzero))

    def _clip(self, grads: list[Tensor], norm: float) -> None:
        if self._config.clip_grad <= 0.0:
            return
        coefficient = self._config.clip_grad / (norm + CLIP_EPSILON)
        if coefficient < 1.0:
            torch._foreach_mul_(grads, coefficient)

    def _update(self, grads: dict[str, Tensor], lr: float, weight_decay: float) -> None:
        for name, grad in grads.items():
            self._main[name].grad = grad
        for group in self._adam.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay * group["wd_mult"]
        self._adam.step()
        for name, main in self._main.items():
            main.grad = None
            if self._has_main:
                self._params[name].copy_(main)

    @torch.no_grad()
    def params_norm(self) -> float:
        """L2 norm of all main parameters."""
        return _global_norm([self._main[name].detach() for group in self._groups for name in group.names])

    def reload_main_params(self) -> None:
        """Take the main parameters from the model's weights, after these were loaded without optimizer state."""
        if self._has_main:
            for name, main in self._main.items():
                main.copy_(self._params[name].detach())

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state: `exp_avg.<name>`, `exp_avg_sq.<name>` and, in half precision, `fp32_param.<name>`."""
        state = {
            f"{kind}.{name}": self._adam.state[main][kind]
            for kind in ("exp_avg", "exp_avg_sq")
            for name, main in self._main.items()
        }
        if self._has_main:
            state |= {f"fp32_param.{name}": main for name, main in self._main.items()}
        return state

    def scalars(self) -> dict[str, Any]:
        """What else a checkpoint holds: `step`, `grad_scaler` (None without fp16) and the settings of the groups."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._adam.param_groups]
        return {
            "step": self.step_count,
            "grad_scaler": self._scale.state() if self._scales else None,
            "param_groups": groups,
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Continue from what `scalars` returned. The settings of the groups are the configuration's, not loaded."""
        for main in self._main.values():
            self._adam.state[main]["step"].fill_(float(scalars["step"]))
        if self._scales and scalars.get("grad_scaler"):
            self._scale.load_state(scalars["grad_scaler"])


def _global_norm(tensors: list[Tensor]) -> float:
    """L2 norm over all tensors: of each in fp32, then of the stack, squared in fp32, root in double."""
    norms = torch.stack(torch._foreach_norm(tensors))
    total = torch.linalg.vector_norm(norms)
    return math.sqrt(float(total * total))


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, precision: PrecisionConfig, *, count_zeros: bool = False
) -> Optimizer:
    """Build the optimizer that --optimizer names (adam)."""
    return Optimizer(model, config, precision, count_zeros=count_zeros)
