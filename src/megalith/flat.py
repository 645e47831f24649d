"""Layout of parameters in flat memory, in pure integers; gradients and parameters share it.

Memory is cut into buckets, the units of communication. A parameter is never cut by a bucket, but it may be cut by the
equal parts of a bucket that data-parallel ranks own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64  # elements at whose multiples the owned range of a bucket starts: whole cache lines, wide loads

Kind = tuple[str, ...]
"""Further reductions of a bucket; parameters of different kinds are in different buckets."""


@dataclass(frozen=True)
class Bucket:
    """Range [start, stop) of the flat buffer, including padding at its end, and its parameters in order."""

    start: int
    stop: int
    names: tuple[str, ...]
    kind: Kind = ()


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of all parameters in a flat buffer, and its buckets."""

    shapes: Mapping[str, tuple[int, ...]]  # of the parameters, by name
    offsets: Mapping[str, int]  # of the first element of each parameter
    buckets: tuple[Bucket, ...]  # in order of their offsets

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    def span(self, name: str) -> tuple[int, int]:
        """Return the range [start, stop) of a parameter in the buffer."""
        start = self.offsets[name]
        return start, start + prod(self.shapes[name])

    def bucket_of(self, name: str) -> Bucket:
        """Return the bucket of a parameter."""
        return self.buckets[bisect_right(self.buckets, self.offsets[name], key=lambda bucket: bucket.start) - 1]

    def view(self, flat: Tensor, name: str, origin: int = 0) -> Tensor:
        """Return the view of a parameter in `flat`, whose first element is element `origin` of the layout."""
        start, stop = self.span(name)
        return flat[start - origin : stop - origin].view(self.shapes[name])


def lay_out(
    shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind], *, bucket_size: int, divisor: int
) -> FlatLayout:
    """Assign parameters to buckets.

    Args:
        shapes: of the parameters, by name, in the order in which they are to stand within their kind.
        kinds: of the parameters; () if absent. Plain buckets come first.
        bucket_size: elements at which a bucket is full; a parameter that is larger has a bucket to itself or ends one.
        divisor: the length of each bucket is padded to a multiple of it.
    """
    offsets: dict[str, int] = {}
    buckets: list[Bucket] = []
    end = 0
    for kind in sorted({kinds.get(name, ()) for name in shapes}):
        sizes = ((name, prod(shape)) for name, shape in shapes.items() if kinds.get(name, ()) == kind)
        for names in _fill_buckets(sizes, bucket_size):
            start = end
            for name in names:
                offsets[name] = end
                end += prod(shapes[name])
            end += -(end - start) % divisor
            buckets.append(Bucket(start, end, names, kind))
    return FlatLayout(dict(shapes), offsets, tuple(buckets))


def lay_out_gradients(
    shapes: dict[str, tuple[int, ...]], kinds: Mapping[str, Kind], replicas: int, bucket_size: int | None = None
) -> FlatLayout:
    """Lay out gradients, given in module order, which `replicas` ranks sum; backward passes complete the last first.

    `bucket_size` is by default Megatron's: latency must not count over many ranks.
    """
    if replicas == 1 and not any(kinds.values()):
        return lay_out(shapes, {}, bucket_size=sum(map(prod, shapes.values())), divisor=1)
    size = bucket_size or max(40_000_000, 1_000_000 * replicas)
    return lay_out(dict(reversed(shapes.items())), kinds, bucket_size=size, divisor=replicas * ALIGNMENT)


def _fill_buckets(sizes: Iterable[tuple[str, int]], bucket_size: int) -> Iterable[tuple[str, ...]]:
    """Yield groups of names, in order, whose sizes reach `bucket_size`; the last one may be smaller."""
    names: tuple[str, ...] = ()
    filled = 0
    for name, size in sizes:
        names, filled = (*names, name), filled + size
        if filled >= bucket_size:
            yield names
            names, filled = (), 0
    if names:
        yield names


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor whose elements are neighbours in memory."""

    start: int  # the number of its first element in the flattened tensor
    offset: tuple[int, ...]  # the indices of that element
    extent: tuple[int, ...]


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut the elements [start, stop) of a flattened tensor into as few boxes as its rows allow, in order.

    >>> [(box.offset, box.extent) for box in boxes(2, 9, (3, 4))]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if len(shape) == 1:
        if start < stop:
            yield Box(start, (start,), (stop - start,))
        return
    width = prod(shape[1:])
    first, last = -(-start // width), stop // width  # the whole rows
    if first > last:  # inside of one row
        yield from _boxes_of_row(last, start, stop, shape)
        return
    yield from _boxes_of_row(first - 1, start, first * width, shape)
    if first < last:
        yield Box(first * width, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _boxes_of_row(last, last * width, stop, shape)


def _boxes_of_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    origin = row * prod(shape[1:])
    if start < stop:
        for box in boxes(start - origin, stop - origin, shape[1:]):
            yield Box(box.start + origin, (row, *box.offset), (1, *box.extent))


def subtract_ranges(whole: tuple[int, int], holes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what of the range `whole` is in none of the ranges `holes`, in order.

    >>> subtract_ranges((2, 9), [(0, 3), (5, 6)])
    [(3, 5), (6, 9)]
    """
    start, stop = whole
    rest = []
    for first, last in sorted(holes):
        if start < min(first, stop):
            rest.append((start, min(first, stop)))
        start = max(start, last)
    return [*rest, (start, stop)] if start < stop else rest
