"""Writer of a .bin/.idx pair, byte for byte as Megatron's, in memory that does not grow with the dataset.

Tokens, lengths and document ends go to a `.partial` file each; `finalize` builds the index from them. The number of
bytes in each at one moment (`Written`) is all that another process needs to continue from that moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megalith.data.indexed.reader import (
    CODE_OF_DTYPE,
    ENTRIES_AT_ONCE,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)
from megalith.errors import DataError
from megalith.progress import advance

_COPIED_AT_ONCE = 1 << 22  # bytes
_SECONDS_FOR_ORPHANS = 10.0  # longest time that workers of a killed run take to exit


@dataclass(frozen=True)
class Written:
    """Bytes of tokens, of sequence lengths, of document entries (without the first, 0) and of modes."""

    tokens: int = 0
    lengths: int = 0
    documents: int = 0
    modes: int = 0


class IndexedWriter:
    """Writer of a .bin/.idx pair; a context manager.

    The files have the suffix `.partial` until `finalize`. Leaving the `with` block early removes them unless `keep` was
    called. A killed process leaves only partial files, which the next writer of this prefix replaces or continues.
    """

    def __init__(
        self, prefix: str, dtype: DTypeLike, *, multimodal: bool = False, resume: Written | None = None
    ) -> None:
        """Start a pair, or continue from what `resume` keeps of its partial files; a `multimodal` index has modes.

        Raises:  DataError if the folder cannot be written, another process is writing this prefix, or the partial files
            hold less than is to be kept.
        """
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODE_OF_DTYPE[self.dtype]
        self._multimodal = multimodal
        self._discard_on_exit = True
        self._seek_needed = False  # reserved bytes lie between the file position and the end of the .bin
        kept = resume or Written()
        self._bin = open_partial(bin_path(prefix), kept.tokens)
        try:
            self._lengths = _open_locked(spool_path(prefix, "lengths"), kept.lengths)
            self._documents = _open_locked(spool_path(prefix, "documents"), kept.documents)
            self._modes = _open_locked(spool_path(prefix, "modes"), kept.modes) if multimodal else None
        except DataError:
            self.discard()
            raise
        self._num_sequences = kept.lengths // 4
        self.num_documents = kept.documents // 8
        self.num_tokens = kept.tokens // self.dtype.itemsize

    @property
    def bin_descriptor(self) -> int:
        """Return the file descriptor of the .bin. A process that receives it holds this writer's lock as well."""
        return self._bin.fileno()

    def written(self) -> Written:
        """Return the state from which another process can continue, once `flush` has brought it to the disk."""
        return Written(
            tokens=self.num_tokens * self.dtype.itemsize,
            lengths=4 * self._num_sequences,
            documents=8 * self.num_documents,
            modes=self._num_sequences if self._multimodal else 0,
        )

    def add_item(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Append one sequence to the current document; `end_document` closes it."""
        stored = self._cast(tokens)
        self._append(stored, np.array([len(stored)], np.int32), [mode])

    def end_document(self) -> None:
        """Close the current document, which may be empty."""
        self._end_documents(np.array([self._num_sequences], np.int64))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append one document of `len(lengths)` sequences whose tokens are concatenated."""
        self._append(self._cast(tokens), np.array(lengths, np.int32), modes)
        self.end_document()

    def reserve(self, lengths: NDArray[np.int32], sequences_per_document: NDArray[np.int64]) -> int:
        """Append documents whose tokens another process writes; return the byte of the .bin where they begin."""
        first, start = self._num_sequences, self.num_tokens * self.dtype.itemsize
        self.num_tokens += int(lengths.sum(dtype=np.int64))
        self._seek_needed = True
        self._append_lengths(lengths, None)
        self._end_documents(first + np.cumsum(sequences_per_document, dtype=np.int64))
        return start

    def add_index(self, prefix: str) -> None:
        """Append all documents of another pair. Raises DataError if the other pair is damaged or has another dtype."""
        other = IndexedDataset(prefix, multimodal=self._multimodal)
        if other.dtype != self.dtype:
            raise DataError(f"{prefix} holds {other.dtype.name}, {self.prefix} is written as {self.dtype.name}")
        first = self._num_sequences
        try:
            with bin_path(prefix).open("rb") as file:
                while block := file.read(_COPIED_AT_ONCE):
                    self._write_tokens(block)
                    advance("bytes merged", len(block))
        except OSError as error:
            raise DataError(f"cannot read {bin_path(prefix)}: {error.strerror}") from error
        self.num_tokens += other.num_tokens
        for start in range(0, len(other), ENTRIES_AT_ONCE):
            stop = start + ENTRIES_AT_ONCE
            self._append_lengths(other.lengths[start:stop], None if other.modes is None else other.modes[start:stop])
        for start in range(1, len(other.document_index), ENTRIES_AT_ONCE):
            self._end_documents(first + other.document_index[start : start + ENTRIES_AT_ONCE])

    def flush(self) -> None:
        """Flush the files to the disk. Raises DataError if the disk is full."""
        for file in self._files():
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise DataError(f"cannot write {file.name}: {error.strerror}") from error

    def keep(self) -> None:
        """Keep the partial files on exit, for a later writer."""
        self._discard_on_exit = False

    def finalize(self) -> None:
        """Write the index and rename both files. Raises DataError if the disk is full or the folder is gone."""
        index = open_partial(idx_path(self.prefix), 0)
        try:
            for file in self._files():
                file.flush()
            self._write_index(index)
            for file in (self._bin, index):
                file.flush()
                os.fsync(file.fileno())
            # Remove the old index first, so that a new file never coexists with an old one.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._bin.name, bin_path(self.prefix))
            os.replace(index.name, idx_path(self.prefix))
        except OSError as error:
            _remove(index)
            raise DataError(f"cannot write {idx_path(self.prefix)}: {error.strerror}") from error
        index.close()
        self._bin.close()
        for file in self._files()[1:]:
            _remove(file)

    def discard(self) -> None:
        """Remove the partial files, unless `finalize` has renamed them or `keep` protects them."""
        for file in self._files():
            if file.closed:
                continue
            if self._discard_on_exit:
                _remove(file)
            else:
                with contextlib.suppress(OSError):
                    file.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _files(self) -> list[IO[bytes]]:
        found = (getattr(self, name, None) for name in ("_bin", "_lengths", "_documents", "_modes"))
        return [file for file in found if file is not None]

    def _cast(self, tokens: ArrayLike) -> NDArray[Any]:
        """Cast tokens to the stored dtype. Raises DataError for values that do not fit."""
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
        self._write_tokens(np.ascontiguousarray(tokens).data)
        self.num_tokens += len(tokens)
        self._append_lengths(lengths, modes)

    def _write_tokens(self, content: bytes | memoryview) -> None:
        if self._seek_needed:
            self._bin.seek(self.num_tokens * self.dtype.itemsize)
            self._seek_needed = False
        self._write(self._bin, content)

    def _append_lengths(self, lengths: NDArray[np.int32], modes: Any) -> None:
        self._write(self._lengths, lengths.astype("<i4", copy=False).tobytes())
        self._num_sequences += len(lengths)
        if self._modes is not None:
            shown = modes if modes is not None else np.zeros(len(lengths))
            self._write(self._modes, np.asarray(shown, np.int8).tobytes())

    def _end_documents(self, entries: NDArray[np.int64]) -> None:
        self._write(self._documents, entries.astype("<i8", copy=False).tobytes())
        self.num_documents += len(entries)

    def _write(self, file: IO[bytes], content: bytes | memoryview) -> None:
        try:
            file.write(content)
        except OSError as error:
            raise DataError(f"cannot write {file.name.removesuffix('.partial')}: {error.strerror}") from error

    def _write_index(self, file: IO[bytes]) -> None:
        file.write(HEADER.pack(MAGIC, VERSION, self._code, self._num_sequences, self.num_documents + 1))
        for block in _blocks(self._lengths):
            file.write(block)
        offset = 0
        for block in _blocks(self._lengths):
            lengths = np.frombuffer(block, "<i4")
            ends = offset + np.cumsum(lengths, dtype=np.int64)
            file.write(((ends - lengths) * self.dtype.itemsize).astype("<i8", copy=False).tobytes())
            offset = int(ends[-1])
        file.write(bytes(8))
        for spool in self._files()[2:]:
            for block in _blocks(spool):
                file.write(block)


def spool_path(prefix: str, part: str) -> Path:
    """Return the partial file of one part of the index."""
    return Path(f"{prefix}.{part}.partial")


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    with open(file.name, "rb") as content:
        while block := content.read(_COPIED_AT_ONCE):
            yield block


def open_partial(path: Path, kept: int) -> IO[bytes]:
    """Open the partial file of a path, locked against other processes, cut to its `kept` bytes.

    Raises:  DataError if the file cannot be written, another process holds it, or it has fewer bytes than are kept.
    """
    return _open_locked(path.with_name(path.name + ".partial"), kept)


def _open_locked(partial: Path, kept: int) -> IO[bytes]:
    """Open and lock a file, cut it to its `kept` bytes and seek to its end.

    The lock ends with the processes that hold the file, however they end.

    Raises:  DataError if the file cannot be written, another process holds it, or it has fewer bytes than are kept.
    """
    try:
        partial.touch()
        file = partial.open("r+b")
    except OSError as error:
        raise DataError(f"cannot write {partial}: {error.strerror}") from error
    try:
        _lock(file)
        # Between open and lock the former owner may have renamed the file to its final name.
        if not os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            raise BlockingIOError
    except OSError as error:
        file.close()
        raise DataError(f"{partial} is being written by another process; choose another output prefix") from error
    found = os.fstat(file.fileno()).st_size
    if found < kept:
        file.close()
        raise DataError(f"{partial} has {found} bytes, {kept} were written: it cannot be continued; remove it")
    file.truncate(kept)
    file.seek(kept)
    return file


def _lock(file: IO[bytes]) -> None:
    """Lock a file. Waits for workers of a killed run to exit; raises BlockingIOError after that."""
    deadline = time.monotonic() + _SECONDS_FOR_ORPHANS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _remove(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
        file.close()
    with contextlib.suppress(OSError):
        os.unlink(file.name)
