"""Data parallelism: what of a flat memory a rank owns, and the collectives that keep the replicas equal.

The gradient of a step is the mean over the data-parallel axis of the sum over the context-parallel axis. Both ways
to it work on buckets: contiguous parts of flat memory whose length divides by the number of replicas. Experts that
are divided over these ranks have fewer replicas, the expert data-parallel axis: each has seen the tokens of all ranks
that share the experts with it, so that the sum over its replicas, divided by the number of all, is the same mean.

|                              | `Replicated`             | `Zero1` (arXiv:1910.02054)                           |
|------------------------------|--------------------------|------------------------------------------------------|
| gradients of a bucket        | all-reduce               | reduce-scatter: to each rank the part that it owns   |
| main parameters and moments  | whole, on every rank     | of the own part of each bucket                       |
| parameters, after the update | nothing                  | all-gather                                           |
| elements sent per rank       | 2 (n-1)/n N              | (n-1)/n N + (n-1)/n N                                |

What of a parameter other ranks hold too, outside data parallelism, is said by its `Copies`.
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
    """The ranks of one axis that share the work of an update of the dense parameters, or of the experts."""

    def __init__(self, ctx: ParallelContext, *, experts: bool = False) -> None:
        self.axis = ctx.edp if experts else ctx.join("cp", "dp")
        self._weight = 1.0 / ctx.dp.size

    def _weighted(self, grads: Tensor) -> Tensor:
        """Divided before the sum, which so overflows no sooner than one gradient does (gloo has no mean)."""
        return grads if self._weight == 1.0 else grads.mul_(self._weight)


class Replicated(_Replicas):
    """Every rank updates everything."""

    divides = False

    def owned(self, start: int, stop: int) -> tuple[int, int]:
        """The part of a bucket [start, stop) that this rank updates."""
        return start, stop

    def reduce(self, grads: Tensor) -> Pending:
        """Start making the gradients of a bucket, 1-D, those of all replicas, in place, where this rank owns them."""
        return start_all_reduce(self._weighted(grads), self.axis)

    def gather(self, parameters: Tensor) -> Pending:
        """Start collecting the parameters of a bucket, 1-D, in place, from their owners."""
        return Pending(parameters)


class Zero1(_Replicas):
    """Each rank updates an equal part of every bucket (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1)."""

    @property
    def divides(self) -> bool:
        """Whether a rank owns a part of a bucket only."""
        return self.axis.size > 1

    def owned(self, start: int, stop: int) -> tuple[int, int]:
        size, rest = divmod(stop - start, self.axis.size)
        assert rest == 0, f"a bucket of {stop - start} elements over {self.axis.size} ranks"
        return start + self.axis.index * size, start + (self.axis.index + 1) * size

    def reduce(self, grads: Tensor) -> Pending:
        return start_reduce_scatter(self._weighted(grads), self.axis, out=self._own(grads))

    def gather(self, parameters: Tensor) -> Pending:
        return start_all_gather(self._own(parameters), self.axis, out=parameters)

    def _own(self, bucket: Tensor) -> Tensor:
        start, stop = self.owned(0, bucket.numel())
        return bucket[start:stop]


DataParallel = Replicated | Zero1
"""How the replicas of a model share the work of an update."""


@dataclass(frozen=True)
class Copies:
    """Rows of a parameter that several ranks of an axis hold alike, beside data parallelism.

    Attributes:
        axis: these ranks.
        rows: [start, stop) along dimension 0 of the local tensor; None for all of it.
        part, parts: the ranks of the axis hold `parts` different tensors in these rows; here is number `part`.
        first: this rank is the first that holds it, and counts it in norms.
        partial: each holder has its own share of the gradient; it is their sum.
    """

    axis: Axis
    rows: tuple[int, int] | None = None
    part: int = 0
    parts: int = 1
    first: bool = True
    partial: bool = False


def kind_of(copies: Sequence[Copies]) -> tuple[str, ...]:
    """What is to be done to a gradient beside the reduction over the replicas; () for nothing.

    Parameters of one kind are the same on all ranks of the axis, in shape and order, so that a bucket of them is cut
    alike everywhere and each rank sums the part that it owns.
    """
    partial = [entry for entry in copies if entry.partial]
    if not partial:
        return ()
    assert len({entry.axis.name for entry in partial}) == 1, "a gradient is partial over one axis"
    whole = all(entry.rows is None and entry.parts == 1 for entry in partial)
    return (partial[0].axis.name, "whole" if whole else "rows")


@dataclass(frozen=True)
class CopiedPart:
    """The elements [start, stop) of a flat part of memory that belong to `copies`; may be empty."""

    copies: Copies
    start: int
    stop: int


def partial_parts(
    copies: Sequence[Copies], shape: Sequence[int], first: int, start: int, stop: int, origin: int = 0
) -> list[CopiedPart]:
    """What of a parameter is partial among the elements [start, stop) of flat memory, in which it begins at `first`.

    Element `start` is element `origin` of the flat part.
    """
    width, parts = prod(shape[1:]), []
    for entry in copies:
        if entry.partial:
            rows = entry.rows or (0, shape[0])
            ends = (min(max(first + row * width, start), stop) - start + origin for row in rows)
            parts.append(CopiedPart(entry, *ends))
    return parts


def sum_copies(flat: Tensor, parts: Sequence[CopiedPart]) -> None:
    """Sum partial gradients over their holders, in place; one collective.

    Where all is held alike `flat`, the owned part of a bucket, is summed itself. Else each rank puts its own into its
    row of a table with a row for each different tensor, the table is summed, and the rank takes its row back.
    """
    axis = parts[0].copies.axis
    if kind_of([part.copies for part in parts])[1] == "whole":
        all_reduce(flat, axis)
        return
    tables = [flat.new_zeros(part.copies.parts, part.stop - part.start) for part in parts]
    for table, part in zip(tables, parts, strict=True):
        table[part.copies.part] = flat[part.start : part.stop]
    sums = all_reduce(torch.cat([table.flatten() for table in tables]), axis)
    for table, total, part in zip(tables, sums.split([table.numel() for table in tables]), parts, strict=True):
        flat[part.start : part.stop] = total.view_as(table)[part.copies.part]
