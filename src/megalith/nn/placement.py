"""Placements: how parameters are sharded over tensor-parallel ranks, and the arithmetic of shards.

A module declares, beside its math, one placement for each of its parameters. The readers are the seeded
initialisation, the checkpoint chunks, the import and export of foreign formats, the extra gradient sums,
the norms and counts, and the documentation. A placement names no rank, only the tensor dimension that is sharded.
`local_pieces` alone defines which rows of the global tensor a rank holds; everything else here derives from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import LayoutError
from megalith.layout import shard_range


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole tensor.

    With `partial` each rank applies it to its own activations, such as its heads, so that its gradient is a partial
    sum, with and without sequence parallelism.
    """

    partial: bool = False


@dataclass(frozen=True)
class Split:
    """Tensor-parallel rank r holds the r-th part along tensor dimension `dim`.

    The parts are equal unless `extent`, the extent of the global tensor along `dim`, is given: then it need not be
    divisible, and the first parts are longer by one (`layout.cut`).
    """

    dim: int
    extent: int | None = None


@dataclass(frozen=True)
class Fused:
    """`parts` tensors stacked along `dim`, each split on its own, so that a shard is [part 0 shard; part 1 shard; ...].

    The gate and up projections of a gated feed-forward layer are `Fused(dim=0, parts=2)`: cutting the stacked
    tensor into contiguous halves would give one rank all gates and the other all ups.
    """

    dim: int
    parts: int


@dataclass(frozen=True)
class GroupedHeads:
    """The fused query-key-value projection: for each group its query heads, its key head and its value head, by rows.

    With no more ranks than groups a rank holds whole groups. With more, the query heads of a group are divided over
    its ranks, and each of these also holds the group's key and value head:

        2 groups of 4 queries on 4 ranks:   rank 0: q0 q1 k v    rank 1: q2 q3 k v    (k, v the same rows)

    `gated` projections hold a gate head for each query head, after the query heads of the group (Megatron's
    `--attention-output-gate`): q0 q1 g0 g1 k v.
    """

    groups: int
    queries_per_group: int
    head_size: int
    gated: bool = False

    dim = 0

    @property
    def heads_of_kinds(self) -> tuple[int, ...]:
        """Heads of a group by kind, in order: queries, gates where there are any, key, value."""
        return (self.queries_per_group,) * (2 if self.gated else 1) + (1, 1)

    @property
    def heads_per_group(self) -> int:
        """Heads of a group of all kinds."""
        return sum(self.heads_of_kinds)

    @property
    def extent(self) -> int:
        """Rows of the global tensor."""
        return self.groups * self.heads_per_group * self.head_size


Placement = Replicated | Split | Fused | GroupedHeads


@dataclass(frozen=True)
class Shard:
    """The part [start, stop) of a dimension on this rank; `replicas` ranks hold the same part."""

    start: int
    stop: int
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start


def shard(extent: int, size: int, index: int, *, even: bool = True, share: bool = False) -> Shard:
    """Return the range of `extent` that the index-th of `size` ranks holds.

    The parts are equal, or with `even` False the first ones longer by one. With `share` and more ranks than there is to
    divide, several neighbours hold the same single part.

    Raises:
        LayoutError: it cannot be divided so.
    """
    if share and extent < size:
        if size % extent:
            raise LayoutError(f"{size} tensor-parallel ranks cannot share {extent} evenly; use a multiple of {extent}")
        start = index * extent // size
        return Shard(start, start + 1, size // extent)
    if extent < size or (even and extent % size):
        raise LayoutError(f"{extent} does not divide over {size} tensor-parallel ranks")
    return Shard(*shard_range(extent, size, index))


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a tensor, along the dimension that its placement cuts.

    Attributes:
        local, whole: first row in the tensor of this rank, and in the global tensor.
        length: rows.
        holders: the indices on the axis that hold these rows.
    """

    local: int
    whole: int
    length: int
    holders: range


def dim_of(placement: Placement) -> int:
    """Return the tensor dimension that a placement divides."""
    return 0 if isinstance(placement, Replicated) else placement.dim


def local_pieces(placement: Placement, extent: int, size: int, index: int) -> list[Piece]:
    """Return the rows that a rank holds, in the order in which it holds them; together its whole local tensor.

    `extent` is that of the global tensor along `dim_of(placement)`, `size` and `index` are of the tensor-parallel axis.

    Raises:
        LayoutError: the tensor cannot be divided so.
    """
    here = range(index, index + 1)
    if isinstance(placement, Replicated):
        return [Piece(0, 0, extent, range(size))]
    if isinstance(placement, Split):
        part = shard(extent, size, index, even=placement.extent is None)
        return [Piece(0, part.start, part.size, here)]
    if isinstance(placement, Fused):
        if extent % placement.parts:
            raise LayoutError(f"a dimension of {extent} does not hold {placement.parts} parts")
        whole = extent // placement.parts
        part = shard(whole, size, index)
        return [Piece(n * part.size, n * whole + part.start, part.size, here) for n in range(placement.parts)]
    return _pieces_of_heads(placement, size, index)


def _pieces_of_heads(placement: GroupedHeads, size: int, index: int) -> list[Piece]:
    here, group = range(index, index + 1), shard(placement.groups, size, index, share=True)
    rows = placement.heads_per_group * placement.head_size
    if group.replicas == 1:
        return [Piece(0, group.start * rows, group.size * rows, here)]
    first = index - index % group.replicas
    queries = shard(placement.queries_per_group, group.replicas, index - first)
    start, length = group.start * rows, queries.size * placement.head_size
    of_kind = placement.queries_per_group * placement.head_size
    kinds = 2 if placement.gated else 1
    return [
        *(
            Piece(kind * length, start + kind * of_kind + queries.start * placement.head_size, length, here)
            for kind in range(kinds)
        ),
        Piece(
            kinds * length,
            start + kinds * of_kind,
            2 * placement.head_size,
            range(first, first + group.replicas),
        ),
    ]


def _with(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def global_shape(local: Sequence[int], placement: Placement, size: int) -> tuple[int, ...]:
    """Return the shape of the global tensor of which a rank holds a tensor of shape `local`."""
    if isinstance(placement, Replicated):
        return tuple(local)
    extent = None if isinstance(placement, Fused) else placement.extent
    return _with(local, placement.dim, local[placement.dim] * size if extent is None else extent)


def local_part(whole: Tensor, placement: Placement, size: int, index: int) -> Tensor:
    """Return a rank's shard of a global tensor; `whole` itself or a view if it is one piece."""
    dim = dim_of(placement)
    pieces = local_pieces(placement, whole.shape[dim], size, index)
    parts = [whole.narrow(dim, piece.whole, piece.length) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
