"""This rank's shards of the parameters, and the all-gather of updated parameters.

| data parallelism | gradients in       | updated by this rank        | weights of the forward pass                  |
|------------------|--------------------|-----------------------------|----------------------------------------------|
| replicated       | `GradientBuffers`  | all                         | the updated weights                          |
| ZeRO-1           | `GradientBuffers`  | a part of each flat bucket  | gathered after updates (`ParameterBuffers`)   |
| ZeRO-2, ZeRO-3   | `ShardedGradients` | some rows of each parameter | gathered in forward passes (`FullyShard`)    |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megalith.distributed.comm import AsyncHandle
from megalith.distributed.context import Axis, ParallelContext
from megalith.flat import Bucket, FlatLayout
from megalith.nn.sink import attach_sink
from megalith.optim.gradients import GradientBuffers
from megalith.optim.norms import GlobalNorms
from megalith.parallel.data import (
    DataParallel,
    ReplicaSlice,
    Replicated,
    ReplicatedRows,
    Zero1,
    extra_reduction,
    partial_slices,
    reduce_partial_grads,
)

if TYPE_CHECKING:
    from megalith.parallel.fsdp import FullyShard


class ShardedGradients:
    """Gradients of parameters sharded over the replicas by rows: autograd computes and FSDP2 reduces them.

    Partial gradients are summed over their replicas when the step ends. The interface is that of `GradientBuffers`.
    """

    def __init__(self, units: Sequence[FullyShard], replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]]) -> None:
        self._units, self._replicated_rows = units, replicated_rows
        self._unit_of = {name: unit for unit in units for name in unit.shapes}
        self.shapes = {name: unit.shapes[name] for name, unit in self._unit_of.items()}
        some = next(iter(units[0].shards.values()))
        self.device, self.dtype = some.device, some.dtype
        self._grad_shards: dict[str, Tensor] | None = None
        extra = {name: extra_reduction(replicated_rows.get(name, ())) for name in self._unit_of}
        distinct = sorted(set(filter(None, extra.values())))
        self._alike = [[name for name in extra if extra[name] == reduction] for reduction in distinct]

    @property
    def grad_shards(self) -> Mapping[str, Tensor]:
        """Gradients of this rank's rows, after `finish`."""
        assert self._grad_shards is not None, "the backward passes of the step have not ended"
        return self._grad_shards

    def owned_range(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of a flattened parameter in this rank's shard."""
        return self._unit_of[name].owned_range(name)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step of so many micro-batches, or of a number that is not known (`FullyShard.begin`)."""
        self._grad_shards = None
        for unit in self._units:
            unit.begin(num_micro_batches)

    @torch.no_grad()
    def finish(self) -> None:
        """End the backward passes of a step. Every rank calls this; calling it again does nothing."""
        if self._grad_shards is not None:
            return
        self._grad_shards = {name: grad for unit in self._units for name, grad in unit.gradients().items()}
        for names in self._alike:
            self._reduce_partial_grads(names, self._grad_shards)

    def _reduce_partial_grads(self, names: Sequence[str], grad_shards: Mapping[str, Tensor]) -> None:
        """Sum the partial gradients of these parameters, with the same `extra_reduction`, in one collective."""
        flat = torch.cat([grad_shards[name].reshape(-1) for name in names])
        slices, offset = list[ReplicaSlice](), 0
        for name in names:
            start, stop = self.owned_range(name)
            slices += partial_slices(self._replicated_rows[name], self.shapes[name], 0, start, stop, offset)
            offset += stop - start
        reduce_partial_grads(flat, slices)
        for name, summed in zip(names, flat.split([grad_shards[name].numel() for name in names]), strict=True):
            grad_shards[name].view(-1).copy_(summed)


class ParameterBuffers:
    """Moves the data of parameters into flat buffers; the parameters remain the same objects.

    The layout is that of the gradients, so that updates by other ranks are gathered in place. With `overlap`, `gather`
    returns at once, and each module waits, before its forward pass, for the buckets of the weights that it reads. The
    module tree does not determine these weights, since a weight may be used without a call of its own module (fused
    linears, the output layer). Therefore the calls of the first step, before the first gather, are recorded: a weight
    belongs to the innermost enclosing module that is called.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Mapping[str, Parameter],
        layout: FlatLayout,
        replicas_of: Callable[[Bucket], DataParallel],
        *,
        overlap: bool,
    ) -> None:
        some = next(iter(parameters.values()))
        self._flat = torch.zeros(layout.size, dtype=some.dtype, device=some.device)
        self._layout, self._replicas_of = layout, replicas_of
        self._pending: dict[int, AsyncHandle] = {}
        for name, parameter in parameters.items():
            view = layout.view(self._flat, name)
            view.copy_(parameter.data)
            parameter.data = view
        buckets = {parameters[name]: number for number, bucket in enumerate(layout.buckets) for name in bucket.names}
        self._calls = _ParameterReads(modules, buckets, self._wait_for) if overlap else None
        self._order = _gather_order(modules, buckets, len(layout.buckets))

    def gather(self) -> None:
        """Gather the updated parameters from their owners, in the order in which the forward pass needs them."""
        for number in self._order:
            bucket = self._layout.buckets[number]
            self._pending[number] = self._replicas_of(bucket).gather(self._flat[bucket.start : bucket.stop])
        if self._calls is None:
            self.wait()
            return
        for number in self._calls.unawaited():
            self._wait_for(number)

    def wait(self) -> None:
        """Wait until all parameters are gathered."""
        for number in self._order:
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its descendants, down to the elements of lists of layers."""
    yield module
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _units(child)


def _gather_order(modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], count: int) -> list[int]:
    """Return the buckets in the order in which the forward pass reads them; the same on all replicas.

    Buckets are in reverse order of the modules; weights of modules that are never called come first.
    """
    silent = [unit for module in modules for unit in _units(module) if type(unit).forward is nn.Module.forward]
    first = {buckets[parameter] for unit in silent for parameter in unit.parameters() if parameter in buckets}
    return sorted(range(count), key=lambda number: (number not in first, -number))


class _ParameterReads:
    """Records which modules are called in the first step; afterwards these wait for their weights when called."""

    def __init__(
        self, modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], wait: Callable[[int], None]
    ) -> None:
        self._buckets, self._wait = buckets, wait
        self._units = [unit for module in modules for unit in _units(module)]  # outer ones first
        self._called: set[nn.Module] = set()
        self._hooks = [unit.register_forward_pre_hook(self._on_call) for unit in self._units]
        self._awaited: dict[nn.Module, list[int]] | None = None
        self._unread: list[int] = []

    def _on_call(self, unit: nn.Module, args: Any) -> None:
        if self._awaited is None:
            self._called.add(unit)
            return
        for number in self._awaited.get(unit, ()):
            self._wait(number)

    def unawaited(self) -> list[int]:
        """Return the buckets that no call waits for, and end the recording."""
        if self._awaited is None:
            reader: dict[Parameter, nn.Module] = {}
            for unit in filter(self._called.__contains__, self._units):
                reader |= dict.fromkeys(filter(self._buckets.__contains__, unit.parameters()), unit)
            self._awaited = {
                unit: sorted({self._buckets[parameter] for parameter, own in reader.items() if own is unit})
                for unit in set(reader.values())
            }
            self._unread = sorted({number for parameter, number in self._buckets.items() if parameter not in reader})
            for unit, hook in zip(self._units, self._hooks, strict=True):
                if unit not in self._awaited:
                    hook.remove()
        return self._unread


class GatheredWeights:
    """Weights that FSDP2 gathers in forward passes; the counterpart of `ParameterBuffers`."""

    def __init__(self, units: Sequence[FullyShard]) -> None:
        self._units = units

    def gather(self) -> None:
        """Do nothing: forward passes gather the weights."""

    def wait(self) -> None:
        """Free the gathered weights."""
        for unit in self._units:
            unit.reshard()


@dataclass(frozen=True)
class OptimizerShards:
    """This rank's shards of the parameters, their gradients and master weights."""

    gradients: GradientBuffers | ShardedGradients  # of all parameters
    weights: dict[str, Tensor]  # shards of the parameters that this rank updates, in the dtype of the model
    master_weights: dict[str, Tensor]  # the same in at least fp32; the same tensors if the model computes in fp32
    param_sync: ParameterBuffers | GatheredWeights | None  # None if each rank updates all its weights
    norms: GlobalNorms
    world: Axis  # all ranks, which agree on overflows
    # parameters of the modules by name; None where FSDP2 has replaced them by `weights`
    parameters: Mapping[str, nn.Parameter] | None


def flat_shards(
    modules: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    ctx: ParallelContext,
    *,
    work: torch.dtype,
    grads: torch.dtype,
    replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]],
    experts: Collection[str] = (),
    zero1: bool,
    bucket_size: int | None,
    overlap_gather: bool,
) -> OptimizerShards:
    """Return the shards of replicated parameters, in preallocated flat memory that the layers' gradient sink fills."""
    kind = Zero1 if zero1 else Replicated
    data, expert_data = kind(ctx), kind(ctx, experts=True)
    gradients = GradientBuffers(
        list(parameters.items()),
        grads,
        data=data,
        replicated_rows=replicated_rows,
        experts=experts,
        expert_data=expert_data,
        bucket_size=bucket_size,
    )
    for module in modules:
        attach_sink(module, gradients)
    param_sync = None
    if data.shards_optimizer or (experts and expert_data.shards_optimizer):
        param_sync = ParameterBuffers(
            modules, parameters, gradients.layout, gradients.replicas_of, overlap=overlap_gather
        )
    weights = {name: gradients.owned_shard(name, parameter.detach()) for name, parameter in parameters.items()}
    weights = {name: shard for name, shard in weights.items() if shard.numel() > 0}
    has_master_weights = work != next(iter(parameters.values())).dtype
    master_weights = {name: shard.to(work) for name, shard in weights.items()} if has_master_weights else weights
    axis, not_counted = ctx.world if zero1 else ctx.flatten_axes("tp", "pp"), list[str]()
    if ctx.has_expert_axes and not zero1:  # on stages without experts too, whose ranks take part in the same sum
        # The replicas of an expert are not those of a dense parameter: one sum over all ranks, of first replicas only.
        axis = ctx.world
        not_counted = [name for name in parameters if not (expert_data if name in experts else data).axis.is_first]
    norms = GlobalNorms(gradients, replicated_rows, axis, frozenset(not_counted))
    return OptimizerShards(gradients, weights, master_weights, param_sync, norms, ctx.world, parameters)


def fsdp_shards(
    units: Sequence[FullyShard], ctx: ParallelContext, *, replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]]
) -> OptimizerShards:
    """Return the shards of parameters sharded by FSDP2, which are the master weights.

    In half precision the rounded weights are kept too, for checkpoints.
    """
    master_weights = {name: shard for unit in units for name, shard in unit.shards.items() if shard.numel() > 0}
    weights = {
        name: shard.to(unit.dtype) for unit in units for name, shard in unit.shards.items() if name in master_weights
    }
    if all(weights[name].dtype == shard.dtype for name, shard in master_weights.items()):
        weights = master_weights
    gradients = ShardedGradients(units, replicated_rows)
    norms = GlobalNorms(gradients, replicated_rows, ctx.world)
    return OptimizerShards(gradients, weights, master_weights, GatheredWeights(units), norms, ctx.world, None)
