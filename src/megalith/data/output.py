"""Output of a preprocessing run: a dataset for each key, their partitions, the skipped list, the journal.

The parent process only reserves where the tokens of a chunk are written, as soon as it knows the number of tokens of
all earlier chunks. So tokens never pass between processes, and all processes write at once.

The journal records the progress of an unfinished run, so that the same command continues after a kill or a power cut.
It holds lengths of the partial files; later bytes in them are cut off. It is replaced as a whole, after the bytes that
it counts have reached the disk.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Collection, Mapping, Sequence
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
    """Megatron's `--partitions`: how documents are dealt to partitions, which are then merged in order."""

    count: int = 1
    size: int | None = None  # documents of each with `--keep-sequential-samples`; None deals them in turn

    def partition_of(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the partition numbers of `count` documents from `first` on; [count]."""
        numbers = np.arange(first, first + count)
        if self.size is None:
            return numbers % self.count
        return np.minimum(numbers // self.size, self.count - 1)


@dataclass(frozen=True)
class ChunkOffsets:
    """Reserved space of a chunk: for each key the first byte in the .bin of each partition."""

    first_document: int  # the number of a document decides its partition
    by_key: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TokenFile:
    """Open .bin: its final name, for messages, and its file descriptor in this process."""

    name: str
    descriptor: int


class TokenFiles:
    """Files of token ids (.bin), for each key one per partition. Several processes may write to them."""

    def __init__(self, files: Sequence[Sequence[TokenFile]], partitions: Partitions) -> None:
        self.files, self.partitions = files, partitions

    def write(self, chunk: EncodedChunk, offsets: ChunkOffsets) -> None:
        """Write the tokens of a chunk to its reserved space. Raises DataError if the disk is full."""
        keys = zip(self.files, chunk.tokens, chunk.report.by_key, offsets.by_key, strict=True)
        for files, tokens, lengths, starts in keys:
            if len(files) == 1:
                _write(files[0], tokens, starts[0])
                continue
            parts = self.partitions.partition_of(offsets.first_document, chunk.report.num_documents)
            for number, (file, start) in enumerate(zip(files, starts, strict=True)):
                _write(file, tokens[lengths.token_mask(parts == number)], start)


def _write(file: TokenFile, tokens: NDArray[Any], offset: int) -> None:
    content = np.ascontiguousarray(tokens).data.cast("B")
    try:
        while content:
            written = os.pwrite(file.descriptor, content, offset)
            content, offset = content[written:], offset + written
    except OSError as error:
        raise DataError(f"cannot write {file.name}: {error.strerror}") from error


@dataclass(frozen=True)
class RunState:
    """Progress of a run between two chunks, as the journal stores it.

    Attributes:
        source: number of the source being read.
        place: where to continue in it, in the source's own unit (`Chunk.start`).
        units: units of the source before that place, None if unknown.
        disk: bytes of the input read, over all sources.
        skipped_bytes: length of the skipped list.
        encoded: whether all text is encoded and only the renaming is left.
        written: bytes held by the writers, by prefix.
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
    """Journal of one output prefix; a run whose `settings` differ does not continue from it."""

    def __init__(self, prefix: str, settings: Mapping[str, str]) -> None:
        self.path = Path(prefix + ".unfinished")
        self._folder = prefix.removesuffix(self.path.stem)  # as typed
        self._settings = dict(settings)

    def read(self) -> tuple[RunState | None, str | None]:
        """Return the state to continue from, None if there is none, and a note for the user, None if not needed."""
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
            # An earlier run may have spelled the same folder otherwise, such as ./out for out.
            written = {
                self._folder + Path(prefix).name: Written(**sizes) for prefix, sizes in state.pop("written").items()
            }
            return RunState(**state, written=written), None
        except (KeyError, TypeError, ValueError):
            return None, f"{self.path} is damaged: starting from the beginning"

    def write(self, state: RunState) -> None:
        """Record a state whose bytes have been flushed. Raises DataError if the disk is full."""
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
        """Remove the journal: the run is finished, or its state is not wanted."""
        self.path.unlink(missing_ok=True)

    def take_over(self, stem: str) -> None:
        """Rename the journal and the skipped list of this run that an older version kept under `stem`."""
        older = Journal(stem, self._settings)
        if older.path == self.path or self.path.exists() or older.read()[0] is None:
            return
        with contextlib.suppress(FileNotFoundError):
            os.replace(skipped_path(stem), skipped_path(str(self.path.with_suffix(""))))
        os.replace(older.path, self.path)

    def remove_outdated(self, stem: str, prefixes: Collection[str]) -> list[Path]:
        """Remove the journals of other runs of `stem` that wrote one of these datasets, and return their paths.

        Their partial files are those of this run from now on.
        """
        names, removed = {Path(prefix).name for prefix in prefixes}, []
        for path in self.path.parent.glob(f"{glob.escape(Path(stem).name)}*{self.path.suffix}"):
            try:
                written = {Path(prefix).name for prefix in json.loads(path.read_bytes())["state"]["written"]}
            except (OSError, ValueError, LookupError, TypeError, RecursionError):
                continue
            if path != self.path and not names.isdisjoint(written):
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed


class OutputFiles:
    """Output files of a run; a context manager. An early exit removes them unless `keep` was called."""

    def __init__(
        self,
        prefixes: Mapping[str, str],
        partitions: Partitions,
        dtypes: Mapping[str, np.dtype[Any]],
        kept: Mapping[str, Written],
        partition_prefixes: Mapping[str, list[str]],
    ) -> None:
        self._prefixes, self._partitions = prefixes, partitions
        self._dtypes = {prefix: dtypes[key] for key in prefixes for prefix in (prefixes[key], *partition_prefixes[key])}
        self._partition_prefixes = partition_prefixes
        self._stack = contextlib.ExitStack()
        self._done: dict[str, Written] = {}
        try:
            self._writers = {key: [self._writer(prefix, kept) for prefix in self._parts(key)] for key in prefixes}
        except BaseException:
            self._stack.close()
            raise

    @staticmethod
    def is_intact(kept: Mapping[str, Written]) -> bool:
        """Return whether the files of an earlier run still hold what its journal recorded."""
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

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def reserve(self, report: ChunkReport, first_document: int) -> ChunkOffsets:
        """Append the lengths of a chunk whose first document has this number; return where its tokens go."""
        offsets = []
        for writers, lengths in zip(self._writers.values(), report.by_key, strict=True):
            by_partition = [lengths]
            if len(writers) > 1:
                parts = self._partitions.partition_of(first_document, report.num_documents)
                by_partition = [lengths.select(parts == number) for number in range(len(writers))]
            row = []
            for writer, part in zip(writers, by_partition, strict=True):
                assert writer is not None
                row.append(writer.reserve(part.lengths, part.sequences_per_document))
            offsets.append(tuple(row))
        return ChunkOffsets(first_document, tuple(offsets))

    def prefixes(self) -> list[str]:
        """Return the prefixes of all datasets, those of partitions included."""
        return list(self._dtypes)

    def token_files(self) -> TokenFiles:
        """Return the files that `reserve` refers to."""
        rows = [[writer for writer in writers if writer is not None] for writers in self._writers.values()]
        files = [[TokenFile(str(bin_path(writer.prefix)), writer.bin_descriptor) for writer in row] for row in rows]
        return TokenFiles(files, self._partitions)

    def flush(self) -> None:
        """Flush all files to the disk."""
        for writer in self._all():
            writer.flush()

    def written(self) -> dict[str, Written]:
        """Return the bytes held by the writers, by prefix."""
        return {**self._done, **{writer.prefix: writer.written() for writer in self._all()}}

    def keep(self) -> None:
        """Keep the partial files on exit, for a later run."""
        for writer in self._all():
            writer.keep()

    def finish(self) -> dict[str, int]:
        """Rename the datasets to their final names, merging partitions; return the tokens of each key."""
        for writer in self._all():
            writer.finalize()
        if self._partitions.count > 1:
            for key, prefix in self._prefixes.items():
                with IndexedWriter(prefix, self._dtypes[prefix]) as merged:
                    for part in self._partition_prefixes[key]:
                        merged.add_index(part)
                    merged.finalize()
        return {
            key: bin_path(prefix).stat().st_size // self._dtypes[prefix].itemsize
            for key, prefix in self._prefixes.items()
        }

    def _parts(self, key: str) -> list[str]:
        return self._partition_prefixes[key] if self._partitions.count > 1 else [self._prefixes[key]]

    def _all(self) -> list[IndexedWriter]:
        return [writer for writers in self._writers.values() for writer in writers if writer is not None]

    def _writer(self, prefix: str, kept: Mapping[str, Written]) -> IndexedWriter | None:
        """Open a writer that continues from what is kept; None if the pair is already complete."""
        held = kept.get(prefix)
        if held is not None and not _partial(bin_path(prefix)).exists():
            if idx_path(prefix).exists():
                self._done[prefix] = held
                return None
            os.replace(bin_path(prefix), _partial(bin_path(prefix)))  # killed between the two names
        return self._stack.enter_context(IndexedWriter(prefix, self._dtypes[prefix], resume=held))


class SkippedList:
    """File of skipped documents: place and reason, one per line; it exists only if there are any."""

    def __init__(self, path: Path, kept: int) -> None:
        self.path, self.num_bytes = path, kept
        self._file: IO[bytes] | None = None
        if kept:
            self._opened().truncate(kept)
        else:
            path.unlink(missing_ok=True)

    def add(self, place: str, reason: str) -> None:
        """Append a document. Raises DataError if the disk is full."""
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


def skipped_path(prefix: str) -> Path:
    """Return the path of the list of skipped documents."""
    return Path(prefix + "_skipped.txt")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
