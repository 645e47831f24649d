"""Hashing files at the speed of fast disks, reading and hashing them in one pass, and prefetching them.

A file's digest is the BLAKE2b-128 of its blocks' CRC-32s, four big-endian bytes each, in order (the last block may
be shorter, an empty file has none). Blocks are independent: files are hashed on all cores when they are verified, and
on the fly while they are written. CRC-32 finds every error of one or two bits and every burst of up to 32 in a block,
and misses any other change with probability 2**-32 per block. It guards against damage, not against an attacker, who
could rewrite the manifest as well; `safe_loading` limits what unpickling a file may do.

Why not BLAKE2b alone: 1.1 GB/s per thread where one thread writes 4 GB/s to an NVMe disk; zlib's CRC-32 does 4.7.

A load hashes the files while it reads them (`HashingReader`): hashing first would cost a second trip through memory for
every byte, which is most of the time on a fast disk. A few MiB go from the file to their destination, and then through
the hash in a second thread while they are in the processor's cache. Asking the system for more read-ahead than its own
(`posix_fadvise`) made that slower; `Prefetch` asks for files before the load begins.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from megalith.distributed.machine import memory_limit
from megalith.progress import advance

_POLYNOMIAL = 0xEDB88320  # of zlib, bits reversed

_Table = tuple[tuple[int, ...], ...]


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from the CRC-32s of A and B, where B has `length` bytes.

    A CRC-32 is a polynomial over GF(2) modulo a fixed polynomial; appending n bytes multiplies it by x**(8 n). This is
    linear in its 32 bits, so one table for each power of two of n is enough.
    """
    power = 0
    while length:
        if length & 1:
            low, second_byte, third_byte, high = _table(power)
            first = low[first & 255] ^ second_byte[first >> 8 & 255] ^ third_byte[first >> 16 & 255] ^ high[first >> 24]
        length >>= 1
        power += 1
    return first ^ second


@cache
def _table(power: int) -> _Table:
    """Return the effect of appending 2**power zero bytes, for each value of each of the four bytes of a checksum."""
    columns = [_appended(1 << bit, power) for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0] * 256
        for value in range(1, 256):
            lowest = value & -value
            table[value] = table[value ^ lowest] ^ columns[8 * byte + lowest.bit_length() - 1]
        tables.append(tuple(table))
    return tuple(tables)


def _appended(checksum: int, power: int) -> int:
    if power == 0:
        for _ in range(8):
            checksum = checksum >> 1 ^ (_POLYNOMIAL if checksum & 1 else 0)
        return checksum
    half = 1 << (power - 1)
    return crc32_combine(crc32_combine(checksum, 0, half), 0, half)


HASH_NAME = "crc32-1MiB/blake2b-128"
BLOCK_SIZE = 2**20
_SEGMENT_SIZE = 64 * BLOCK_SIZE  # bytes that one thread reads sequentially, so that the kernel's read-ahead works


def require_file(path: Path) -> None:
    """Raise an OSError unless the path is a regular file: opening a pipe or a device may block for ever."""
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
    """Digest of a stream of bytes, updated with pieces of at most `room` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._checksums: list[int] = []
        self._block = 0

    @property
    def room(self) -> int:
        """Number of bytes until the end of the current block."""
        return BLOCK_SIZE - self.size % BLOCK_SIZE

    def update(self, piece: memoryview) -> None:
        """Add bytes, at most `room`."""
        self._extend(zlib.crc32(piece, self._block), len(piece))

    def update_summed(self, piece: memoryview) -> int:
        """Add bytes as `update` does, and return the CRC-32 of these bytes alone."""
        checksum = zlib.crc32(piece)
        self._extend(crc32_combine(self._block, checksum, len(piece)), len(piece))
        return checksum

    def _extend(self, block: int, length: int) -> None:
        assert 0 < length <= self.room
        self._block = block
        self.size += length
        if self.size % BLOCK_SIZE == 0:
            self._checksums.append(self._block)
            self._block = 0

    def record(self) -> FileRecord:
        """Return size and digest of all bytes added so far."""
        last = [self._block] if self.size % BLOCK_SIZE else []
        return FileRecord(self.size, _digest(self._checksums + last))


class WritingCancelled(Exception):
    """Raised when a write was cancelled."""


class HashedFile(io.RawIOBase):
    """A new file that is hashed while it is written. Wrap it in `io.BufferedWriter`.

    Each block is hashed and then written while it is in the processor's cache. `failure` is the first error of the file
    system: torch's writer loses it and raises an error about positions instead.
    """

    def __init__(self, path: Path, cancelled: Callable[[], bool] = lambda: False) -> None:
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
        """Write all of `data` and return its CRC-32."""
        checksum = 0
        for piece in self._pieces(memoryview(data).cast("B")):
            checksum = crc32_combine(checksum, self._hash.update_summed(piece), len(piece))
            self._put(piece)
        return checksum

    def _put(self, piece: memoryview) -> None:
        size = len(piece)
        if self._cancelled():
            raise WritingCancelled
        try:
            while piece:
                piece = piece[os.write(self._fd, piece) :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        advance("bytes written", size)

    def _pieces(self, view: memoryview) -> Iterator[memoryview]:
        while view:
            room = self._hash.room
            yield view[:room]
            view = view[room:]

    def abandon(self) -> None:
        """Discard all further writes, so that closing a buffered writer over this file cannot fail again."""
        self._abandoned = True

    def record(self) -> FileRecord:
        return self._hash.record()

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def hash_files(paths: Iterable[Path], threads: int | None = None, below: Path | None = None) -> dict[str, FileRecord]:
    """Hash files; return name, or path relative to `below`, -> record. By default one thread per processor, up to 8."""
    buffers = threading.local()
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="hash") as pool:
        sizes = {path: path.stat().st_size for path in paths}
        begun = {
            path: [pool.submit(_hash_segment, path, start, buffers) for start in range(0, size, _SEGMENT_SIZE)]
            for path, size in sizes.items()
        }
        return {
            str(path.relative_to(below or path.parent)): FileRecord(
                sizes[path], _digest(chain.from_iterable(part.result() for part in segments))
            )
            for path, segments in begun.items()
        }


def _hash_segment(path: Path, start: int, buffers: threading.local) -> list[int]:
    """Return the CRC-32s of the blocks of a segment. One buffer per thread keeps blocks in the processor's cache."""
    if not hasattr(buffers, "view"):
        buffers.view = memoryview(bytearray(BLOCK_SIZE))
    view: memoryview = buffers.view
    checksums = []
    with path.open("rb", buffering=0) as file:
        for block in range(start, start + _SEGMENT_SIZE, BLOCK_SIZE):
            if (got := _fill(file.fileno(), view, block)) == 0:
                break
            checksums.append(zlib.crc32(view[:got]))
            advance("bytes hashed", got)
    return checksums


def _fill(fd: int, view: memoryview, start: int) -> int:
    """Fill `view` from byte `start` of the file; return the number of bytes, fewer than requested only at its end."""
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], start + done)):
        done += got
    return done


def read_exactly(fd: int, view: memoryview, start: int) -> None:
    """Fill `view` from byte `start` of the file; raise an EOFError if the file ends first."""
    if (done := _fill(fd, view, start)) < len(view):
        raise EOFError(f"the file ends at byte {start + done}, {len(view) - done} bytes early")


_PIECE = 4 * BLOCK_SIZE  # bytes of one read, and of one task of the hashing thread
_BEHIND = 4  # maximum number of pieces that are read and not hashed yet


class FileReader:
    """Random access to an open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, view: memoryview, start: int) -> None:
        read_exactly(self.fd, view, start)
        advance("bytes read", len(view))


class HashingFileReader(FileReader):
    """An open file that is hashed in a second thread while it is read from its beginning to its end.

    Reads before the current position read the bytes again and do not hash them twice. The caller must not change the
    buffers until `record` returns.
    """

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(fd)
        self._size, self._hash, self._reached = size, BlockHash(), 0
        self._pieces: list[memoryview] = []  # read and not yet submitted to the hashing thread
        self._given: deque[Future[None]] = deque()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash")

    def read(self, view: memoryview, start: int) -> None:
        if start < self._reached:
            super().read(view, start)
            return
        self._pass_over(start)
        while view:
            self._take(view[:_PIECE])
            view = view[_PIECE:]

    def record(self) -> FileRecord:
        """Return size and digest of the whole file; an EOFError if it has become shorter."""
        self._pass_over(self._size)
        self._give()
        for part in self._given:
            part.result()
        return self._hash.record()

    def close(self) -> None:
        self._hasher.shutdown(cancel_futures=True)

    def _pass_over(self, stop: int) -> None:
        while (left := stop - self._reached) > 0:
            self._take(memoryview(bytearray(min(left, BLOCK_SIZE))))

    def _take(self, piece: memoryview) -> None:
        read_exactly(self.fd, piece, self._reached)
        self._reached += len(piece)
        advance("bytes read", len(piece))
        self._pieces.append(piece)
        if sum(map(len, self._pieces)) >= _PIECE:
            self._give()

    def _give(self) -> None:
        self._given.append(self._hasher.submit(self._update, self._pieces))
        self._pieces = []
        if len(self._given) > _BEHIND:
            self._given.popleft().result()

    def _update(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            while piece:
                part = piece[: self._hash.room]
                self._hash.update(part)
                piece = piece[len(part) :]


class HashingReader:
    """Hashes the files of a folder while they are read; the data may be used only if `problems` is empty."""

    def __init__(self, folder: Path, expected: Mapping[str, FileRecord]) -> None:
        self._folder, self._expected = folder, expected
        self._found: dict[str, FileRecord] = {}

    @contextmanager
    def reading(self, name: str, fd: int) -> Iterator[FileReader]:
        """Yield a reader of an open file of the folder. If it hashes, one thread must read the file in order."""
        if name not in self._expected or name in self._found:
            yield FileReader(fd)
            return
        hashed = HashingFileReader(fd, self._expected[name].size)
        try:
            yield hashed
            self._found[name] = hashed.record()
        finally:
            hashed.close()

    def problems(self) -> list[str]:
        """List the files that differ from their records. Files that were not read are hashed now."""
        rest = [self._folder / name for name in self._expected if name not in self._found]
        self._found |= hash_files(rest, below=self._folder)
        return [
            f"{self._folder / name} has changed since it was saved: its hash differs"
            for name, record in self._expected.items()
            if self._found[name] != record
        ]


_ASKED_AT_ONCE = 2**24  # bytes of one call, which returns when the disk has queued the request
_PREFETCH_THREADS = 8  # maximum, as for a load
_SHARE_OF_MEMORY = 16  # a process prefetches at most 1/16 of the machine's memory: eight processes, half of it


class Prefetch:
    """Reads files ahead into the page cache, in threads, until it is stopped or its share of memory is used.

    Between the choice of a checkpoint and its load a run builds its model and plans the reads; the disk would be idle.
    Nothing is copied here; if the kernel needs the memory for something else, the load reads from the disk again.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stopped = threading.Event()
        room = memory_limit() // _SHARE_OF_MEMORY
        threads = min(_PREFETCH_THREADS, len(paths)) if hasattr(os, "posix_fadvise") else 0  # macOS has none
        for number in range(threads):
            own = (paths[number::threads], room // threads)
            threading.Thread(target=self._read, args=own, name="prefetch", daemon=True).start()

    def stop(self) -> None:
        """Request no more; return at once."""
        self._stopped.set()

    def _read(self, paths: Sequence[Path], room: int) -> None:
        """Request files one after the other. Errors are ignored here: the load reports them."""
        for path in paths:
            size = 0
            with suppress(OSError), path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for start in range(0, min(size, room), _ASKED_AT_ONCE):
                    if self._stopped.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _ASKED_AT_ONCE, os.POSIX_FADV_WILLNEED)
            room -= size
