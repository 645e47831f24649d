"""What a run of the preprocessing writes: a dataset for each key, their partitions, the skipped list, the journal.

The process that leads only decides where the tokens of a chunk belong, as soon as it knows how many all chunks before
have. So tokens cross no border between processes, and every process may write at once.

The journal says how far an unfinished run is, so that the same command goes on from there after a kill or a power cut.
It names lengths of the partial files; whatever they hold beyond was written after it and is cut off. It is replaced as
a whole, after what it names has reached the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.encoding import ChunkReport, EncodedChunk
from megalith.data.indexed import IndexedWriter, Written, bin_path, idx_path, spool_path
from megalith.errors import DataError

_VERSION = 1


@dataclass(frozen=True)
class Partitions:
    """How Megatron's `--partitions` deal documents out before they are merged in the order of the partitions."""

    count: int = 1
    size: int | None = None  # documents of each with `--keep-sequential-samples`; None deals them out in turn

    def of(self, first: int, count: int) -> NDArray[np.int64]:
        """The partitions of documents `first`, `first` + 1, ..."""
        numbers = np.arange(first, first + count)
        if self.size is None:
            return numbers % self.count
        return np.minimum(numbers // self.size, self.count - 1)


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a chunk belong: for each key the byte at which they begin in the file of each partition."""

    first_document: int  # its number decides the partitions
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TokenFile:
    """A .bin that is being written: the name that it gets, for messages, and the descriptor in this process."""

    name: str
    descriptor: int


class TokenFiles:
    """The .bin files of a run: for each key those of its partitions. Several processes may write to them."""

    def __init__(self, files: Sequence[Sequence[TokenFile]], partitions: Partitions) -> None:
        self.files, self.partitions = files, partitions

    def write(self, chunk: EncodedChunk, placement: Placement) -> None:
        """Write the tokens of a chunk. Raises DataError if the disk is full."""
        keys = zip(self.files, chunk.tokens, chunk.report.by_key, placement.offsets, strict=True)
        for files, tokens, structure, offsets in keys:
            if len(files) == 1:
                _write(files[0], tokens, offsets[0])
                continue
            parts = self.partitions.of(placement.first_document, chunk.report.num_documents)
            for number, (file, offset) in enumerate(zip(files, offsets, strict=True)):
                _write(file, tokens[structure.tokens_of(parts == number)], offset)


def _write(file: TokenFile, tokens: NDArray[Any], offset: int) -> None:
    content = np.ascontiguousarray(tokens).data.cast("B")
    try:
        while content:
            written = os.pwrite(file.descriptor, content, offset)
            content, offset = content[written:], offset + written
    except OSError as error:
        raise DataError(f"cannot write {file.name}: {error.strerror}") from error


@dataclass(frozen=True)
class State:
    """A moment between two chunks.

    Attributes:
        source: number of the source that is being read.
        place: where to go on in it, counted as it counts.
        units: units of it before that place, None where that is not known.
        disk: bytes of the input read, over all sources.
        skipped_bytes: length of the list of what was left out.
        encoded: whether all text is encoded and only names are missing.
        written: what the writers hold, by prefix.
    """

    source: int = 0
    place: int = 0
    units: int | None = 0
    documents: int = 0
    bytes: int = 0
    disk: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    encoded: bool = False
    written: dict[str, Written] = field(default_factory=dict)


class Journal:
    """The journal of one output prefix; a run with other `settings`, by name, does not go on with it."""

    def __init__(self, prefix: str, settings: Mapping[str, str]) -> None:
        self.path = Path(prefix + ".unfinished")
        self._settings = dict(settings)

    def read(self) -> tuple[State | None, str | None]:
        """Where to go on, and what the user should hear; no state where there is nothing to go on with."""
        try:
            found = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, RecursionError):
            return None, f"{self.path} is damaged: starting from the beginning"
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            return None, f"{self.path} is of another version: starting from the beginning"
        settings = found.get("settings", {})
        names = dict.fromkeys((*self._settings, *settings))
        differing = [name for name in names if settings.get(name) != self._settings.get(name)]
        if differing:
            return None, f"the unfinished run had another {', another '.join(differing)}: starting from the beginning"
        try:
            state = dict(found["state"])
            written = {prefix: Written(**sizes) for prefix, sizes in state.pop("written").items()}
            return State(**state, written=written), None
        except (KeyError, TypeError, ValueError):
            return None, f"{self.path} is damaged: starting from the beginning"

    def write(self, state: State) -> None:
        """Note a moment. What it names must have been flushed. Raises DataError if the disk is full."""
        partial = self.path.with_name(self.path.name + ".partial")
        content: dict[str, Any] = {"version": _VERSION, "settings": self._settings, "state": asdict(state)}
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError as error:
            raise DataError(f"cannot write {partial}: {error.strerror}") from error

    def remove(self) -> None:
        """The run is finished, or its state is not wanted."""
        self.path.unlink(missing_ok=True)


class Output:
    """The writers of a run; a context manager. Leaving it early removes what was written, unless `keep` was called."""

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
    """The list of documents that were left out: place and reason, one a line; no file while there are none."""

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
