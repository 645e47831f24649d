"""Content of a checkpoint, free of files: chunks of global tensors, objects, and the state that every rank shares.

A chunk is a live local tensor together with its place in a global one. The same list describes a save (the tensors
are read) and a load (the tensors are filled in place), so nothing has to be rebuilt between the two. Two chunks of one
tensor are compared and copied by the box of elements that both hold (`overlapping_views`, `fill`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megalith.errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A box of the global tensor `key`: it starts at `offset`, and `tensor` holds its elements.

    `tensor` has as many dimensions as the global tensor: a parameter of layer l of L is [1, ...] at offset (l, ...)
    of a global [L, ...].
    """

    key: str
    tensor: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        assert len(shape) == len(self.offset) == len(self.global_shape), f"{self.key}: dimensions differ"
        inside = (
            start >= 0 and start + size <= extent
            for start, size, extent in zip(self.offset, shape, self.global_shape, strict=True)
        )
        assert all(inside), f"{self.key}: {shape} at {self.offset} is outside {self.global_shape}"

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class CheckpointContent:
    """Everything that one save writes, or that one load asks for."""

    chunks: list[Chunk] = field(default_factory=list)  # boxes of global tensors; live tensors on any device
    # key -> any picklable value of plain types, tensors and numpy arrays. For a load the keys count only.
    objects: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)  # the shared state that becomes `common.pt`; ignored by a load
    # key of a chunk -> its key in files of format torch_dist, where that is another; ignored by a load
    written_as: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True)
class LoadedContent:
    """Common state, objects and unrequested keys of a load, which filled the tensors in place."""

    common: dict[str, Any]  # the shared state of the checkpoint
    objects: dict[str, Any]  # the objects that were asked for
    unexpected: tuple[str, ...] = ()  # keys that the checkpoint holds and the load did not ask for


def renamed(chunks: Iterable[Chunk], names: Mapping[str, str]) -> list[Chunk]:
    """Return the chunks under the keys that `names` gives them; a chunk that is not in it keeps its key."""
    return [replace(chunk, key=names[chunk.key]) if chunk.key in names else chunk for chunk in chunks]


def by_key(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """Group chunks by the global tensor that they belong to, in order of first appearance."""
    grouped: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.key, []).append(chunk)
    return grouped


def share_of(chunks: Sequence[Chunk], index: int, size: int) -> list[Chunk]:
    """Return the chunks that rank `index` of `size` writes of a list that all hold: shares of about equal bytes."""
    return [chunks[number] for number in sorted(balanced([chunk.nbytes for chunk in chunks], size)[index])]


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items of given sizes into `count` shares of about equal size: the numbers of each, the largest first."""
    loads, shares = [0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[number]
        shares[lightest].append(number)
    return shares


def volume(shape: Iterable[int]) -> int:
    """Return the number of elements of a shape; 1 for a scalar."""
    return math.prod(shape)


Span = tuple[int, int]


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> list[Span] | None:
    """Return first and last element, by dimension, of what two boxes of one tensor share; None if they are disjoint."""
    box = []
    for start, size, other_start, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        box.append((low, high))
    return box


def view_of(chunk: Chunk, box: Sequence[Span]) -> Tensor:
    """Return a view of a box of the global tensor; the chunk holds all of its elements."""
    view = chunk.tensor
    for dim, ((low, high), start) in enumerate(zip(box, chunk.offset, strict=True)):
        view = view.narrow(dim, low - start, high - low)
    return view


def overlapping_views(one: Chunk, other: Chunk) -> tuple[Tensor, Tensor] | None:
    """Return views of the elements that two chunks of one key both hold; None if there are none."""
    box = overlap(one.offset, one.tensor.shape, other.offset, other.tensor.shape)
    return None if box is None else (view_of(one, box), view_of(other, box))


@torch.no_grad()
def fill(target: Chunk, sources: Iterable[Chunk]) -> int:
    """Copy into a chunk what others of its key hold of it, cast to its dtype; returns the number of elements."""
    copied = 0
    for source in sources:
        views = overlapping_views(target, source)
        if views is not None:
            views[0].copy_(views[1])
            copied += views[0].numel()
    return copied


def check_filled(where: str, target: Chunk, filled: int) -> None:
    """Check that a chunk was filled wholly; `where` names the checkpoint."""
    wanted = volume(target.tensor.shape)
    if filled != wanted:
        raise CheckpointError(f"{where}: {target.key} holds {filled} of the {wanted} elements asked for")
