"""Boxes of global tensors: what two of them have in common, and copying it from one to the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk, by_key, volume
from megalith.errors import CheckpointError


def common_part(one: Chunk, other: Chunk) -> tuple[Tensor, Tensor] | None:
    """Views of the elements that two chunks of one key both hold; None if there are none."""
    first, second = one.tensor, other.tensor
    for dim, (start, other_start) in enumerate(zip(one.offset, other.offset, strict=True)):
        low = max(start, other_start)
        length = min(start + one.tensor.shape[dim], other_start + other.tensor.shape[dim]) - low
        if length <= 0:
            return None
        first = first.narrow(dim, low - start, length)
        second = second.narrow(dim, low - other_start, length)
    return first, second


@torch.no_grad()
def fill(target: Chunk, sources: Iterable[Chunk]) -> int:
    """Copy into a chunk what others of its key hold of it, cast to its dtype; returns the number of elements."""
    copied = 0
    for source in sources:
        views = common_part(target, source)
        if views is not None:
            views[0].copy_(views[1])
            copied += views[0].numel()
    return copied


def fill_all(targets: Sequence[Chunk], sources: Mapping[str, Sequence[Chunk]], where: str) -> None:
    """Fill each target wholly from chunks that do not overlap.

    Args:
        targets: to be filled in place.
        sources: by key.
        where: names the checkpoint.

    Raises:
        CheckpointError: some elements of a target are nowhere.
    """
    for target in targets:
        filled, wanted = fill(target, sources.get(target.key, ())), volume(target.tensor.shape)
        if filled != wanted:
            raise CheckpointError(f"{where}: {target.key} holds {filled} of the {wanted} elements asked for")


def rounds(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Divide chunks into lists in which no two begin at the same place of the same tensor.

    A weight and the main parameter that is taken from it may ask for one place twice; readers look places up.
    """
    waiting = [list(parts) for parts in by_key(chunks).values()]
    while waiting:
        now: list[Chunk] = []
        later = []
        for parts in waiting:
            seen: dict[tuple[int, ...], Chunk] = {}
            dtype = parts[0].tensor.dtype
            rest = [
                chunk
                for chunk in parts
                if chunk.tensor.dtype != dtype or seen.setdefault(chunk.offset, chunk) is not chunk
            ]
            now += seen.values()
            if rest:
                later.append(rest)
        yield now
        waiting = later
