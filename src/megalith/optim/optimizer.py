"""The optimizer step over the fp32 master weights: unscale, check, norm, clip, update, copy back.

The order and the arithmetic of a step are Megatron's (docs/reference/training.md#optimizers). In mixed precision the
optimizer owns fp32 master weights (Megatron: main params), from which the model's weights are rounded.

A rank updates its shard of each parameter: all of it, or under ZeRO-1 a range of its flattened elements. Overflow and
norm are reduced over all ranks before a step is applied, so that every rank applies it or skips it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.distributed.comm import all_reduce
from megalith.errors import ConfigError
from megalith.flat import boxes
from megalith.kernels.cpu.memory import lazy_zeros
from megalith.kernels.torch_private import foreach_copy_, unscale_and_check_
from megalith.nn.precision import at_least_fp32
from megalith.optim.elementwise import run_scaled
from megalith.optim.groups import Group
from megalith.optim.loss_scale import LossScale, build_loss_scale
from megalith.optim.rules import STATE_DTYPES, Fp32Arithmetic, UpdateBatch
from megalith.optim.shards import OptimizerShards

HOST = torch.device("cpu")
CLIP_EPSILON = 1.0e-6  # Megatron's guard of the division by the norm


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step."""

    applied: bool  # False if an overflow, a non-finite norm or one above the limit skipped the step
    grad_norm: float | None  # L2 norm of the unscaled gradients before clipping; None where an overflow was found first
    num_zeros: float | None  # number of exact zeros before clipping; None unless they are counted


@dataclass(frozen=True)
class StateBox:
    """A rectangular shard of a parameter, or of one of its optimizer states."""

    name: str  # `<state>.<parameter name>`, as in `Optimizer.state_tensors`; for a weight the parameter's name
    tensor: Tensor
    offset: tuple[int, ...]  # of its first element in the parameter of this rank's model
    shape: tuple[int, ...]  # of that parameter
    replicated: bool = False  # replicated over the tensor-parallel ranks, with a shape of its own


@dataclass(frozen=True)
class _Rates:
    """Learning rates and weight decay of one step, as passed to `Optimizer.step`."""

    lr: float
    weight_decay: float
    decoupled_lr: float

    def of(self, group: Group) -> tuple[float, float]:
        """Return the learning rate and the weight decay of a group."""
        lr = self.decoupled_lr if group.decoupled else self.lr
        return lr * group.lr_mult, self.weight_decay * group.wd_mult


class Optimizer:
    """Update rules over fp32 master weights, with loss scaling and gradient clipping.

    Args:
        groups: The parameter groups, each with its update rule.
        shards: What this rank holds of the parameters; `Optimizer` allocates the states.
        count_zeros: Count the exact zeros among the gradients of each step.
        offload: Fraction of the parameters, by elements, whose states and updates are on the host (`choose_offloaded`).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        shards: OptimizerShards,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        count_zeros: bool = False,
        offload: float = 0.0,
    ) -> None:
        self.groups, self.gradients = list(groups), shards.gradients
        self._config, self._count_zeros, self._world = config, count_zeros, shards.world
        self._params, self._sharded = shards.parameters or {}, shards.parameters is None
        self._param_sync, self._norms = shards.param_sync, shards.norms
        self._weights, self._master_weights = shards.weights, shards.master_weights
        self._has_master_weights = shards.weights is not shards.master_weights
        self._ordered = [name for group in self.groups for name in group.names if name in self._master_weights]
        sizes = {name: self._master_weights[name].numel() for name in self._ordered}
        self._offloaded = choose_offloaded(sizes, offload)
        # Otherwise the master weights are the weights, or the shards that FSDP2 gathers.
        if self._has_master_weights and not self._sharded:
            self._master_weights.update({name: to_host(self._master_weights[name]) for name in self._offloaded})
        self.step_count, self._last_rates = 0, _Rates(0.0, 0.0, 0.0)
        self.scaler: LossScale = build_loss_scale(precision)
        # As in Megatron, bf16 is unscaled and checked only if --loss-scale is set.
        self._checks_overflow = precision.fp16 or (precision.bf16 and precision.loss_scale is not None)
        self._scales = precision.fp16
        self._replicated: set[str] = set()
        self._state = self._zero_state()
        self._measured: dict[str, Tensor] = {}  # gradients, from `measure` to `complete_step`

    def _zero_state(self) -> dict[str, dict[str, Tensor]]:
        """Allocate the states: name of a state -> parameter name -> zeros."""
        dtypes = {"exp_avg": self._config.exp_avg_dtype, "exp_avg_sq": self._config.exp_avg_sq_dtype}
        states: dict[str, dict[str, Tensor]] = {}
        for group in self.groups:
            for name in filter(self._master_weights.__contains__, group.names):
                replicated = group.rule.replicated_states(name, tuple(self._master_weights[name].shape))
                for state in group.rule.state_names:
                    like = self._master_weights[name]
                    rounded = dtypes.get(state, "fp32") != "fp32"
                    dtype = STATE_DTYPES[dtypes[state]] if rounded else at_least_fp32(like.dtype)
                    if state in replicated:
                        self._replicated.add(f"{state}.{name}")
                        like = like.new_empty(replicated[state])
                    offloaded = name in self._offloaded
                    cleared = zeros_on_host(like, dtype) if offloaded else lazy_zeros(like.shape, dtype, like.device)
                    states.setdefault(state, {})[name] = cleared
        return states

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before the backward pass."""
        return self.scaler.value

    def zero_grad(self, num_micro_batches: int | None = None) -> None:
        """Discard the gradients of the last step.

        With the number of backward passes of the step that begins, replicas start to sum gradients while the last one
        is under way; without it, when all are done.
        """
        self.gradients.begin(num_micro_batches)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        *,
        decoupled_lr: float | None = None,
        reject_norm_above: float = math.inf,
        apply: bool = True,
    ) -> StepOutcome:
        """Update the parameters with the gradients gathered since `zero_grad`; the outcome is that of all ranks.

        `decoupled_lr` is the rate of the word embeddings and the output layer, if they have their own; gradients whose
        norm is above `reject_norm_above` are not applied, and none are without `apply`.
        """
        return self.complete_step(
            self.measure().tolist(),
            lr,
            weight_decay,
            decoupled_lr=decoupled_lr,
            reject_norm_above=reject_norm_above,
            apply=apply,
        )

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Complete the gradients of a step and unscale them, without waiting for the device.

        Returns:
            What `complete_step` decides by: 1 for an overflow on any rank, the squared norm, the zeros; fp64 [3].
        """
        self.finish_param_sync()
        self.gradients.finish()
        grads = self._measured = self._main_grads()
        found = self._unscale(list(grads.values())) if self._checks_overflow else None
        # of unscaled gradients: --clip-grad must not depend on the loss scale
        squared = self._norms.squared_norm(grads).double()
        overflow = torch.zeros_like(squared) if found is None else found.double().squeeze(0)
        zeros = self._norms.zeros(grads).double() if self._count_zeros else torch.zeros_like(squared)
        return torch.stack((overflow, squared, zeros))

    @torch.no_grad()
    def complete_step(
        self,
        measured: Sequence[float],
        lr: float,
        weight_decay: float,
        *,
        decoupled_lr: float | None = None,
        reject_norm_above: float = math.inf,
        apply: bool = True,
    ) -> StepOutcome:
        """End the step that `measure` began, given its values on the host; arguments as of `step`."""
        (overflow, squared, num_zeros), grads = measured, self._measured
        self._measured = {}
        if overflow:
            self.scaler.update(overflow=True)
            return StepOutcome(applied=False, grad_norm=None, num_zeros=None)
        norm, zeros = math.sqrt(squared), num_zeros if self._count_zeros else None
        self.scaler.update(overflow=not math.isfinite(norm))
        if not apply or not math.isfinite(norm) or norm > reject_norm_above:
            return StepOutcome(applied=False, grad_norm=norm, num_zeros=zeros)
        rates = _Rates(lr, weight_decay, lr if decoupled_lr is None else decoupled_lr)
        clip = self._config.clip_grad
        self._update(grads, rates, min(1.0, clip / (norm + CLIP_EPSILON)) if clip > 0.0 else 1.0)
        return StepOutcome(applied=True, grad_norm=norm, num_zeros=zeros)

    def finish_param_sync(self) -> None:
        """Wait until the parameters that other ranks updated are gathered; with FSDP2 free the gathered ones.

        Call it before weights are read or written outside of a forward pass.
        """
        if self._param_sync is not None:
            self._param_sync.wait()

    def _main_grads(self) -> dict[str, Tensor]:
        """Return this rank's gradients in at least fp32, or in the dtype of `--main-grads-dtype`, in group order."""
        grad_shards = self.gradients.grad_shards
        given = {name: grad_shards[name] for name in self._ordered}
        dtype = torch.bfloat16 if self._config.main_grads_dtype == "bf16" else at_least_fp32(self.gradients.dtype)
        if self.gradients.dtype == dtype or not given:
            return given
        converted = {name: torch.empty_like(grad, dtype=dtype) for name, grad in given.items()}
        foreach_copy_(list(converted.values()), list(given.values()))
        return converted

    def _unscale(self, grads: list[Tensor]) -> Tensor:
        """Divide the gradients by the loss scale in place; return 1 if any rank has a non-finite one, else 0: [1]."""
        device = self.gradients.device
        found = torch.zeros(1, dtype=torch.float32, device=device)
        inverse = torch.full((1,), self.scaler.inverse, dtype=torch.float32, device=device)
        if grads:
            unscale_and_check_(grads, found, inverse)
        return all_reduce(found, self._world, "max")

    def _update(self, grads: dict[str, Tensor], rates: _Rates, scale: float) -> None:
        for group in self.groups:
            names = [name for name in group.names if name in grads]
            if not names:
                continue
            self._update_group(group, [name for name in names if name not in self._offloaded], grads, rates, scale)
            for name in filter(self._offloaded.__contains__, names):  # one by one, which limits the copies in memory
                self._update_group(group, [name], grads, rates, scale)
        self._last_rates = rates
        self.step_count += 1
        if self._param_sync is not None:
            self._param_sync.gather()

    def _update_group(
        self, group: Group, names: list[str], grads: Mapping[str, Tensor], rates: _Rates, scale: float
    ) -> None:
        """Update parameters of a group, all on the device or all on the host, and copy them to the model's weights."""
        if not names:
            return
        (lr, weight_decay), offloaded = rates.of(group), names[0] in self._offloaded
        masters = [self._master_weights[name] for name in names]
        params, gradients = list(masters), [grads[name] for name in names]
        if offloaded:
            params, gradients = [to_host(master) for master in masters], [to_host(gradient) for gradient in gradients]
        states = {state: [self._state[state][name] for name in names] for state in group.rule.state_names}
        batch = UpdateBatch(names, params, gradients, states, lr, weight_decay, self.step_count)
        weights = [self._weights[name] for name in names] if self._has_master_weights else None
        if isinstance(group.rule, Fp32Arithmetic):
            group.rule.update_scaled(batch, scale, None if offloaded else weights)
        else:
            run_scaled(group.rule, batch, scale)
        for master, updated in zip(masters, params, strict=True):
            if master is not updated:
                master.copy_(updated)
        if weights is not None and (offloaded or not isinstance(group.rule, Fp32Arithmetic)):
            foreach_copy_(weights, masters)

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the L2 norm of all master weights of all ranks."""
        masters = {name: self._master_weights[name].to(self.gradients.device) for name in self._ordered}
        return math.sqrt(float(self._norms.squared_norm(masters)))

    @torch.no_grad()
    def reload_master_weights(self) -> None:
        """Copy the model's weights to the master weights, after they were loaded without optimizer state.

        After `load_state_dict` of the model this is done by a hook (`track_state_dict_loads`).
        """
        self.finish_param_sync()
        if self._has_master_weights:
            for name, master in self._master_weights.items():
                master.copy_(self._weights[name])

    def track_state_dict_loads(self, modules: Sequence[nn.Module]) -> None:
        """Copy loaded weights to the master weights after `load_state_dict`; the next step would undo the load."""
        for root in modules:
            for prefix, module in root.named_modules():
                names = {name: f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
                if names:
                    hook = _LoadHook(weakref.ref(self), names)  # the module may outlive it
                    module.register_load_state_dict_pre_hook(hook.before)
                    module.register_load_state_dict_post_hook(hook.after)

    @torch.no_grad()
    def _copy_loaded(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy loaded weights of a module to the master weights; `names` are those of its parameters in the model."""
        for own, name in names.items():
            if not self._sharded and module._parameters[own] is not self._params.get(name, module._parameters[own]):
                raise ConfigError(
                    f"{name}: load_state_dict(assign=True) replaces parameters that an optimizer updates; omit assign, "
                    "or build the optimizer after it"
                )
            if self._has_master_weights and name in self._master_weights:
                master, weight = self._master_weights[name], self._weights[name]
                weight.copy_(master) if self._sharded else master.copy_(
                    weight
                )  # the former are what FSDP2 gathers from

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Return the live states of this rank: name of a state -> parameter name -> tensor."""
        return {**self._state, "fp32_param": self._master_weights} if self._has_master_weights else dict(self._state)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live states as `<state>.<parameter name>`, in half precision with `fp32_param.<parameter name>`.

        Under ZeRO no rank has whole tensors: see `state_boxes`.
        """
        assert self._param_sync is None, "the state is divided over the data-parallel ranks"
        return {f"{kind}.{name}": tensor for kind, part in self._states().items() for name, tensor in part.items()}

    def state_boxes(self) -> Iterator[StateBox]:
        """Yield the live states of this rank, cut into rectangular shards of the parameters.

        Under ZeRO the replicas hold each element once, else every replica holds all.
        """
        for kind, part in self._states().items():
            for name, tensor in part.items():
                yield from self._boxes(f"{kind}.{name}", name, tensor)

    def weight_boxes(self) -> Iterator[StateBox]:
        """Yield the live weights of this rank: whole parameters, or under ZeRO-2 and ZeRO-3 rectangular shards."""
        self.finish_param_sync()
        if self._sharded:
            for name, tensor in self._weights.items():
                yield from self._boxes(name, name, tensor)
        else:
            for name, parameter in self._params.items():
                yield StateBox(name, parameter.detach(), (0,) * parameter.dim(), tuple(parameter.shape))

    def _boxes(self, label: str, name: str, tensor: Tensor) -> Iterator[StateBox]:
        """Yield the shards of a state of the parameter `name`, or the state itself where it is replicated."""
        if label in self._replicated:
            yield StateBox(label, tensor, (0,) * tensor.dim(), tuple(tensor.shape), replicated=True)
            return
        shape, start = self.gradients.shapes[name], self.gradients.owned_range(name)[0]
        for box in boxes(start, start + tensor.numel(), shape):
            first = box.start - start
            view = tensor.view(-1)[first : first + prod(box.extent)].view(box.extent)
            yield StateBox(label, view, box.offset, shape)

    def scalars(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors: `step`, `grad_scaler` (None without fp16), `param_groups`."""
        return {
            "step": self.step_count,
            "grad_scaler": self.scaler.state() if self._scales else None,
            "param_groups": [self._settings(group) for group in self.groups],
        }

    def _settings(self, group: Group) -> dict[str, Any]:
        """Return the settings of a group under Megatron's keys."""
        lr, weight_decay = self._last_rates.of(group)
        return {
            "wd_mult": group.wd_mult,
            "lr_mult": group.lr_mult,
            "is_expert_parallel": False,  # `with_expert_groups` adds those of experts at a save
            "is_decoupled_lr": group.decoupled,
            "lr": lr,
            "weight_decay": weight_decay,
            **group.rule.group_settings(),
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore what `scalars` returned, but for the groups, whose settings are those of the configuration."""
        self.step_count = int(scalars["step"])
        if self._scales and scalars.get("grad_scaler"):
            self.scaler.load_state(scalars["grad_scaler"])


class _LoadHook:
    """Hooks around `load_state_dict` that refresh an optimizer; copies and pickles of the module have no optimizer."""

    def __init__(self, optimizer: Callable[[], Optimizer | None], names: Mapping[str, str]) -> None:
        self._optimizer, self._names = optimizer, names

    def before(self, *_: Any) -> None:
        """Wait for updates from other ranks, which would overwrite loaded weights."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.finish_param_sync()

    def after(self, module: nn.Module, _: Any) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer._copy_loaded(module, self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadHook, (type(None), self._names)


def choose_offloaded(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Return the first parameters that have at most this fraction of all elements (`--optimizer-cpu-offload`).

    Moments and master weights of an offloaded parameter are in host memory; the device keeps weights and gradient. In
    each step the gradient is copied to the host, the update is computed there, and the new weights are copied back:

    | bytes a parameter           | on the device | on the host | each step over the bus |
    |-----------------------------|---------------|-------------|------------------------|
    | fp32                        | 8             | 8           | 12                     |
    | bf16, fp32 gradients        | 6             | 12          | 6                      |

    Norm, overflow check and clipping stay on the device, where the gradients are. Host
    memory is pinned if there is an accelerator. With a model on the CPU nothing is moved.
    """
    left, chosen = fraction * sum(sizes.values()), []
    for name, size in sizes.items():
        left -= size
        if left < -1e-6:  # fraction x sum is rounded
            break
        chosen.append(name)
    return frozenset(chosen)


def zeros_on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate zeros in the shape of a tensor, on the host."""
    return torch.zeros(like.shape, dtype=dtype, device=HOST, pin_memory=torch.accelerator.is_available())


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor if it is on the host already, else a copy there, waiting for its transfer."""
    if tensor.device == HOST:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=torch.accelerator.is_available())
    return copy.copy_(tensor)
