"""A hash of files that keeps up with fast disks: CRC-32 of each 1 MiB block, on several threads.

A file's digest is the BLAKE2b-128 of its blocks' CRC-32s, four big-endian bytes each, in order (the last block may
be shorter, an empty file has none). Blocks are independent, so a file is hashed on all cores when it is read, and in
passing while it is written. CRC-32 finds every error of one or two bits and every burst of up to 32 in a block, and
misses any other change with probability 2**-32 per block. It guards against damage, not against an attacker, who
could rewrite the manifest as well; what a file may do when it is loaded is limited in `safe_loading`.

Why not BLAKE2b alone: 1.1 GB/s per thread where one thread writes 4 GB/s to an NVMe disk; zlib's CRC-32 does 4.7.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.checkpoint.checksums import joined

HASH_NAME = "crc32-1MiB/blake2b-128"
BLOCK_SIZE = 2**20
_SEGMENT_SIZE = 64 * BLOCK_SIZE  # what one thread reads in sequence, so that the system's read-ahead works


def require_file(path: Path) -> None:
    """Refuse a pipe or a device in the place of a file: to open it may wait for ever.

    Raises:
        OSError: it is none, or it is missing.
    """
    if not stat.S_ISREG(mode := path.stat().st_mode):
        kind = "is a folder" if stat.S_ISDIR(mode) else "is a pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"it {kind}, not a file", str(path))


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest in hexadecimal of one file."""

    size: int
    digest: str


def _digest(checksums: Iterable[int]) -> str:
    root = hashlib.blake2b(digest_size=16)
    for checksum in checksums:
        root.update(checksum.to_bytes(4, "big"))
    return root.hexdigest()


class BlockHash:
    """The digest of a stream of bytes that arrives in pieces of any size up to `room`."""

    def __init__(self) -> None:
        self.size = 0
        self._checksums: list[int] = []
        self._block = 0

    @property
    def room(self) -> int:
        """Bytes until the end of the current block."""
        return BLOCK_SIZE - self.size % BLOCK_SIZE

    def update(self, piece: memoryview) -> None:
        """Add bytes that do not reach past the current block."""
        self._extend(zlib.crc32(piece, self._block), len(piece))

    def update_summed(self, piece: memoryview) -> int:
        """As `update`; returns the CRC-32 of these bytes alone."""
        checksum = zlib.crc32(piece)
        self._extend(joined(self._block, checksum, len(piece)), len(piece))
        return checksum

    def _extend(self, block: int, length: int) -> None:
        assert 0 < length <= self.room
        self._block = block
        self.size += length
        if self.size % BLOCK_SIZE == 0:
            self._checksums.append(self._block)
            self._block = 0

    def record(self) -> FileRecord:
        """Size and digest of what has come so far."""
        last = [self._block] if self.size % BLOCK_SIZE else []
        return FileRecord(self.size, _digest(self._checksums + last))


class WritingCancelled(Exception):
    """What a writer ends with that was told to stop."""


def _never() -> bool:
    return False


class HashedFile(io.RawIOBase):
    """A new file that is hashed in passing as it is written. Wrap it in `io.BufferedWriter`.

    Block by block, the hash and the write follow each other while the bytes are in the processor's cache.

    Args:
        path: the file; there must be none.
        cancelled: whether to stop in the middle, asked before each block.

    Attributes:
        failure: the first error of the file system. torch's writer loses it and raises one about positions instead.
    """

    def __init__(self, path: Path, cancelled: Callable[[], bool] = _never) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash, self._cancelled = BlockHash(), cancelled
        self._abandoned = False
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def tell(self) -> int:
        return self._hash.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._abandoned:
            return len(view)
        for piece in self._pieces(view):
            self._hash.update(piece)
            self._put(piece)
        return len(view)

    def write_summed(self, data: Any) -> int:
        """Write all of `data`; returns its CRC-32."""
        checksum = 0
        for piece in self._pieces(memoryview(data).cast("B")):
            checksum = joined(checksum, self._hash.update_summed(piece), len(piece))
            self._put(piece)
        return checksum

    def _put(self, piece: memoryview) -> None:
        if self._cancelled():
            raise WritingCancelled
        try:
            while piece:
                piece = piece[os.write(self._fd, piece) :]
        except OSError as error:
            self.failure = self.failure or error
            raise

    def _pieces(self, view: memoryview) -> Iterator[memoryview]:
        while view:
            room = self._hash.room
            yield view[:room]
            view = view[room:]

    def abandon(self) -> None:
        """Drop what is still to be written, so that closing a buffer over this file cannot fail again."""
        self._abandoned = True

    def record(self) -> FileRecord:
        return self._hash.record()

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def hash_files(paths: Iterable[Path], threads: int | None = None, below: Path | None = None) -> dict[str, FileRecord]:
    """Hash files on several threads.

    Args:
        paths: files with different names.
        threads: how many; by default one per processor, at most 8, since a disk is seldom faster than that.
        below: a folder that they are in, at whatever depth; their names are then the paths from there.

    Returns:
        File name -> record.
    """
    buffers = threading.local()
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="hash") as pool:
        sizes = {path: path.stat().st_size for path in paths}
        begun = {path: _begin(path, size, pool, buffers) for path, size in sizes.items()}
        return {
            str(path.relative_to(below or path.parent)): FileRecord(sizes[path], _digest(_joined(segments)))
            for path, segments in begun.items()
        }


def _begin(path: Path, size: int, pool: ThreadPoolExecutor, buffers: threading.local) -> list[Future[list[int]]]:
    return [pool.submit(_hash_segment, path, start, buffers) for start in range(0, size, _SEGMENT_SIZE)]


def _joined(segments: Iterable[Future[list[int]]]) -> Iterator[int]:
    for segment in segments:
        yield from segment.result()


def _hash_segment(path: Path, start: int, buffers: threading.local) -> list[int]:
    """CRC-32s of the blocks of one segment, each read into this thread's buffer, which stays in the cache."""
    if not hasattr(buffers, "view"):
        buffers.view = memoryview(bytearray(BLOCK_SIZE))
    view: memoryview = buffers.view
    checksums = []
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(_SEGMENT_SIZE // BLOCK_SIZE):
            got = _read_block(file, view)
            if got == 0:
                break
            checksums.append(zlib.crc32(view[:got]))
    return checksums


def _read_block(file: io.FileIO, view: memoryview) -> int:
    """Fill `view` from the file's position, short only at its end."""
    done = 0
    while done < len(view) and (got := file.readinto(view[done:])):
        done += got
    return done


def read_exactly(fd: int, view: memoryview, start: int) -> None:
    """Fill `view` from the file at byte `start`.

    Raises:
        EOFError: the file ends before.
    """
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {start + done}, {len(view) - done} bytes early")
        done += got
