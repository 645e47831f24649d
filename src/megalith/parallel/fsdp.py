"""Full sharding (ZeRO-2 and ZeRO-3): torch's FSDP2 over the local tensors of the other kinds of parallelism.

Each data-parallel rank has some rows of every parameter, of its gradient and of its optimizer state. A unit of the
model (a layer, or the modules outside of layers) gathers its parameters when it is called:

|                          | ZeRO-3 (the default)      | ZeRO-2 (`reshard_after_forward=False`)       |
|--------------------------|---------------------------|----------------------------------------------|
| parameters are gathered  | in each pass of each unit | once in a step                               |
| and freed                | after each pass           | after the last backward pass of the step     |

A gathered parameter is a plain tensor, this rank's tensor-parallel shard, so that the layers and their collectives are
those of every other layout. Every backward pass reduce-scatters the gradients of the gathered parameters, unit by unit,
and adds them to this rank's rows: whole gradients exist of one unit at a time.

Shards are stored in at least fp32: in half precision they are the master weights, and the gather rounds them.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megalith.distributed.comm import start_all_gather, start_reduce_scatter
from megalith.distributed.context import Axis, ParallelContext
from megalith.kernels.torch_private import is_view
from megalith.nn.precision import at_least_fp32


class FullyShard:
    """Shards the parameters of a module over the replicas, in place; it is called as before.

    Args:
        units: modules below it whose parameters are gathered together. The rest is a unit too, which is gathered from
            the call of `module` to the end of its backward pass.
        reduce_dtype: dtype in which gradients are reduced; that of the parameters if None. Their sum over micro-batches
            has the dtype of the shards, at least fp32.

    Attributes:
        shapes: shapes of the unsharded parameters, by name.
        shards: rows of each parameter on this rank, in the memory of the parameters; possibly none.
        dtype: dtype in which the module computes.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        ctx: ParallelContext,
        *,
        reshard_after_forward: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._axis = ctx.flatten_axes("cp", "dp")
        assert self._axis.size > 1, "sharding needs at least two replicas"
        parameters = list(module.parameters())
        (self.dtype,) = {parameter.dtype for parameter in parameters}
        for parameter in parameters:
            parameter.data = parameter.data.to(at_least_fp32(self.dtype))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if self._axis.group is None:
            mesh: DeviceMesh = _PlannedMesh(self._axis)
        else:
            mesh = DeviceMesh.from_group(self._axis.group, ctx.device.type, mesh_dim_names=("replicas",))
        policy = MixedPrecisionPolicy(self.dtype, reduce_dtype, cast_forward_inputs=False)
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        module.register_forward_hook(_clone_view)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        self._module, self._reshards = module, reshard_after_forward
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        gather: Any = _Gather(self._axis, ctx.device)  # Any: these classes have no public type
        reduce: Any = _Reduce(self._axis, ctx.device)
        for unit in self._units:
            unit.set_gradient_divide_factor(float(ctx.dp.size))  # over cp gradients are summed, not averaged
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
            if self._axis.group is None:
                _allow_meta(unit, ctx.device)
        self._parameters = dict(module.named_parameters())
        self.shards = {name: _local_shard(parameter.detach()) for name, parameter in self._parameters.items()}
        self._num_micro_batches: int | None = None
        self._backward_passes = 0
        module.register_forward_hook(self._after_forward)

    def owned_range(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of a flattened parameter in this rank's shard."""
        rows, width = self.shapes[name][0], prod(self.shapes[name][1:])
        most = -(-rows // self._axis.size)
        start, stop = (min(place * most, rows) for place in (self._axis.index, self._axis.index + 1))
        assert stop - start == self.shards[name].shape[0], f"{name}: FSDP2 cuts otherwise than torch.chunk"
        return start * width, stop * width

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step: forget the gradients. Without `num_micro_batches` every backward pass frees the weights."""
        self._num_micro_batches, self._backward_passes = num_micro_batches, 0
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's rows after the backward passes: mean over dp of the sum over cp."""
        assert self._num_micro_batches in (None, self._backward_passes), (
            f"{self._backward_passes} backward passes in a step of {self._num_micro_batches}"
        )
        return {
            name: torch.zeros_like(self.shards[name]) if parameter.grad is None else _local_shard(parameter.grad)
            for name, parameter in self._parameters.items()
        }

    def reshard(self) -> None:
        """Free gathered parameters, which an update of the shards makes stale."""
        for unit in self._units:
            unit.reshard()

    def _after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        self._backward_passes += 1
        if not self._reshards:
            self._module.set_reshard_after_backward(self._num_micro_batches in (None, self._backward_passes))


class _Allocator:
    """Allocates the memory that FSDP2 sends and receives."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis, self._device = axis, device

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=self._device)


class _Gather(_Allocator):
    """FSDP2's `AllGather` through `comm`, where observers see it."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        assert not async_op, "FSDP2 waits in a stream of its own"
        start_all_gather(input_tensor, self._axis, out=output_tensor).wait()


class _Reduce(_Allocator):
    """FSDP2's `ReduceScatter` through `comm`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op, "FSDP2 waits in a stream of its own"
        start_reduce_scatter(input_tensor, self._axis, out=output_tensor).wait()


class _PlannedMesh(DeviceMesh):
    """A mesh without process groups, for plans; it stands for its group too."""

    def __init__(self, axis: Axis) -> None:
        self._index = axis.index
        ranks, names = torch.arange(axis.size, device="cpu"), ("replicas",)
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=axis.index)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self

    def rank(self) -> int:
        return self._index


def _allow_meta(unit: FSDPModule, device: torch.device) -> None:
    """Let FSDP2 gather into tensors without memory."""
    state: Any = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in filter(None, groups):  # one at most before torch 2.12
        group._validate_no_meta_params = lambda: None
        for parameter in group.fsdp_params:
            parameter.device = device


def _clone_view(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Clone an output that is a view: FSDP2's hooks on it would be lost if it were written to."""
    return output.clone() if is_view(output) else output


def _local_shard(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local
