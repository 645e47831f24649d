"""Whether what a load asks for is what a checkpoint holds: one message with every difference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, volume
from megalith.checkpoint.formats.torch_dist import is_extra_state
from megalith.errors import CheckpointError


@dataclass(frozen=True)
class StoredTensor:
    """Global shape and dtype of a tensor in a checkpoint, and in how many chunks it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int = 1

    @property
    def numel(self) -> int:
        return volume(self.shape)


@dataclass(frozen=True)
class Contents:
    """The table of contents of a checkpoint: its tensors by key, and the keys of its objects."""

    tensors: dict[str, StoredTensor]
    objects: frozenset[str]

    def not_in(self, asked: Collection[str]) -> tuple[str, ...]:
        """Keys that are stored and not asked for; the empty states of FP8 linears do not count."""
        there = [*self.tensors, *sorted(self.objects)]
        return tuple(key for key in there if key not in asked and not is_extra_state(key))


def keys_of(content: CheckpointContent) -> frozenset[str]:
    """The keys of all its tensors and objects."""
    return frozenset(chunk.key for chunk in content.chunks) | frozenset(content.objects)


def check_fit(source: str, stored: Contents, wanted: CheckpointContent, asked: Collection[str]) -> None:
    """Compare keys, global shapes and dtypes.

    Args:
        source: names the checkpoint.
        stored: what it holds.
        wanted: what this rank asks for.
        asked: every key that is asked for, by this rank or another.

    Raises:
        CheckpointError: lists every difference, and what the checkpoint holds beside.
    """
    lines = [line for key, chunks in by_key(wanted.chunks).items() for line in _differences(key, chunks[0], stored)]
    lines += [f"{key} is not in the checkpoint" for key in wanted.objects if key not in stored.objects]
    if not lines:
        return
    unasked = [key for key in stored.not_in(asked) if key in stored.tensors]
    if unasked:
        lines.append(f"in the checkpoint and not asked for: {', '.join(unasked)}")
    raise CheckpointError(listing(f"{source} does not fit this model and optimizer", lines))


def _differences(key: str, chunk: Chunk, stored: Contents) -> list[str]:
    held = stored.tensors.get(key)
    if held is None:
        return [f"{key} is not in the checkpoint"]
    lines = []
    if held.shape != chunk.global_shape:
        lines.append(f"{key} has shape {list(held.shape)} in the checkpoint and {list(chunk.global_shape)} here")
    if held.dtype != chunk.tensor.dtype:
        lines.append(f"{key} is {short(held.dtype)} in the checkpoint and {short(chunk.tensor.dtype)} here")
    return lines


def check_complete(chunks: Sequence[Chunk]) -> None:
    """Check that the chunks of one process cover their global tensors.

    Raises:
        CheckpointError: elements are missing.
    """
    for key, parts in by_key(chunks).items():
        held, whole = sum(part.tensor.numel() for part in parts), volume(parts[0].global_shape)
        if held != whole:
            raise CheckpointError(f"{key}: the chunks to save hold {held} of {whole} elements")


def listing(head: str, lines: Sequence[str]) -> str:
    """A head line with indented lines under it."""
    return "\n  ".join([f"{head}:", *lines])


def short(dtype: torch.dtype) -> str:
    """The dtype without the name of torch."""
    return str(dtype).removeprefix("torch.")
