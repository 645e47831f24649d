"""Whether the fields of an index can be true, each with its name and its place in the file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed.layout import (
    DTYPE_OF_CODE,
    ENTRIES_AT_ONCE,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    VERSION,
    bin_path,
    idx_path,
)
from megalith.errors import DataError


def read_header(prefix: str, index: mmap.mmap | bytes, multimodal: bool) -> tuple[np.dtype[Any], int, int]:
    """Dtype, S and D of a header whose numbers agree with the size of the file."""
    path = idx_path(prefix)
    if len(index) < HEADER_SIZE:
        raise DataError(
            f"{path}: {len(index)} bytes are too few for the header of {HEADER_SIZE}; the file is cut short"
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack(index[:HEADER_SIZE])
    if magic != MAGIC:
        raise DataError(f"{path}: bytes 0 to 8 (magic) are {magic!r}, not {MAGIC!r}; this is no Megatron index")
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
    """Check lengths, pointers, document index and the size of the .bin; returns the number of tokens."""
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
            f"= {total * itemsize}; the two files do not belong together or one is cut short"
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
