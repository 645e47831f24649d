"""A hash of files that is as fast as the disk: BLAKE2b over blocks, so that threads can share one file.

A file's digest is the BLAKE2b-128 of the concatenated BLAKE2b-128 digests of its consecutive 4 MiB blocks (the last
may be shorter; an empty file has none). Blocks are independent, so a file is hashed on all cores when it is read,
and in passing while it is written. It guards against damage, not against an attacker who can rewrite the manifest.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HASH_NAME = "blake2b-128/4MiB"
BLOCK_SIZE = 4 * 2**20
_DIGEST_SIZE = 16


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest in hexadecimal of one file."""

    size: int
    digest: str


def _block_hash(data: Any = b"") -> Any:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE)


def _root(digests: Iterable[bytes]) -> str:
    return str(_block_hash(b"".join(digests)).hexdigest())


class BlockHash:
    """The digest of a stream of bytes that arrives in pieces of any size."""

    def __init__(self) -> None:
        self.size = 0
        self._digests: list[bytes] = []
        self._block = _block_hash()

    def update(self, piece: memoryview) -> None:
        """Add bytes that do not cross a block's end; `room` tells how many may come."""
        self._block.update(piece)
        self.size += len(piece)
        if self.size % BLOCK_SIZE == 0 and len(piece):
            self._digests.append(self._block.digest())
            self._block = _block_hash()

    @property
    def room(self) -> int:
        """Bytes until the end of the current block."""
        return BLOCK_SIZE - self.size % BLOCK_SIZE

    def record(self) -> FileRecord:
        """Size and digest of what has come so far."""
        last = [self._block.digest()] if self.size % BLOCK_SIZE else []
        return FileRecord(self.size, _root(self._digests + last))


class HashedFile(io.RawIOBase):
    """A new file that is hashed in passing as it is written. Wrap it in `io.BufferedWriter`.

    Block by block, the hash and the write follow each other while the bytes are in the processor's cache.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = BlockHash()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def tell(self) -> int:
        return self._hash.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for piece in self._pieces(view):
            self._hash.update(piece)
            while piece:
                piece = piece[os.write(self._fd, piece) :]
        return len(view)

    def _pieces(self, view: memoryview) -> Iterator[memoryview]:
        while view:
            piece, view = view[: self._hash.room], view[self._hash.room :]
            yield piece

    def record(self) -> FileRecord:
        return self._hash.record()

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def hash_files(paths: Iterable[Path], threads: int | None = None) -> dict[str, FileRecord]:
    """Hash files block by block on several threads.

    Args:
        paths: files with different names.
        threads: how many; by default one per processor, at most 8, since a disk is seldom faster than that.

    Returns:
        File name -> record.
    """
    workers = threads or min(8, os.cpu_count() or 1)
    buffers = threading.local()
    with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
        return {path.name: _hash_file(path, pool, buffers) for path in paths}


def _hash_file(path: Path, pool: ThreadPoolExecutor, buffers: threading.local) -> FileRecord:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        starts = range(0, size, BLOCK_SIZE)
        digests = pool.map(lambda start: _hash_block(fd, start, min(BLOCK_SIZE, size - start), buffers), starts)
        return FileRecord(size, _root(digests))
    finally:
        os.close(fd)


def _hash_block(fd: int, start: int, size: int, buffers: threading.local) -> bytes:
    """Read one block into this thread's buffer, which stays in the cache, and hash it there."""
    if not hasattr(buffers, "view"):
        buffers.view = memoryview(bytearray(BLOCK_SIZE))
    view = buffers.view[:size]
    read_exactly(fd, view, start)
    digest: bytes = _block_hash(view).digest()
    return digest


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
