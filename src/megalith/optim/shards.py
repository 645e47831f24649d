"""This rank's shards of the parameters that are updated, and how updates of other ranks reach it.

| data parallelism | gradients in       | updated here                | weights to compute with                      |
|------------------|--------------------|-----------------------------|----------------------------------------------|
| replicated       | `GradientBuffers`  | all                         | those that were updated                      |
| ZeRO-1           | `GradientBuffers`  | a part of each flat bucket  | gathered after updates (`ParameterMemory`)   |
| ZeRO-2, ZeRO-3   | `ShardedGradients` | some rows of each parameter | gathered when they are needed (`FullyShard`) |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megalith.distributed.comm import Pending
from megalith.distributed.context import Axis, ParallelContext
from megalith.nn.sink import attach_sink
from megalith.optim.flat import Bucket, FlatLayout
from megalith.optim.gradients import GradientBuffers
from megalith.optim.norms import CountedOnce
from megalith.parallel.data import (
    DataParallel,
    ReplicaGroup,
    ReplicaSlice,
    Replicated,
    Zero1,
    partial_slices,
    reduce_partial_grads,
    reduction_kind,
)
from megalith.parallel.fsdp import FullyShard


class ShardedGradients:
    """Gradients of parameters that are cut over the replicas by rows: autograd makes them and FSDP2 reduces them.

    What other ranks hold too is summed when the step ends. The interface is that of `GradientBuffers`.
    """

    def __init__(self, parts: Sequence[FullyShard], copies: Mapping[str, tuple[ReplicaGroup, ...]]) -> None:
        self._parts, self._copies = parts, copies
        self._part_of = {name: part for part in parts for name in part.shapes}
        self.shapes = {name: part.shapes[name] for name, part in self._part_of.items()}
        some = next(iter(parts[0].shards.values()))
        self.device, self.dtype = some.device, some.dtype
        self._pieces: dict[str, Tensor] | None = None
        kinds = {name: reduction_kind(copies.get(name, ())) for name in self._part_of}
        self._alike = [[name for name in kinds if kinds[name] == kind] for kind in sorted(set(kinds.values())) if kind]

    @property
    def pieces(self) -> Mapping[str, Tensor]:
        """The gradients of this rank's rows, after `finish`."""
        assert self._pieces is not None, "the backward passes of the step have not ended"
        return self._pieces

    def owned(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of a flattened parameter in this rank's shard."""
        return self._part_of[name].owned(name)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step; without `num_micro_batches` every backward pass reduces."""
        self._pieces = None
        for part in self._parts:
            part.begin(num_micro_batches)

    @torch.no_grad()
    def finish(self) -> None:
        """End the backward passes of a step. Every rank calls this; calling it again does nothing."""
        if self._pieces is not None:
            return
        self._pieces = {name: grad for part in self._parts for name, grad in part.gradients().items()}
        for names in self._alike:
            self._sum_copies(names, self._pieces)

    def _sum_copies(self, names: Sequence[str], pieces: Mapping[str, Tensor]) -> None:
        """Sum the partial gradients of these parameters, of one kind, in one collective."""
        flat = torch.cat([pieces[name].reshape(-1) for name in names])
        parts, origin = list[ReplicaSlice](), 0
        for name in names:
            start, stop = self.owned(name)
            parts += partial_slices(self._copies[name], self.shapes[name], 0, start, stop, origin)
            origin += stop - start
        reduce_partial_grads(flat, parts)
        for name, part in zip(names, flat.split([pieces[name].numel() for name in names]), strict=True):
            pieces[name].view(-1).copy_(part)


class ParameterMemory:
    """Moves the data of parameters into flat memory; the parameters remain the same objects.

    The memory is laid out as the gradients are, so that updates by other ranks come in place. They may come while the
    next forward pass has begun: each part of the model then waits, before it is called, for the buckets of the weights
    it reads. Which part that is cannot be read off a module tree alone, since a weight may be used without a call of
    the module that holds it (fused linears, the output layer). So the calls of the first step, when nothing is on its
    way yet, are watched: a weight belongs to the innermost module around it that is called.
    With `overlap`, `gather` returns at once and the modules wait.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Mapping[str, Parameter],
        layout: FlatLayout,
        data_of: Callable[[Bucket], DataParallel],
        *,
        overlap: bool,
    ) -> None:
        some = next(iter(parameters.values()))
        self._flat = torch.zeros(layout.size, dtype=some.dtype, device=some.device)
        self._layout, self._data_of = layout, data_of
        self._pending: dict[int, Pending] = {}
        for name, parameter in parameters.items():
            view = layout.view(self._flat, name)
            view.copy_(parameter.data)
            parameter.data = view
        buckets = {parameters[name]: number for number, bucket in enumerate(layout.buckets) for name in bucket.names}
        self._calls = _Calls(modules, buckets, self._wait_for) if overlap else None
        self._order = _order_of_need(modules, buckets, len(layout.buckets))

    def gather(self) -> None:
        """Gather the updated parameters from their owners, in the order in which the forward pass needs them."""
        for number in self._order:
            bucket = self._layout.buckets[number]
            self._pending[number] = self._data_of(bucket).gather(self._flat[bucket.start : bucket.stop])
        if self._calls is None:
            self.wait()
            return
        for number in self._calls.not_awaited():
            self._wait_for(number)

    def wait(self) -> None:
        """Wait until all parameters are gathered."""
        for number in self._order:
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, down to the elements of lists of layers: each of these is one part."""
    yield module
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _parts(child)


def _order_of_need(modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], count: int) -> list[int]:
    """The buckets in the order in which their weights are waited for; the same on all replicas, whatever they call.

    Buckets are in reverse order of the modules, but what no call announces must be there from the start.
    """
    silent = [part for module in modules for part in _parts(module) if type(part).forward is nn.Module.forward]
    first = {buckets[parameter] for part in silent for parameter in part.parameters()}
    return sorted(range(count), key=lambda number: (number not in first, -number))


class _Calls:
    """Watches the calls of the first step; from then on parts of the model wait for their weights when called."""

    def __init__(
        self, modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], wait: Callable[[int], None]
    ) -> None:
        self._buckets, self._wait = buckets, wait
        self._parts = [part for module in modules for part in _parts(module)]  # outer ones first
        self._called: set[nn.Module] = set()
        self._hooks = [part.register_forward_pre_hook(self._on_call) for part in self._parts]
        self._awaited: dict[nn.Module, list[int]] | None = None
        self._alone: list[int] = []

    def _on_call(self, part: nn.Module, args: Any) -> None:
        if self._awaited is None:
            self._called.add(part)
            return
        for number in self._awaited.get(part, ()):
            self._wait(number)

    def not_awaited(self) -> list[int]:
        """The buckets that no call waits for; ends the watching."""
        if self._awaited is None:
            reader: dict[Parameter, nn.Module] = {}
            for part in filter(self._called.__contains__, self._parts):
                reader |= dict.fromkeys(part.parameters(), part)
            self._awaited = {
                part: sorted({self._buckets[parameter] for parameter, own in reader.items() if own is part})
                for part in set(reader.values())
            }
            self._alone = sorted({number for parameter, number in self._buckets.items() if parameter not in reader})
            for part, hook in zip(self._parts, self._hooks, strict=True):
                if part not in self._awaited:
                    hook.remove()
        return self._alone


class GatheredWeights:
    """Weights that the forward passes of fully sharded modules gather; the counterpart of `ParameterMemory`."""

    def __init__(self, parts: Sequence[FullyShard]) -> None:
        self._parts = parts

    def gather(self) -> None:
        """Do nothing: they are gathered when they are needed."""

    def wait(self) -> None:
        """Free what was gathered."""
        for part in self._parts:
            part.reshard()


@dataclass(frozen=True)
class OptimizerShards:
    """What this rank holds of the parameters that an optimizer updates."""

    gradients: GradientBuffers | ShardedGradients  # of all parameters
    weights: dict[str, Tensor]  # the parts of the parameters that are updated here, in the dtype of the model
    main: dict[str, Tensor]  # the same in at least fp32; the same tensors where the model computes so
    memory: ParameterMemory | GatheredWeights | None  # None where no other rank updates weights that are needed here
    norms: CountedOnce
    world: Axis  # all ranks, which agree on overflows
    # the parameters that the modules have, by name; None where FSDP2 has replaced them by `weights`
    parameters: Mapping[str, nn.Parameter] | None


def flat_shards(
    modules: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    ctx: ParallelContext,
    *,
    work: torch.dtype,
    grads: torch.dtype,
    copies: Mapping[str, tuple[ReplicaGroup, ...]],
    experts: Collection[str] = (),
    zero1: bool,
    bucket_size: int | None,
    overlap_gather: bool,
) -> OptimizerShards:
    """Return the shards of replicated parameters, in preallocated flat memory that the layers' gradient sink fills."""
    kind = Zero1 if zero1 else Replicated
    data, of_experts = kind(ctx), kind(ctx, experts=True)
    gradients = GradientBuffers(
        list(parameters.items()),
        grads,
        data=data,
        copies=copies,
        experts=experts,
        data_of_experts=of_experts,
        bucket_size=bucket_size,
    )
    for module in modules:
        attach_sink(module, gradients)
    memory = None
    if data.shards_update or (experts and of_experts.shards_update):
        memory = ParameterMemory(modules, parameters, gradients.layout, gradients.data_of, overlap=overlap_gather)
    weights = {name: gradients.piece(name, parameter.detach()) for name, parameter in parameters.items()}
    weights = {name: piece for name, piece in weights.items() if piece.numel() > 0}
    has_main = work != next(iter(parameters.values())).dtype
    main = {name: piece.to(work) for name, piece in weights.items()} if has_main else weights
    holders, elsewhere = ctx.world if zero1 else ctx.join("tp", "pp"), list[str]()
    if experts and not zero1:
        # The replicas of an expert are not those of a dense parameter: one sum over all ranks, of first replicas only.
        holders = ctx.world
        elsewhere = [name for name in parameters if not (of_experts if name in experts else data).axis.is_first]
    norms = CountedOnce(gradients, copies, holders, frozenset(elsewhere))
    return OptimizerShards(gradients, weights, main, memory, norms, ctx.world, parameters)


def fsdp_shards(
    parts: Sequence[FullyShard], ctx: ParallelContext, *, copies: Mapping[str, tuple[ReplicaGroup, ...]]
) -> OptimizerShards:
    """Return the shards of parameters that FSDP2 has divided over the replicas, which are the main parameters.

    In half precision the rounded weights are kept beside them for checkpoints.
    """
    main = {name: shard for part in parts for name, shard in part.shards.items() if shard.numel() > 0}
    weights = {name: shard.to(part.dtype) for part in parts for name, shard in part.shards.items() if name in main}
    if all(weights[name].dtype == shard.dtype for name, shard in main.items()):
        weights = main
    gradients = ShardedGradients(parts, copies)
    norms = CountedOnce(gradients, copies, ctx.world)
    return OptimizerShards(gradients, weights, main, GatheredWeights(parts), norms, ctx.world, None)
