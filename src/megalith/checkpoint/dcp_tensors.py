"""A rank's chunks as `torch.distributed.checkpoint` (DCP) asks for them, and what writing and reading share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megalith.checkpoint.content import Chunk, by_key

METADATA_FILE = ".metadata"
SAVE_ID_PREFIX = "megalith-"
"""Marks `.metadata` files written here: such a checkpoint has a manifest, or is damaged."""


class GlobalTensor:
    """The local chunks of one global tensor, in the shape in which DCP's planners ask for them."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        first = chunks[0]
        for chunk in chunks:
            same = (chunk.global_shape, chunk.tensor.dtype) == (first.global_shape, first.tensor.dtype)
            assert same, f"chunks of {first.key} differ in global shape or dtype"
        self._chunks = {chunk.offset: chunk for chunk in chunks}
        assert len(self._chunks) == len(chunks), f"two chunks of {first.key} have one offset"
        self.dtype = first.tensor.dtype
        self._shape = torch.Size(first.global_shape)

    def size(self) -> torch.Size:
        return self._shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=chunk.tensor.shape)
            for offset, chunk in self._chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._chunks[tuple(index.offset)].tensor


def global_tensors(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Key -> `GlobalTensor`: what the planners of writing and reading take."""
    return {key: GlobalTensor(parts) for key, parts in by_key(chunks).items()}


@contextmanager
def single_process() -> Iterator[None]:
    """Without the warning that DCP coordinates no ranks: here it is not asked to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def plain_exceptions() -> Iterator[None]:
    """Raise the first cause instead of DCP's CheckpointException, which is a BaseException that `except` misses."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None
