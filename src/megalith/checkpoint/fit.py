"""Whether what a load asks for is what a checkpoint holds: one message with every difference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, volume
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, is_extra_state
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
    """The table of contents of a checkpoint: its tensors by key, and the keys of its objects.

    Attributes:
        left_out: why tensors that are in the files cannot be read, such as those of an optimizer.
    """

    tensors: dict[str, StoredTensor]
    objects: frozenset[str]
    left_out: tuple[str, ...] = ()

    def not_in(self, asked: Collection[str]) -> tuple[str, ...]:
        """Keys that are stored and not asked for; the empty states of FP8 linears do not count."""
        there = [*self.tensors, *sorted(self.objects)]
        return tuple(key for key in there if key not in asked and not is_extra_state(key))


def keys_of(content: CheckpointContent) -> frozenset[str]:
    """The keys of all its tensors and objects."""
    return frozenset(chunk.key for chunk in content.chunks) | frozenset(content.objects)


def fitted(source: str, stored: Contents, wanted: CheckpointContent, asked: Collection[str]) -> CheckpointContent:
    """Say for each chunk which tensor of a checkpoint is to be read into it.

    Mostly that of its own key. A run in half precision keeps main parameters in fp32: where a checkpoint has none,
    because the run that wrote it computed in fp32, they are its weights; where a run in fp32 reads one that has them,
    its weights are the main parameters rather than their rounded copies.

    Args:
        source: names the checkpoint.
        stored: what it holds.
        wanted: what this rank asks for.
        asked: every key that is asked for, by this rank or another.

    Returns:
        The content under the keys to read.

    Raises:
        CheckpointError: keys or global shapes differ; lists every difference, and what the checkpoint holds beside.
    """
    key_of = {key: _read_from(key, chunks[0], stored) for key, chunks in by_key(wanted.chunks).items()}
    lines = [
        line
        for key, chunks in by_key(wanted.chunks).items()
        for line in _differences(key, chunks[0], stored.tensors.get(key_of[key]))
    ]
    lines += [f"{key} is not in the checkpoint" for key in wanted.objects if key not in stored.objects]
    if not lines:
        return replace(wanted, chunks=[replace(chunk, key=key_of[chunk.key]) for chunk in wanted.chunks])
    unasked = [key for key in stored.not_in(asked) if key in stored.tensors]
    if unasked:
        lines.append(f"in the checkpoint and not asked for: {', '.join(unasked)}")
    raise CheckpointError(listing(f"{source} does not fit this model and optimizer", [*stored.left_out, *lines]))


_MAIN = f"{OPTIMIZER_PREFIX}fp32_param."
_HALF = (torch.float16, torch.bfloat16)


def _read_from(key: str, chunk: Chunk, stored: Contents) -> str:
    """The key of the tensor that a chunk of `key` is read from."""
    weight = key.removeprefix(_MAIN)
    if weight != key:
        held = stored.tensors.get(weight)
        return key if key in stored.tensors or held is None or held.dtype in _HALF else weight
    held = stored.tensors.get(key)
    finer = held is not None and held.dtype in _HALF and chunk.tensor.dtype not in _HALF
    return _MAIN + key if finer and _MAIN + key in stored.tensors else key


def _differences(key: str, chunk: Chunk, held: StoredTensor | None) -> list[str]:
    if held is None:
        return [f"{key} is not in the checkpoint"]
    lines = []
    if held.shape != chunk.global_shape:
        lines.append(f"{key} has shape {list(held.shape)} in the checkpoint and {list(chunk.global_shape)} here")
    if held.dtype != chunk.tensor.dtype and not (held.dtype.is_floating_point and chunk.tensor.dtype.is_floating_point):
        lines.append(f"{key} is {short(held.dtype)} in the checkpoint and {short(chunk.tensor.dtype)} here")
    return lines


def listing(head: str, lines: Sequence[str]) -> str:
    """A head line with indented lines under it."""
    return "\n  ".join([f"{head}:", *lines])


def short(dtype: torch.dtype) -> str:
    """The dtype without the name of torch."""
    return str(dtype).removeprefix("torch.")
