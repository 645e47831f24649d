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

`ReplicaGroup` describes rows of a parameter that other ranks hold too, outside data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megalith.distributed.comm import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megalith.distributed.context import Axis, ParallelContext


class _Replicas:
    """The process group whose ranks hold the same dense parameters, or the same experts."""

    def __init__(self, ctx: ParallelContext, *, experts: bool = False) -> None:
        self.axis = ctx.edp if experts else ctx.join("cp", "dp")
        self._weight = 1.0 / ctx.dp.size

    def _weighted(self, grads: Tensor) -> Tensor:
        """Divide before the sum, so that the sum overflows no sooner than one gradient does (gloo has no mean)."""
        return grads if self._weight == 1.0 else grads.mul_(self._weight)


class Replicated(_Replicas):
    """Every rank updates all parameters (plain data parallelism)."""

    shards_update = False

    def owned_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of a bucket [start, stop) that this rank updates."""
        return start, stop

    def reduce(self, grads: Tensor) -> Pending:
        """Start reducing the gradients of a bucket, 1-D, over the replicas, in place, where this rank owns them."""
        return start_all_reduce(self._weighted(grads), self.axis)

    def gather(self, parameters: Tensor) -> Pending:
        """Start gathering the parameters of a bucket, 1-D, in place, from the ranks that updated them."""
        return Pending(parameters)


class Zero1(_Replicas):
    """Each rank updates an equal shard of every bucket (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1)."""

    @property
    def shards_update(self) -> bool:
        """True if a rank updates only a shard of each bucket."""
        return self.axis.size > 1

    def owned_range(self, start: int, stop: int) -> tuple[int, int]:
        size, rest = divmod(stop - start, self.axis.size)
        assert rest == 0, f"a bucket of {stop - start} elements over {self.axis.size} ranks"
        return start + self.axis.index * size, start + (self.axis.index + 1) * size

    def reduce(self, grads: Tensor) -> Pending:
        return start_reduce_scatter(self._weighted(grads), self.axis, out=self._own(grads))

    def gather(self, parameters: Tensor) -> Pending:
        return start_all_gather(self._own(parameters), self.axis, out=parameters)

    def _own(self, bucket: Tensor) -> Tensor:
        start, stop = self.owned_range(0, bucket.numel())
        return bucket[start:stop]


DataParallel = Replicated | Zero1
"""How the replicas of a model divide the update."""


@dataclass(frozen=True)
class ReplicaGroup:
    """Rows of a parameter that several ranks of a non-data-parallel axis hold replicated.

    Attributes:
        axis: the process group.
        rows: [start, stop) along dimension 0 of the local tensor; None for all of it.
        num_shards: the ranks of the axis hold so many different tensors in these rows.
        shard_index: of the one that this rank holds.
        first: this rank is the first replica, which alone counts in norms.
        partial: each replica has a partial gradient; the gradient is their sum.
    """

    axis: Axis
    rows: tuple[int, int] | None = None
    shard_index: int = 0
    num_shards: int = 1
    first: bool = True
    partial: bool = False


def reduction_kind(copies: Sequence[ReplicaGroup]) -> tuple[str, ...]:
    """Return which reduction a gradient needs besides the one over data-parallel replicas; () for none.

    Parameters of one kind have the same shapes in the same order on all ranks of the axis, so that their buckets are
    sharded alike and each rank reduces the shard that it owns.
    """
    partial = [entry for entry in copies if entry.partial]
    if not partial:
        return ()
    assert len({entry.axis.name for entry in partial}) == 1, "a gradient is partial over one axis"
    whole = all(entry.rows is None and entry.num_shards == 1 for entry in partial)
    return (partial[0].axis.name, "whole" if whole else "rows")


@dataclass(frozen=True)
class ReplicaSlice:
    """The elements [start, stop) of a flat buffer that are the rows of a replica group; may be empty."""

    group: ReplicaGroup
    start: int
    stop: int


def partial_slices(
    copies: Sequence[ReplicaGroup], shape: Sequence[int], first: int, start: int, stop: int, origin: int = 0
) -> list[ReplicaSlice]:
    """Return the partial-gradient slices of a parameter within the elements [start, stop) of flat memory.

    The parameter begins at element `first` of that memory, and element `start` is element `origin` of the result.
    """
    width, slices = prod(shape[1:]), []
    for entry in copies:
        if entry.partial:
            rows = entry.rows or (0, shape[0])
            ends = (min(max(first + row * width, start), stop) - start + origin for row in rows)
            slices.append(ReplicaSlice(entry, *ends))
    return slices


def reduce_partial_grads(flat: Tensor, slices: Sequence[ReplicaSlice]) -> None:
    """Sum partial gradients over their replicas, in place, in one all-reduce.

    If all ranks hold the same rows, `flat`, the owned shard of a bucket, is all-reduced itself. Else each rank copies
    its gradient into its row of a table with one row per different tensor, all-reduces the table and reads its row.
    """
    axis = slices[0].group.axis
    if reduction_kind([piece.group for piece in slices])[1] == "whole":
        all_reduce(flat, axis)
        return
    tables = [flat.new_zeros(piece.group.num_shards, piece.stop - piece.start) for piece in slices]
    for table, piece in zip(tables, slices, strict=True):
        table[piece.group.shard_index] = flat[piece.start : piece.stop]
    sums = all_reduce(torch.cat([table.flatten() for table in tables]), axis)
    for table, summed, piece in zip(tables, sums.split([table.numel() for table in tables]), slices, strict=True):
        flat[piece.start : piece.stop] = summed.view_as(table)[piece.group.shard_index]
