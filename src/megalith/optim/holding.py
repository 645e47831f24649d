"""What a rank holds of the parameters that it updates, and how the others' updates reach it.

| data parallelism | gradients in       | updated here                | weights to compute with                      |
|------------------|--------------------|-----------------------------|----------------------------------------------|
| replicated       | `GradientBuffers`  | all                         | those that were updated                      |
| ZeRO-1           | `GradientBuffers`  | a part of each flat bucket  | gathered after updates (`ParameterMemory`)   |
| ZeRO-2, ZeRO-3   | `ShardedGradients` | some rows of each parameter | gathered when they are needed (`FullyShard`) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.distributed.context import Axis, ParallelContext
from megalith.nn.sink import attach_sink
from megalith.optim.gradients import GradientBuffers
from megalith.optim.parameters import ParameterMemory
from megalith.optim.sharded import ShardedGradients
from megalith.parallel.data import Copies, Replicated, Zero1
from megalith.parallel.fsdp import FullyShard


class Gradients(Protocol):
    """The gradients of named parameters in the course of a step."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """That they are held in."""
        ...

    def owned(self, name: str) -> tuple[int, int]:
        """The elements [start, stop) of a parameter, flattened, that this rank updates; empty where start is stop."""
        ...

    @property
    def pieces(self) -> Mapping[str, Tensor]:
        """After `finish` the gradients of what is owned, in the shape of the parameter where all of it is; the
        parameters of which nothing is owned may be left out."""
        ...

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step of so many backward passes."""
        ...

    def finish(self) -> None:
        """End its backward passes: make the gradients those of all replicas and of all copies."""
        ...


class Memory(Protocol):
    """How weights that other ranks update come here."""

    def gather(self) -> None:
        """All ranks have updated what they own."""
        ...

    def wait(self) -> None:
        """Until the weights may be read and written other than by a forward pass."""
        ...


@dataclass(frozen=True)
class Holding:
    """What an optimizer works on.

    Attributes:
        gradients: of all parameters.
        weights: what is updated here of the parameters, in the dtype that the model computes with.
        main: the same in at least fp32; the same tensors where the model computes so.
        memory: None where no other rank updates weights that are needed here.
        holders: the ranks among which every parameter has one owner (or one for each of its `Copies`), but for
            those that are counted `elsewhere`.
        elsewhere: names of the parameters that have owners on several replicas, of which this one is not the first.
    """

    gradients: Gradients
    weights: dict[str, Tensor]
    main: dict[str, Tensor]
    memory: Memory | None
    holders: Axis
    elsewhere: frozenset[str] = frozenset()


def hold_flat(
    modules: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    ctx: ParallelContext,
    *,
    work: torch.dtype,
    grads: torch.dtype,
    copies: Mapping[str, tuple[Copies, ...]],
    experts: Collection[str] = (),
    zero1: bool,
    bucket_size: int | None,
    overlap_gather: bool,
) -> Holding:
    """Replicated parameters with preallocated gradients, whose layers get a sink that writes to these.

    Args:
        modules: that hold the parameters.
        parameters: by name, of one dtype.
        ctx: the ranks.
        work: dtype of the main parameters.
        grads: dtype of the gradients.
        copies: which parameters other ranks hold too, beside data parallelism.
        experts: names of the parameters that are divided over expert-parallel ranks.
        zero1, bucket_size, overlap_gather: as the optimizer's.
    """
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
    if data.divides or (experts and of_experts.divides):
        memory = ParameterMemory(modules, parameters, gradients.layout, gradients.data_of, overlap=overlap_gather)
    weights = {name: gradients.piece(name, parameter.detach()) for name, parameter in parameters.items()}
    weights = {name: piece for name, piece in weights.items() if piece.numel() > 0}
    has_main = work != next(iter(parameters.values())).dtype
    main = {name: piece.to(work) for name, piece in weights.items()} if has_main else weights
    if zero1:
        return Holding(gradients, weights, main, memory, ctx.world)
    if not experts:
        return Holding(gradients, weights, main, memory, ctx.join("tp", "pp"))
    # The replicas of an expert are not those of a dense parameter: one sum over all ranks, of first replicas only.
    elsewhere = [name for name in parameters if not (of_experts if name in experts else data).axis.is_first]
    return Holding(gradients, weights, main, memory, ctx.world, frozenset(elsewhere))


def hold_shards(
    parts: Sequence[FullyShard], ctx: ParallelContext, *, copies: Mapping[str, tuple[Copies, ...]]
) -> Holding:
    """Parameters that are cut over the replicas. Their memory here is that of the main parameters; in half precision
    the rounded weights, which the gather makes anew, are kept beside it as checkpoints want them."""
    main = {name: shard for part in parts for name, shard in part.shards.items() if shard.numel() > 0}
    weights = {name: shard.to(part.dtype) for part in parts for name, shard in part.shards.items() if name in main}
    if all(weights[name].dtype == shard.dtype for name, shard in main.items()):
        weights = main
    return Holding(ShardedGradients(parts, copies), weights, main, _Gathered(parts), ctx.world)


class _Gathered:
    """Weights that the forward passes gather."""

    def __init__(self, parts: Sequence[FullyShard]) -> None:
        self._parts = parts

    def gather(self) -> None:
        """Nothing: they are gathered when they are needed."""

    def wait(self) -> None:
        """Let what was gathered go."""
        for part in self._parts:
            part.let_go()
