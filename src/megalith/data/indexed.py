"""Megatron's .bin/.idx pair: tokens of all documents back to back, and an index of where each begins.

Layout of the .idx, little-endian, nothing aligned: 9 bytes magic, u64 version, u8 dtype code, u64 S (number of
sequences), u64 D (length of the document index), i32[S] lengths, i64[S] byte offsets, i64[D] document index and,
for multimodal files only, i8[S] modes. A document is a run of sequences; a document index entry is the number of
its first sequence.

Reading trusts nothing: the whole structure is checked at opening, so that a damaged file is an error with a field
name instead of wrong text or a bus error later. Writing goes to `.partial` files that get their names at the end.

Source:  Megatron-LM `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megalith.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
HEADER_SIZE = _HEADER.size

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
CODE_OF_DTYPE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

_CHECKED_AT_ONCE = 1 << 20  # entries; keeps the memory of a check small next to the index itself


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The dtype that Megatron stores a vocabulary in: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str) -> Path:
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    return Path(prefix + ".idx")


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
        self.dtype, num_sequences, num_entries = _read_header(prefix, index, multimodal)
        offset = HEADER_SIZE
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        offset += self.lengths.nbytes
        self.pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset)
        offset += self.pointers.nbytes
        self.document_index: NDArray[np.int64] = np.frombuffer(index, "<i8", num_entries, offset)
        offset += self.document_index.nbytes
        self.modes: NDArray[np.int8] | None = np.frombuffer(index, "<i1", num_sequences, offset) if multimodal else None
        self.num_tokens = _check_index(self)
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


def _read_header(prefix: str, index: mmap.mmap | bytes, multimodal: bool) -> tuple[np.dtype[Any], int, int]:
    """Dtype, S and D of a header whose numbers agree with the size of the file."""
    path = idx_path(prefix)
    if len(index) < HEADER_SIZE:
        raise DataError(
            f"{path}: {len(index)} bytes are too few for the header of {HEADER_SIZE}; the file is cut short"
        )
    magic, version, code, num_sequences, num_entries = _HEADER.unpack(index[:HEADER_SIZE])
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


def _check_index(dataset: IndexedDataset) -> int:
    """Check lengths, pointers, document index and the size of the .bin; returns the number of tokens."""
    path, itemsize = idx_path(dataset.prefix), dataset.dtype.itemsize
    total = 0
    for start in range(0, len(dataset), _CHECKED_AT_ONCE):
        lengths = dataset.lengths[start : start + _CHECKED_AT_ONCE]
        if lengths.min() < 0:
            at = start + int(np.argmax(lengths < 0))
            byte = HEADER_SIZE + 4 * at
            raise DataError(f"{path}: length of sequence {at} (byte {byte}) is {dataset.lengths[at]}, below 0")
        ends = total + np.cumsum(lengths, dtype=np.int64)
        expected = (ends - lengths) * itemsize
        wrong = dataset.pointers[start : start + _CHECKED_AT_ONCE] != expected
        if wrong.any():
            first = int(np.argmax(wrong))
            byte = HEADER_SIZE + 4 * len(dataset) + 8 * (start + first)
            raise DataError(
                f"{path}: pointer of sequence {start + first} (byte {byte}) is {dataset.pointers[start + first]}; "
                f"the sequences before it end at byte {expected[first]} of the .bin"
            )
        total = int(ends[-1])
    _check_documents(path, dataset.document_index, len(dataset))
    bin_size = bin_path(dataset.prefix).stat().st_size
    if bin_size != total * itemsize:
        raise DataError(
            f"{bin_path(dataset.prefix)} has {bin_size} bytes, but {path} describes {total} tokens of {itemsize} bytes "
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
    for start in range(0, len(entries) - 1, _CHECKED_AT_ONCE):
        part = entries[start : start + _CHECKED_AT_ONCE + 1]
        falls = part[1:] < part[:-1]
        if falls.any():
            at = start + int(np.argmax(falls)) + 1
            raise DataError(
                f"{path}: document entry {at} (byte {base + 8 * at}) is {entries[at]}, below the entry before it"
            )


class IndexedWriter:
    """Writes a .bin/.idx pair, byte for byte as Megatron does; use it as a context manager.

    The files carry the ending `.partial` until `finalize`. Leaving the `with` block early removes them, and a
    killed process leaves no more than the partial files, which the next writer of this prefix replaces.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, *, multimodal: bool = False) -> None:
        """Start a pair.

        Raises:  DataError if the folder cannot be written or another process is writing this prefix.
        """
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODE_OF_DTYPE[self.dtype]
        self._multimodal = multimodal
        self._lengths: list[NDArray[np.int32]] = []
        self._document_entries: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._modes: list[NDArray[np.int8]] = []
        self._num_sequences = 0
        self._num_tokens = 0
        self._bin = _open_partial(bin_path(prefix))

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def add_item(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Append one sequence to the current document; `end_document` closes it."""
        stored = self._stored(tokens)
        self._append(stored, np.array([len(stored)], np.int32), [mode])

    def end_document(self) -> None:
        """Close the current document. One without sequences counts as well."""
        self._document_entries.append(np.array([self._num_sequences], np.int64))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append one document of `len(lengths)` sequences whose tokens stand back to back."""
        self._append(self._stored(tokens), np.array(lengths, np.int32), modes)
        self.end_document()

    def add_documents(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], sequences_per_document: NDArray[np.int64]
    ) -> None:
        """Append many documents at once: all their tokens, sequence lengths, and how many sequences each has."""
        first = self._num_sequences
        self._append(self._stored(tokens), lengths, None)
        self._document_entries.append(first + np.cumsum(sequences_per_document, dtype=np.int64))

    def add_index(self, prefix: str) -> None:
        """Append all documents of another pair.

        Raises:  DataError if the other pair is damaged or has another dtype.
        """
        other = IndexedDataset(prefix, multimodal=self._multimodal)
        if other.dtype != self.dtype:
            raise DataError(f"{prefix} holds {other.dtype.name}, {self.prefix} is written as {self.dtype.name}")
        first = self._num_sequences
        for start in range(0, len(other), _CHECKED_AT_ONCE):
            stop = min(start + _CHECKED_AT_ONCE, len(other))
            modes = None if other.modes is None else other.modes[start:stop]
            for tokens in other[start:stop]:
                self._write(tokens)
            self._note(other.lengths[start:stop].copy(), modes)
        self._document_entries.append(first + other.document_index[1:])

    def finalize(self) -> None:
        """Write the index, bring both files to the disk and give them their names.

        Raises:  DataError if the disk is full or the folder went away.
        """
        index = _open_partial(idx_path(self.prefix))
        try:
            self._write_index(index)
            for file in (self._bin, index):
                file.flush()
                os.fsync(file.fileno())
            # Without its index an old pair is gone as a whole; no moment shows a new file beside an old one.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._bin.name, bin_path(self.prefix))
            os.replace(index.name, idx_path(self.prefix))
        except OSError as error:
            _remove(index)
            raise DataError(f"cannot write {idx_path(self.prefix)}: {error.strerror}") from error
        index.close()
        self._bin.close()

    def discard(self) -> None:
        """Remove what has been written, unless `finalize` has named it."""
        if not self._bin.closed:
            _remove(self._bin)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _stored(self, tokens: ArrayLike) -> NDArray[Any]:
        """Tokens in the stored dtype; refuses values that do not fit."""
        given = np.asarray(tokens)
        if given.dtype == self.dtype or given.size == 0:
            return given.astype(self.dtype, copy=False)
        if np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(self.dtype)
            low, high = given.min(), given.max()
            if low < limits.min or high > limits.max:
                outside = low if low < limits.min else high
                raise DataError(f"token {outside} does not fit the {self.dtype.name} of {self.prefix}")
        return given.astype(self.dtype)

    def _append(self, tokens: NDArray[Any], lengths: NDArray[np.int32], modes: Any) -> None:
        assert int(lengths.sum(dtype=np.int64)) == len(tokens), "lengths must add up to the tokens"
        self._write(tokens)
        self._note(lengths, modes)

    def _write(self, tokens: NDArray[Any]) -> None:
        try:
            self._bin.write(np.ascontiguousarray(tokens).data)
        except OSError as error:
            raise DataError(f"cannot write {bin_path(self.prefix)}: {error.strerror}") from error
        self._num_tokens += len(tokens)

    def _note(self, lengths: NDArray[np.int32], modes: Any) -> None:
        self._lengths.append(lengths)
        self._num_sequences += len(lengths)
        if self._multimodal:
            self._modes.append(np.asarray(modes if modes is not None else np.zeros(len(lengths)), np.int8))

    def _write_index(self, file: IO[bytes]) -> None:
        entries = np.concatenate(self._document_entries)
        file.write(_HEADER.pack(MAGIC, VERSION, self._code, self._num_sequences, len(entries)))
        for lengths in self._lengths:
            file.write(lengths.astype("<i4", copy=False).tobytes())
        offset = 0
        for lengths in self._lengths:
            ends = offset + np.cumsum(lengths, dtype=np.int64)
            file.write(((ends - lengths) * self.dtype.itemsize).astype("<i8", copy=False).tobytes())
            offset = int(ends[-1]) if len(ends) else offset
        file.write(entries.astype("<i8", copy=False).tobytes())
        for modes in self._modes:
            file.write(modes.tobytes())


def _open_partial(path: Path) -> IO[bytes]:
    """An empty, locked `.partial` file; the lock goes with the process, however it ends."""
    partial = path.with_name(path.name + ".partial")
    try:
        file = partial.open("ab")
    except OSError as error:
        raise DataError(f"cannot write {partial}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the opening and the lock the former owner may have given the file its final name.
        if not os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            raise BlockingIOError
    except OSError as error:
        file.close()
        raise DataError(f"{partial} is being written by another process; choose another output prefix") from error
    file.truncate(0)
    return file


def _remove(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
        file.close()
    with contextlib.suppress(OSError):
        os.unlink(file.name)
