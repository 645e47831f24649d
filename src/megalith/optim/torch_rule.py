"""Any `torch.optim.Optimizer` class as an update rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.optim.rules import UpdateBatch, UpdateRule
from megalith.registry import error_of_user

_PROBE_STEPS = 3


class TorchRule(UpdateRule):
    """Runs a `torch.optim.Optimizer` on master weights, with its per-parameter tensors as states.

    The states are found by stepping two tiny parameters with different gradients and learning rates. Tensors of the
    parameter's shape are states, which are saved and sharded. Numbers (`step`, NAdam's `mu_product`) must be equal for
    both: they are functions of the number of steps, recomputed by stepping a tiny parameter along, and are not saved.
    Before the first step a parameter has no state, as in torch.

    Args:
        name: as `--optimizer` has it.
        settings: keyword arguments of the class, beside lr and weight_decay.
        of_matrices: whether it receives matrices only; else it receives pieces of flattened parameters under ZeRO.

    Raises:
        ConfigError: the class takes other arguments, or has other kinds of states.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], name: str, settings: Mapping[str, Any], *, of_matrices: bool
    ) -> None:
        self._kind, self._name, self._settings = kind, name, dict(settings)
        self._tiny = (2, 2) if of_matrices else (1,)
        self._optimizer = self._build(torch.zeros(self._tiny))
        self._names, self._has_counters = self._probe(((3, 2), (2, 5)) if of_matrices else ((3, 2), (5,)))
        self._followers: dict[torch.device, _Follower] = {}

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._names

    @property
    def takes_weight_decay(self) -> bool:
        """True if the class has a `weight_decay` option."""
        return "weight_decay" in self._optimizer.param_groups[0]

    def group_settings(self) -> dict[str, Any]:
        """Return the numbers and flags among the settings."""
        plain = (bool, int, float, str, tuple, type(None))
        group = self._optimizer.param_groups[0]
        return {
            key: value
            for key, value in group.items()
            if key not in ("params", "lr", "weight_decay") and isinstance(value, plain)
        }

    def update(self, batch: UpdateBatch) -> None:
        optimizer, params = self._optimizer, list(batch.params)
        self._point_to(optimizer, params, batch.lr, batch.weight_decay)
        if batch.steps_done > 0:
            for number, param in enumerate(params):
                states = {name: batch.states[name][number] for name in self._names}
                optimizer.state[param] = {**states, **self._counters(batch.steps_done, param.device)}
        for param, grad in zip(params, batch.grads, strict=True):
            param.grad = grad
        optimizer.step()
        for number, param in enumerate(params):
            for name in self._names:
                kept, made = batch.states[name][number], optimizer.state[param][name]
                if made is not kept:
                    kept.copy_(made)
            param.grad = None
        self._point_to(optimizer, [], batch.lr, batch.weight_decay)

    @staticmethod
    def _point_to(optimizer: torch.optim.Optimizer, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """Replace the parameters of an optimizer, clear its states, and set learning rate and weight decay."""
        group = optimizer.param_groups[0]
        group["params"], group["lr"] = params, lr
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay
        optimizer.state.clear()

    def _build(self, param: Tensor) -> torch.optim.Optimizer:
        twice = sorted({"params", "lr", "weight_decay"} & self._settings.keys())
        if twice:
            raise ConfigError(
                f"--optimizer {self._name}: its settings have {', '.join(twice)}, which --lr and --weight-decay set; "
                "leave them out of the dataclass"
            )
        accepted = inspect.signature(self._kind).parameters
        decays = "weight_decay" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        options = {**self._settings, "lr": 1e-3, **({"weight_decay": 0.0} if decays else {})}
        try:
            optimizer = self._kind([param], **options)
        except Exception as error:
            raise ConfigError(
                f"--optimizer {self._name}: {self._kind.__name__}(params, {', '.join(options)}) fails: "
                f"{error_of_user(error)}; the dataclass of its settings must have one field for each keyword argument"
            ) from error
        if len(optimizer.param_groups) != 1 or "lr" not in optimizer.param_groups[0]:
            raise ConfigError(f"--optimizer {self._name}: {self._kind.__name__} has no lr in its one parameter group")
        return optimizer

    # --- what states it has -------------------------------------------------------------------------------------

    def _probe(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[str, ...], bool]:
        """Return the names of the states, and whether the class has counters."""
        first, second = (self._states_after(shape, lr) for shape, lr in zip(shapes, (1e-3, 3e-2), strict=True))
        names, counters, problems = [], False, []
        for name in dict.fromkeys((*first, *second)):
            one, other = first.get(name), second.get(name)
            if one is None and other is None:
                continue
            if all(_is_like(value, shape) for value, shape in zip((one, other), shapes, strict=True)):
                names.append(name)
            elif _number(one) is not None and _number(one) == _number(other):
                counters = True
            else:
                problems.append(
                    f"--optimizer {self._name}: the state {name!r} of {self._kind.__name__} is neither a tensor of the "
                    "shape of its parameter nor a number that follows from the number of steps; write an UpdateRule "
                    "with its state_shapes instead"
                )
        if problems:
            raise ConfigError(problems)
        return tuple(names), counters

    def _states_after(self, shape: tuple[int, ...], lr: float) -> dict[str, Any]:
        """Return the states of a parameter of a shape after a few steps."""
        param = torch.linspace(-1.0, 1.0, shape[0] * 7)[: torch.Size(shape).numel()].view(shape).clone()
        optimizer = self._build(param)
        try:
            with torch.random.fork_rng(devices=()):
                for number in range(_PROBE_STEPS):
                    self._step(optimizer, param, lr, param.cos() * (number + shape[0]))
        except Exception as error:
            raise ConfigError(
                f"--optimizer {self._name}: a step of {self._kind.__name__} fails: {error_of_user(error)}"
            ) from error
        return dict(optimizer.state[param])

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, param: Tensor, lr: float, grad: Tensor) -> None:
        optimizer.param_groups[0]["lr"] = lr
        param.grad = grad
        with torch.no_grad():
            optimizer.step()

    # --- counters -----------------------------------------------------------------------------------------------

    def _counters(self, steps: int, device: torch.device) -> dict[str, Any]:
        """Return new copies of the numbers among the states after this many steps on a device."""
        if not self._has_counters:
            return {}
        follower = self._followers.get(device)
        if follower is None or follower.steps > steps:
            param = torch.zeros(self._tiny, device=device)
            follower = self._followers[device] = _Follower(param, self._build(param))
        while follower.steps < steps:
            self._step(follower.optimizer, follower.param, 1e-3, torch.ones_like(follower.param))
            follower.steps += 1
        found = follower.optimizer.state[follower.param]
        counters = {name: value for name, value in found.items() if name not in self._names and value is not None}
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in counters.items()}


@dataclass
class _Follower:
    """A tiny parameter stepped as often as the model, for states that are functions of the number of steps."""

    param: Tensor
    optimizer: torch.optim.Optimizer
    steps: int = 0


def _is_like(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape and value.is_floating_point()


def _number(value: Any) -> float | None:
    """Return a number that is a state, None for anything else."""
    is_number = isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.ndim == 0)
    return float(value) if is_number else None
