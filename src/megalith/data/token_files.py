"""Tokens into the files of datasets, by whichever process encoded them.

The process that leads only decides where the tokens of a chunk belong, as soon as it knows how many all chunks before
have. So tokens cross no border between processes, and every process may write at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.encoding import EncodedChunk
from megalith.errors import DataError


@dataclass(frozen=True)
class Partitions:
    """How Megatron's `--partitions` deal documents out before they are merged in the order of the partitions.

    Attributes:
        count: partitions.
        size: documents of each with `--keep-sequential-samples`; None deals them out in turn.
    """

    count: int = 1
    size: int | None = None

    def of(self, first: int, count: int) -> NDArray[np.int64]:
        """The partitions of documents `first`, `first` + 1, ..."""
        numbers = np.arange(first, first + count)
        if self.size is None:
            return numbers % self.count
        return np.minimum(numbers // self.size, self.count - 1)


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a chunk belong.

    Attributes:
        first_document: number of its first document, which decides the partitions.
        offsets: for each key the byte at which they begin in the file of each partition.
    """

    first_document: int
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TokenFile:
    """A .bin that is being written: the name that it gets, for messages, and the descriptor in this process."""

    name: str
    descriptor: int


class TokenFiles:
    """The .bin files of a run; several processes may hold them, and write at different places.

    Args:
        files: for each key those of its partitions.
        partitions: how documents are dealt out.
    """

    def __init__(self, files: Sequence[Sequence[TokenFile]], partitions: Partitions) -> None:
        self.files, self.partitions = files, partitions

    def write(self, chunk: EncodedChunk, placement: Placement) -> None:
        """Write the tokens of a chunk.

        Raises:  DataError if the disk is full.
        """
        keys = zip(self.files, chunk.tokens, chunk.report.by_key, placement.offsets, strict=True)
        for files, tokens, structure, offsets in keys:
            if len(files) == 1:
                _write(files[0], tokens, offsets[0])
                continue
            parts = self.partitions.of(placement.first_document, chunk.report.num_documents)
            for number, (file, offset) in enumerate(zip(files, offsets, strict=True)):
                _write(file, tokens[structure.tokens_of(parts == number)], offset)


def _write(file: TokenFile, tokens: NDArray[Any], offset: int) -> None:
    content = np.ascontiguousarray(tokens).data.cast("B")
    try:
        while content:
            written = os.pwrite(file.descriptor, content, offset)
            content, offset = content[written:], offset + written
    except OSError as error:
        raise DataError(f"cannot write {file.name}: {error.strerror}") from error
