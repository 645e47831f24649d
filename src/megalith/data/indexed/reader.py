"""Reading a .bin/.idx pair.

Reading trusts nothing: the whole structure is checked at opening (`check`), so that a damaged file is an error with a
field name instead of wrong text or a bus error later.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed.check import check_index, read_header
from megalith.data.indexed.layout import HEADER_SIZE, bin_path, idx_path
from megalith.errors import DataError


class IndexedDataset:
    """Read-only view of a .bin/.idx pair; item i is the tokens of sequence i.

    Attributes:
        prefix: path of the pair without the endings, as given.
        dtype: type of the stored tokens.
        lengths: tokens of each sequence, i32 [S].
        pointers: byte offset of each sequence in the .bin, i64 [S].
        document_index: number of the first sequence of each document, i64 [D]; the last entry is S.
        modes: modality of each sequence, i8 [S], None unless opened as multimodal.
    """

    def __init__(self, prefix: str, *, multimodal: bool = False, mmap_bin: bool = True) -> None:
        """Open and check a pair.

        Args:
            prefix: path without `.bin` / `.idx`.
            multimodal: whether the index ends with modes; the files do not say so themselves.
            mmap_bin: map the .bin into memory; otherwise each read is a system call.

        Raises:
            DataError: a file is missing or unreadable, or a field of the index is impossible.
        """
        self.prefix = prefix
        self._options = {"multimodal": multimodal, "mmap_bin": mmap_bin}
        _require_both(prefix)
        index = _map(idx_path(prefix))
        self.dtype, num_sequences, num_entries = read_header(prefix, index, multimodal)
        offset = HEADER_SIZE
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        offset += self.lengths.nbytes
        self.pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset)
        offset += self.pointers.nbytes
        self.document_index: NDArray[np.int64] = np.frombuffer(index, "<i8", num_entries, offset)
        offset += self.document_index.nbytes
        self.modes: NDArray[np.int8] | None = np.frombuffer(index, "<i1", num_sequences, offset) if multimodal else None
        self.num_tokens = check_index(prefix, self.dtype, self.lengths, self.pointers, self.document_index)
        self._bin: _MappedBin | _ReadBin = (_MappedBin if mmap_bin else _ReadBin)(bin_path(prefix), self.dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def __getitem__(self, item: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Tokens of one sequence, or of each sequence of a contiguous slice."""
        if not isinstance(item, slice):
            return self.get(item)
        start, stop, step = item.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of an indexed dataset are contiguous, not with step {step}")
        lengths = self.lengths[start:stop]
        if not len(lengths):
            return []
        tokens = self._bin.read(int(self.pointers[start]), int(lengths.sum(dtype=np.int64)))
        return np.split(tokens, np.cumsum(lengths[:-1], dtype=np.int64))

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens of a sequence from `offset` on; to its end by default."""
        available = int(self.lengths[sequence]) - offset
        if length is None:
            length = available
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(f"{length} tokens from {offset} on are not in sequence {sequence} of {self.prefix}")
        return self._bin.read(int(self.pointers[sequence]) + offset * self.dtype.itemsize, length)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the files itself.
        return _reopen, (self.prefix, self._options)


def _reopen(prefix: str, options: dict[str, bool]) -> IndexedDataset:
    return IndexedDataset(prefix, **options)


class _MappedBin:
    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._tokens = np.frombuffer(_map(path), dtype)

    def read(self, start: int, count: int) -> NDArray[Any]:
        first = start // self._tokens.itemsize
        return self._tokens[first : first + count]


class _ReadBin:
    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        self._file = path.open("rb", buffering=0)

    def read(self, start: int, count: int) -> NDArray[Any]:
        wanted = count * self._dtype.itemsize
        content = bytearray()
        while len(content) < wanted:  # a single read may return less than asked, as above 2 GiB on Linux
            part = os.pread(self._file.fileno(), wanted - len(content), start + len(content))
            if not part:
                raise DataError(f"{self._path} ends at byte {start + len(content)}: it was cut short after opening")
            content += part
        return np.frombuffer(content, self._dtype)


def _require_both(prefix: str) -> None:
    missing = [str(path) for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if missing:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f"; give the prefix without the ending: {prefix[:-4]}"
        raise DataError(f"dataset {prefix}: missing {' and '.join(missing)} (a dataset is a .bin and a .idx){hint}")


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
