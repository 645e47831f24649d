"""Data parallelism: the part of each gradient bucket that a rank owns, and the collectives between the replicas.

The gradient of a step is the mean over the data-parallel axis of the sum over the context-parallel axis. Both classes
work on buckets: contiguous parts of flat memory whose length divides by the number of replicas. With
expert parallelism the replicas of an expert are the expert data-parallel axis: each has seen the tokens of all ranks
that share the experts with it, so that the sum over its replicas, divided by the data-parallel size, is the same mean.

|                              | `Replicated`             | `Zero1` (arXiv:1910.02054)                           |
|------------------------------|--------------------------|------------------------------------------------------|
| gradients of a bucket        | all-reduce               | reduce-scatter: to each rank the shard that it owns  |
| master weights and moments   | whole, on every rank     | of the owned shard of each bucket                    |
| parameters, after the update | no communication         | all-gather                                           |
| elements sent per rank       | 2 (n-1)/n N              | (n-1)/n N + (n-1)/n N                                |

`Replicated` is plain data parallelism (DDP); the placement of that name, `nn.placement.Replicated`, is about tensor
parallelism. `ReplicatedRows` describes rows of a parameter that other ranks hold too, outside data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.distributed.comm import AsyncHandle, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megalith.distributed.context import Axis, ParallelContext


class _Replicas:
    """The process group whose ranks hold the same dense parameters, or the same experts."""

    def __init__(self, ctx: ParallelContext, *, experts: bool = False) -> None:
        self.axis = ctx.edp if experts else ctx.flatten_axes("cp", "dp")
        self._grad_scale = 1.0 / ctx.dp.size

    def _scale_(self, grads: Tensor) -> Tensor:
        """Divide by the DP size before summing, to avoid overflow (gloo has no average)."""
        return grads if self._grad_scale == 1.0 else grads.mul_(self._grad_scale)


class Replicated(_Replicas):
    """Every rank updates all parameters (plain data parallelism)."""

    shards_optimizer = False

    def owned_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of a bucket [start, stop) that this rank updates."""
        return start, stop

    def reduce(self, grads: Tensor) -> AsyncHandle:
        """Start reducing a bucket's gradients, 1-D, in place; only the owned range is valid afterwards."""
        return start_all_reduce(self._scale_(grads), self.axis)

    def gather(self, parameters: Tensor) -> AsyncHandle:
        """Start gathering the parameters of a bucket, 1-D, in place, from the ranks that updated them."""
        return AsyncHandle(parameters)


class Zero1(_Replicas):
    """Each rank updates an equal shard of every bucket (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1)."""

    @property
    def shards_optimizer(self) -> bool:
        """Return whether a rank updates only a shard of each bucket."""
        return self.axis.size > 1

    def owned_range(self, start: int, stop: int) -> tuple[int, int]:
        size, rest = divmod(stop - start, self.axis.size)
        assert rest == 0, f"a bucket of {stop - start} elements over {self.axis.size} ranks"
        return start + self.axis.index * size, start + (self.axis.index + 1) * size

    def reduce(self, grads: Tensor) -> AsyncHandle:
        return start_reduce_scatter(self._scale_(grads), self.axis, out=self._own(grads))

    def gather(self, parameters: Tensor) -> AsyncHandle:
        return start_all_gather(self._own(parameters), self.axis, out=parameters)

    def _own(self, bucket: Tensor) -> Tensor:
        start, stop = self.owned_range(0, bucket.numel())
        return bucket[start:stop]


DataParallel = Replicated | Zero1
"""How the replicas of a model divide the update."""


@dataclass(frozen=True)
class ReplicatedRows:
    """Rows of a parameter that this rank shares with other ranks of a non-data-parallel axis.

    Attributes:
        axis: the process group.
        rows: [start, stop) along dimension 0 of the local tensor; None for all of it.
        shard_index: index of the distinct tensor that this rank holds (with tp 4 and 2 KV heads: 0, 0, 1, 1).
        num_shards: number of distinct tensors among the ranks of the axis (there: 2); 1 if all hold the same one.
        is_first_replica: this rank is the first of those that hold the same rows; norms count only its elements.
        partial: each replica has a partial gradient; the gradient is their sum.
    """

    axis: Axis
    rows: tuple[int, int] | None = None
    shard_index: int = 0
    num_shards: int = 1
    is_first_replica: bool = True
    partial: bool = False


class ExtraReduction(NamedTuple):
    """Sum of partial gradients over an axis, besides the reduction over data-parallel replicas.

    Parameters with an equal one have equal shapes and order on all ranks of the axis: each rank reduces what it owns.
    """

    axis: str  # name of the axis
    extent: Literal["whole", "rows"]  # whether all ranks of the axis hold all of the parameter, or some of its rows


def extra_reduction(replicated_rows: Sequence[ReplicatedRows]) -> ExtraReduction | None:
    """Return the reduction that a gradient needs besides the one over data-parallel replicas; None for none."""
    partial = [replicated for replicated in replicated_rows if replicated.partial]
    if not partial:
        return None
    assert len({replicated.axis.name for replicated in partial}) == 1, "a gradient is partial over one axis"
    whole = all(replicated.rows is None and replicated.num_shards == 1 for replicated in partial)
    return ExtraReduction(partial[0].axis.name, "whole" if whole else "rows")


@dataclass(frozen=True)
class ReplicaSlice:
    """The elements [start, stop) of a flat buffer that are replicated rows; may be empty."""

    replicated: ReplicatedRows
    start: int
    stop: int


def partial_slices(
    replicated_rows: Sequence[ReplicatedRows],
    shape: Sequence[int],
    param_offset: int,
    start: int,
    stop: int,
    output_offset: int = 0,
) -> list[ReplicaSlice]:
    """Return the partial-gradient slices of a parameter within the elements [start, stop) of flat memory.

    The parameter begins at element `param_offset` of that memory; element `start` is `output_offset` in the result.
    """
    width, slices = prod(shape[1:]), []
    for replicated in replicated_rows:
        if replicated.partial:
            rows = replicated.rows or (0, shape[0])
            bounds = (min(max(param_offset + row * width, start), stop) - start + output_offset for row in rows)
            slices.append(ReplicaSlice(replicated, *bounds))
    return slices


def reduce_partial_grads(flat: Tensor, slices: Sequence[ReplicaSlice]) -> None:
    """Sum partial gradients over their replicas, in place, in one all-reduce.

    If all ranks hold the same rows, `flat`, the owned shard of a bucket, is all-reduced itself. Else each rank copies
    its gradient into its row of a table with one row per distinct tensor, all-reduces the table and reads its row.
    """
    axis, reduction = slices[0].replicated.axis, extra_reduction([piece.replicated for piece in slices])
    if reduction is not None and reduction.extent == "whole":
        all_reduce(flat, axis)
        return
    tables = [flat.new_zeros(piece.replicated.num_shards, piece.stop - piece.start) for piece in slices]
    for table, piece in zip(tables, slices, strict=True):
        table[piece.replicated.shard_index] = flat[piece.start : piece.stop]
    sums = all_reduce(torch.cat([table.flatten() for table in tables]), axis)
    for table, summed, piece in zip(tables, sums.split([table.numel() for table in tables]), slices, strict=True):
        flat[piece.start : piece.stop] = summed.view_as(table)[piece.replicated.shard_index]
