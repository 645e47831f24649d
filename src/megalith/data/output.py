"""What a run of the preprocessing writes: a dataset for each key, partitions of them, the list of what was left out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from megalith.data.encoding import ChunkReport
from megalith.data.indexed import IndexedWriter, Written, bin_path, idx_path, spool_path
from megalith.data.token_files import Partitions, Placement, TokenFile, TokenFiles
from megalith.errors import DataError


class Output:
    """The writers of a run; a context manager. Leaving it early removes what was written, unless `keep` was called.

    Args:
        prefixes: key to the prefix of its dataset.
        partitions: how documents are dealt out.
        dtype: type of the tokens.
        kept: what writers of an earlier run hold, by prefix; one that is complete is left as it is.
        partition_prefixes: key to the prefixes of its partitions.
    """

    def __init__(
        self,
        prefixes: Mapping[str, str],
        partitions: Partitions,
        dtype: np.dtype[Any],
        kept: Mapping[str, Written],
        partition_prefixes: Mapping[str, list[str]],
    ) -> None:
        self._prefixes, self._partitions, self._dtype = prefixes, partitions, dtype
        self._partition_prefixes = partition_prefixes
        self._stack = contextlib.ExitStack()
        self._done: dict[str, Written] = {}
        try:
            self._writers = {key: [self._writer(prefix, kept) for prefix in self._parts(key)] for key in prefixes}
        except BaseException:
            self._stack.close()
            raise

    @staticmethod
    def is_there(kept: Mapping[str, Written]) -> bool:
        """Whether the files of an earlier run still hold what it noted."""
        for prefix, held in kept.items():
            named = bin_path(prefix)
            finished = named.exists() and not _partial(named).exists() and named.stat().st_size == held.tokens
            if finished and idx_path(prefix).exists():
                continue
            sizes = {named if finished else _partial(named): held.tokens}
            sizes |= {spool_path(prefix, "lengths"): held.lengths, spool_path(prefix, "documents"): held.documents}
            if not all(path.exists() and path.stat().st_size >= size for path, size in sizes.items()):
                return False
        return True

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def place(self, report: ChunkReport, first_document: int) -> Placement:
        """Append a chunk whose first document has this number; where its tokens are to be written."""
        offsets = []
        for writers, structure in zip(self._writers.values(), report.by_key, strict=True):
            shares = [structure]
            if len(writers) > 1:
                parts = self._partitions.of(first_document, report.num_documents)
                shares = [structure.of(parts == number) for number in range(len(writers))]
            row = []
            for writer, share in zip(writers, shares, strict=True):
                assert writer is not None
                row.append(writer.reserve(share.lengths, share.sequences_per_document))
            offsets.append(tuple(row))
        return Placement(first_document, tuple(offsets))

    def token_files(self) -> TokenFiles:
        """Where `place` has the tokens written."""
        rows = [[writer for writer in writers if writer is not None] for writers in self._writers.values()]
        files = [[TokenFile(str(bin_path(writer.prefix)), writer.bin_descriptor) for writer in row] for row in rows]
        return TokenFiles(files, self._partitions)

    def flush(self) -> None:
        """Bring all to the disk."""
        for writer in self._all():
            writer.flush()

    def written(self) -> dict[str, Written]:
        """What the writers hold, by prefix."""
        return {**self._done, **{writer.prefix: writer.written() for writer in self._all()}}

    def keep(self) -> None:
        """Leave the partial files for a later run."""
        for writer in self._all():
            writer.keep()

    def finish(self) -> dict[str, int]:
        """Give the datasets their names, partitions merged; the number of tokens of each key."""
        for writer in self._all():
            writer.finalize()
        if self._partitions.count > 1:
            for key, prefix in self._prefixes.items():
                with IndexedWriter(prefix, self._dtype) as merged:
                    for part in self._partition_prefixes[key]:
                        merged.add_index(part)
                    merged.finalize()
        return {key: bin_path(prefix).stat().st_size // self._dtype.itemsize for key, prefix in self._prefixes.items()}

    def _parts(self, key: str) -> list[str]:
        return self._partition_prefixes[key] if self._partitions.count > 1 else [self._prefixes[key]]

    def _all(self) -> list[IndexedWriter]:
        return [writer for writers in self._writers.values() for writer in writers if writer is not None]

    def _writer(self, prefix: str, kept: Mapping[str, Written]) -> IndexedWriter | None:
        """A writer that goes on with what is kept; None where the pair is complete already."""
        held = kept.get(prefix)
        if held is not None and not _partial(bin_path(prefix)).exists():
            if idx_path(prefix).exists():
                self._done[prefix] = held
                return None
            os.replace(bin_path(prefix), _partial(bin_path(prefix)))  # killed between the two names
        return self._stack.enter_context(IndexedWriter(prefix, self._dtype, resume=held))


class SkippedList:
    """The list of documents that were left out: place and reason, one a line.

    Args:
        path: where it is; nothing is written there while there is nothing to say.
        kept: bytes of an earlier run to keep.
    """

    def __init__(self, path: Path, kept: int) -> None:
        self.path, self.num_bytes = path, kept
        self._file: IO[bytes] | None = None
        if kept:
            self._opened().truncate(kept)
        else:
            path.unlink(missing_ok=True)

    def add(self, place: str, reason: str) -> None:
        """Note a document. Raises DataError if the disk is full."""
        line = " ".join(f"{place}: {reason}".split("\n")).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._opened().write(line)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from error
        self.num_bytes += len(line)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self.path.open("ab")
        return self._file


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
