"""Reading files into tensors and hashing them in the same pass.

To hash a checkpoint and then to read it costs a second trip through memory for every byte, and on a fast disk that trip
is most of the time. Here each block goes from the file to its destination and through the hash while it is in the
processor's cache, and what lies between the destinations through a small buffer. The system's own read-ahead fetches
what comes next meanwhile; to ask it for more (`posix_fadvise`) made it slower, since it then takes small pages.

What is filled may be used only when `ReadThrough.problems` is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megalith.checkpoint.hashing import BLOCK_SIZE, BlockHash, FileRecord, hash_files, read_exactly


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
    """An open file that is hashed whole as it is read from its begin to its end.

    What is asked for behind the place that was reached is read again, and hashed once.

    Args:
        fd: the file.
        size: its bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(fd)
        self._size, self._hash = size, BlockHash()
        self._between = memoryview(bytearray(min(BLOCK_SIZE, size)))

    def read(self, view: memoryview, start: int) -> None:
        if start < self._hash.size:
            super().read(view, start)
            return
        self._pass_over(start)
        while view:
            piece = view[: self._hash.room]
            self._take(piece)
            view = view[len(piece) :]

    def record(self) -> FileRecord:
        """Size and digest of the whole file.

        Raises:
            EOFError: it has become shorter.
        """
        self._pass_over(self._size)
        return self._hash.record()

    def _pass_over(self, stop: int) -> None:
        while (left := stop - self._hash.size) > 0:
            self._take(self._between[: min(left, self._hash.room)])

    def _take(self, piece: memoryview) -> None:
        read_exactly(self.fd, piece, self._hash.size)
        self._hash.update(piece)


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
        yield hashed
        self._found[name] = hashed.record()

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
