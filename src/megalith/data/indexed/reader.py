"""Reader and layout of a .bin/.idx pair.

Layout of the .idx, little-endian, nothing aligned: 9 bytes magic, u64 version, u8 dtype code, u64 S (number of
sequences), u64 D (length of the document index), i32[S] lengths, i64[S] byte offsets, i64[D] document index and,
for multimodal files only, i8[S] modes. A document is a run of sequences; a document index entry is the number of
its first sequence.

The whole structure is checked on opening, so that a damaged file is an error that names the field instead of wrong text
or a bus error later.
Source:  Megatron-LM `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
HEADER_SIZE = HEADER.size

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
CODE_OF_DTYPE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

LOSS_MASK = "_loss_mask"
"""Ending of the prefix of a dataset (uint8) that says of each token of another whether it is to be predicted."""
TEMPLATE = ".jinja"
"""Ending of the chat template by which a dataset with a loss mask was made."""
MASK_FILES = (f"{LOSS_MASK}.idx", f"{LOSS_MASK}.bin")
"""Endings of the files of a loss mask."""

ENTRIES_AT_ONCE = 1 << 20
"""Entries of the index that are worked on at once; keeps the memory small next to the index itself."""


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores a vocabulary: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str) -> Path:
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    return Path(prefix + ".idx")


def remove_side_files(prefix: str, *endings: str) -> None:
    """Remove files beside a pair that an earlier dataset of the same prefix had. Raises DataError if one stays."""
    for path in (Path(prefix + ending) for ending in endings):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"cannot remove {path}, which belongs to an earlier dataset: {error.strerror}") from error


def read_header(prefix: str, index: mmap.mmap | bytes, multimodal: bool) -> tuple[np.dtype[Any], int, int]:
    """Return dtype, S and D. Raises DataError if the header is damaged or disagrees with the size of the file."""
    path = idx_path(prefix)
    if len(index) < HEADER_SIZE:
        raise DataError(
            f"{path}: {len(index)} bytes are too few for the header of {HEADER_SIZE} bytes; the file is truncated"
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack(index[:HEADER_SIZE])
    if magic != MAGIC:
        raise DataError(f"{path}: bytes 0 to 8 (magic) are {magic!r}, not {MAGIC!r}; this is not a Megatron index")
    if version != VERSION:
        raise DataError(f"{path}: version (byte 9) is {version}, only version {VERSION} exists")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{path}: dtype code (byte 17) is {code}, known are 1 to {max(DTYPE_OF_CODE)}")
    if num_entries < 1:
        raise DataError(f"{path}: document count (byte 26) is 0; even an empty dataset has one entry")
    size = HEADER_SIZE + (4 + 8 + (1 if multimodal else 0)) * num_sequences + 8 * num_entries
    if size != len(index):
        kind = "a multimodal" if multimodal else "an"
        raise DataError(
            f"{path}: {num_sequences} sequences (byte 18) and {num_entries} document entries (byte 26) make "
            f"{kind} index of {size} bytes, the file has {len(index)}"
        )
    return DTYPE_OF_CODE[code], num_sequences, num_entries


def check_index(
    prefix: str,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    document_index: NDArray[np.int64],
) -> int:
    """Check lengths, pointers, document index and the size of the .bin; return the number of tokens."""
    path, itemsize = idx_path(prefix), dtype.itemsize
    total = 0
    for start in range(0, len(lengths), ENTRIES_AT_ONCE):
        part = lengths[start : start + ENTRIES_AT_ONCE]
        if part.min() < 0:
            at = start + int(np.argmax(part < 0))
            byte = HEADER_SIZE + 4 * at
            raise DataError(f"{path}: length of sequence {at} (byte {byte}) is {lengths[at]}, below 0")
        ends = total + np.cumsum(part, dtype=np.int64)
        expected = (ends - part) * itemsize
        wrong = pointers[start : start + ENTRIES_AT_ONCE] != expected
        if wrong.any():
            first = int(np.argmax(wrong))
            byte = HEADER_SIZE + 4 * len(lengths) + 8 * (start + first)
            raise DataError(
                f"{path}: pointer of sequence {start + first} (byte {byte}) is {pointers[start + first]}; "
                f"the sequences before it end at byte {expected[first]} of the .bin"
            )
        total = int(ends[-1])
    _check_documents(path, document_index, len(lengths))
    bin_size = bin_path(prefix).stat().st_size
    if bin_size != total * itemsize:
        raise DataError(
            f"{bin_path(prefix)} has {bin_size} bytes, but {path} describes {total} tokens of {itemsize} bytes "
            f"= {total * itemsize}; the two files do not belong together or one is truncated"
        )
    return total


def _check_documents(path: Path, entries: NDArray[np.int64], num_sequences: int) -> None:
    base = HEADER_SIZE + 12 * num_sequences
    if entries[0] != 0:
        raise DataError(f"{path}: document entry 0 (byte {base}) is {entries[0]}, must be 0")
    if entries[-1] != num_sequences:
        byte = base + 8 * (len(entries) - 1)
        raise DataError(f"{path}: the last document entry (byte {byte}) is {entries[-1]}, must be {num_sequences}")
    for start in range(0, len(entries) - 1, ENTRIES_AT_ONCE):
        part = entries[start : start + ENTRIES_AT_ONCE + 1]
        falls = part[1:] < part[:-1]
        if falls.any():
            at = start + int(np.argmax(falls)) + 1
            raise DataError(
                f"{path}: document entry {at} (byte {base + 8 * at}) is {entries[at]}, below the entry before it"
            )


class IndexedDataset:
    """Read-only view of a .bin/.idx pair; item i is the tokens of sequence i.

    Attributes:
        lengths: tokens of each sequence, i32 [S].
        pointers: byte offset of each sequence in the .bin, i64 [S].
        document_index: number of the first sequence of each document, i64 [D]; the last entry is S.
        modes: modality of each sequence, i8 [S], None unless opened as multimodal.
    """

    def __init__(self, prefix: str, *, multimodal: bool = False, mmap_bin: bool = True) -> None:
        """Open and check a pair.

        Args:
            multimodal: whether the index ends with modes; the files do not say so themselves.
            mmap_bin: map the .bin into memory; otherwise each read is a system call.

        Raises:  DataError if a file is missing or unreadable, or a field of the index is impossible.
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
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def __getitem__(self, item: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Return the tokens of one sequence, or a list with those of each sequence of a contiguous slice."""
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
        """Return `length` tokens of a sequence from `offset` on; up to its end by default."""
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
                raise DataError(f"{self._path} ends at byte {start + len(content)}: it was truncated after opening")
            content += part
        return np.frombuffer(content, self._dtype)


def _require_both(prefix: str) -> None:
    missing = [str(path) for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if missing:
        from megalith.config.rules.file import prefix_that_was_meant

        meant = prefix_that_was_meant(prefix)
        hint = f"; did you mean {meant}?" if meant else ""
        raise DataError(f"dataset {prefix}: missing {' and '.join(missing)} (a dataset is a .bin and a .idx){hint}")


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
