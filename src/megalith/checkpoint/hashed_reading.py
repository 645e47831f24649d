"""Reading files into tensors and hashing them in the same pass.

To hash a checkpoint and then to read it costs a second trip through memory for every byte, and on a fast disk that trip
is most of the time. Here some MiB go from the file to their destination, and then through the hash in a second thread
while they are in the processor's cache and the next ones are read. What lies between the destinations goes through a
buffer. To ask the system for more read-ahead than it does itself (`posix_fadvise`) made it slower.

What is filled may be used only when `ReadThrough.problems` is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from megalith.checkpoint.hashing import BLOCK_SIZE, BlockHash, FileRecord, hash_files, read_exactly

_PIECE = 4 * BLOCK_SIZE  # bytes that are read, or hashed, in one go
_BEHIND = 4  # such pieces at most are read and not hashed


class FileReading:
    """An open file, read wherever it is asked for.

    Args:
        fd: the file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, view: memoryview, start: int) -> None:
        """Fill `view` from the file at byte `start`.

        Raises:
            EOFError: the file ends before.
        """
        read_exactly(self.fd, view, start)


class HashedReading(FileReading):
    """An open file that is hashed whole as it is read from its begin to its end; a second thread hashes.

    What is asked for behind the place that was reached is read again, and hashed once. What was read must stay as it is
    until `record`.

    Args:
        fd: the file.
        size: its bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(fd)
        self._size, self._hash, self._reached = size, BlockHash(), 0
        self._pieces: list[memoryview] = []  # read, and not yet given to the other thread
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
        """Size and digest of the whole file.

        Raises:
            EOFError: it has become shorter.
        """
        self._pass_over(self._size)
        self._give()
        for part in self._given:
            part.result()
        return self._hash.record()

    def close(self) -> None:
        """End the thread that hashes."""
        self._hasher.shutdown(cancel_futures=True)

    def _pass_over(self, stop: int) -> None:
        while (left := stop - self._reached) > 0:
            self._take(memoryview(bytearray(min(left, BLOCK_SIZE))))

    def _take(self, piece: memoryview) -> None:
        read_exactly(self.fd, piece, self._reached)
        self._reached += len(piece)
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


class ReadThrough:
    """The files of a folder that are to be hashed while they are read.

    Args:
        folder: where they are.
        expected: their records by name, of files that have those sizes.
    """

    def __init__(self, folder: Path, expected: Mapping[str, FileRecord]) -> None:
        self._folder, self._expected = folder, expected
        self._found: dict[str, FileRecord] = {}

    @contextmanager
    def reading(self, name: str, fd: int) -> Iterator[FileReading]:
        """How to read an open file of the folder: in ascending order if it is to be hashed. One thread for a file."""
        if name not in self._expected or name in self._found:
            yield FileReading(fd)
            return
        hashed = HashedReading(fd, self._expected[name].size)
        try:
            yield hashed
            self._found[name] = hashed.record()
        finally:
            hashed.close()

    def problems(self) -> list[str]:
        """What differs from the records. Files that nothing was read from are hashed now.

        Raises:
            OSError: a file cannot be read.
        """
        rest = [self._folder / name for name in self._expected if name not in self._found]
        self._found |= hash_files(rest, below=self._folder)
        return [
            f"{self._folder / name} has changed since it was saved: its hash differs"
            for name, record in self._expected.items()
            if self._found[name] != record
        ]
