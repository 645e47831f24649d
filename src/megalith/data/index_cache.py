"""Disk cache of index arrays under Megatron's file names.

One entry is a set of arrays: `{md5}-{class}-{split}-{name}.npy` for each array, and `...-description.txt`, the text
whose md5 names them. Arrays are loaded without pickle, as memory maps.

`...-checksums.json` beside them is Megalith's own: the CRC-32 of each file and a digest of the documents that the
arrays were built from. One rank of every start verifies both; the other ranks rely on the size and time of the verified
files, which the same file records. An entry without checksums (from Megatron or an older version) is checked exactly
where its arrays can be checked without being built, else it is built anew; then it has checksums. Megatron reads our
entries and ignores the checksums.

Several processes may need the same entry at once. On one machine, or on a file system with locks across machines, the
first one builds while the others wait and then load. Elsewhere each builds the same arrays and the last rename wins. A
file appears whole under its final name. The next builder of an entry removes temporary files of a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalith.progress import task

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_TEMPORARY = "partial"
_ABANDONED_SECONDS = 3600.0  # older temporary files belong to no running process
_RECORD_FORMAT = 1
_BLOCK = 1 << 24  # bytes that are read at once for a checksum


@dataclass(frozen=True)
class CachedIndex:
    """Arrays that were loaded or built; `problem` says why built arrays could not be saved."""

    arrays: Arrays
    problem: str | None = None


@dataclass(frozen=True)
class IndexSpec:
    """Description of an entry and the function that builds it.

    Attributes:
        label: class and split, such as `GPTDataset-train`.
        description: the text whose md5 names the entry, Megatron's.
        source: digest of everything else that they depend on, above all the lengths of the documents.
        is_valid: whether arrays of unknown origin can be the ones that `build` makes, checked entry by entry; None if
            only building them tells.
    """

    label: str
    description: str
    names: tuple[str, ...]
    build: Callable[[], Arrays]
    source: Callable[[], str] = lambda: ""
    is_valid: Callable[[Arrays], bool] | None = None

    @property
    def title(self) -> str:
        """Return the name of the entry in log lines."""
        return f"{self.label.replace('-', ' ')} indices"


def load_or_build(
    folder: Path | None, spec: IndexSpec, written_ns: int | None = None, *, is_checked: bool = False
) -> CachedIndex:
    """Load the arrays of an entry if they are intact; else build them once over all processes, and save them.

    Args:
        folder: of the cache, None to keep nothing.
        written_ns: when the documents were written, as `st_mtime_ns`; part of what the checked files are known by.
        is_checked: another rank of this start has loaded the entry: do not read files again whose size and time are
            those that were checked last.
    """
    if folder is None:
        return CachedIndex(_build(spec))
    cache, problem = IndexCache(folder, spec.label, spec.description), None
    arrays = cache.load(spec, written_ns, is_checked=is_checked)
    if arrays is not None:
        return CachedIndex(arrays)
    with cache.lock() as waited:
        arrays = cache.load(spec, written_ns, is_checked=is_checked) if waited else None
        if arrays is None:
            arrays = _build(spec)
            try:
                cache.save(arrays, spec.source(), written_ns)
            except OSError as error:
                problem = f"{cache.stem.parent}: {error.strerror}"
    return CachedIndex(arrays, problem)


def _build(spec: IndexSpec) -> Arrays:
    logger.info("Build and save the %s", spec.title)
    with task(f"building the {spec.title}"):
        return spec.build()


@dataclass(frozen=True)
class _Checksums:
    """Content of the checksum file of an entry.

    Attributes:
        crc32: of each file, by the name of its array.
        source: digest of what the arrays were built from.
        checked: size and time in ns of each file, and when the documents were written, at the last check.
    """

    crc32: dict[str, int]
    source: str
    checked: dict[str, Any]

    @classmethod
    def read(cls, path: Path, names: tuple[str, ...] | None = None) -> _Checksums | None:
        """Read a checksum file; return None if it is missing, damaged or about other arrays than `names`."""
        if not path.is_file():  # opening a pipe could block for ever
            return None
        try:
            content = json.loads(path.read_bytes())
            record = cls(dict(content["crc32"]), str(content["source"]), dict(content["checked"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        is_known = content.get("format") == _RECORD_FORMAT and set(record.crc32) == set(names or record.crc32)
        return record if is_known else None

    def content(self) -> bytes:
        """Serialise to the JSON of the checksum file."""
        fields = {"format": _RECORD_FORMAT, "crc32": self.crc32, "source": self.source, "checked": self.checked}
        return json.dumps(fields, indent=1).encode() + b"\n"


class IndexCache:
    """Entry of a cache folder; `stem` is the path of its files up to the last part of their names."""

    def __init__(self, folder: Path, label: str, description: str) -> None:
        """Derive the file names of the entry; the folder need not exist."""
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self.stem = folder / f"{digest}-{label}"
        self._description = description
        self._description_path = folder / f"{self.stem.name}-description.txt"
        self._record_path = folder / f"{self.stem.name}-checksums.json"

    def path(self, name: str) -> Path:
        """Return the path of an array's file."""
        return self.stem.with_name(f"{self.stem.name}-{name}.npy")

    def exists(self, names: tuple[str, ...]) -> bool:
        """Return whether all files of the entry that Megatron needs exist."""
        return self._description_path.is_file() and all(self.path(name).is_file() for name in names)

    def load(self, spec: IndexSpec, written_ns: int | None = None, *, is_checked: bool = False) -> Arrays | None:
        """Map the arrays of the entry; None if files are missing, damaged or of other documents (`load_or_build`)."""
        if not self.exists(spec.names):
            return None
        try:
            with task(f"checking the {spec.title}"):
                problem = self._problem(spec, written_ns, is_checked=is_checked)
            if problem is None:
                logger.info("Load the %s", spec.title)
                return self._load_mapped(spec.names)
        except Exception as error:  # numpy's reader of damaged headers raises whatever Python's tokenizer does
            problem = f"damaged ({type(error).__name__}: {error})"
        logger.warning("index cache %s-*: %s; building it again", self.stem, problem)
        return None

    def save(self, arrays: Mapping[str, NDArray[Any]], source: str = "", written_ns: int | None = None) -> None:
        """Write the entry, except files that already hold its arrays. Raises OSError if the folder is not writable."""
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        for path in (self._description_path, self._record_path):  # the entry does not exist until all of it is replaced
            path.unlink(missing_ok=True)
        for name, array in arrays.items():
            if not self._is_saved(name, array):
                _write(self.path(name), partial(np.save, arr=array, allow_pickle=False))
        self._record(tuple(arrays), source, written_ns)
        _write(self._description_path, lambda file: file.write(self._description.encode()))

    def _is_saved(self, name: str, array: NDArray[Any]) -> bool:
        """Return whether a file already holds the array: another run may have it mapped, and would lose it over NFS."""
        try:
            found = np.load(self.path(name), mmap_mode="r", allow_pickle=False)
            return bool(found.dtype == array.dtype and np.array_equal(found, array))
        except Exception:  # as in `load`
            return False

    def _problem(self, spec: IndexSpec, written_ns: int | None, *, is_checked: bool) -> str | None:
        """Return why the files cannot be used, None if they can."""
        record = _Checksums.read(self._record_path, spec.names)
        if record is None:
            return self._problem_without_checksums(spec, written_ns)
        state = self._file_stats(spec.names, written_ns)
        if is_checked and record.checked == state:
            return None
        if damaged := self._damaged_files(record):
            return f"{', '.join(damaged)} damaged (another checksum)"
        if record.source != spec.source():
            return "built from other documents"
        if record.checked != state:
            self._write_record(_Checksums(record.crc32, record.source, state))
        return None

    def _problem_without_checksums(self, spec: IndexSpec, written_ns: int | None) -> str | None:
        if spec.is_valid is None:
            return "without checksums"
        if not spec.is_valid(self._load_mapped(spec.names)):
            return "damaged, or built from other documents"
        with contextlib.suppress(OSError):
            self._record(spec.names, spec.source(), written_ns)
        return None

    def _load_mapped(self, names: tuple[str, ...]) -> Arrays:
        return {name: np.load(self.path(name), mmap_mode="r", allow_pickle=False) for name in names}

    def _damaged_files(self, record: _Checksums) -> list[str]:
        return [self.path(name).name for name, crc32 in record.crc32.items() if _crc32(self.path(name)) != crc32]

    def _record(self, names: tuple[str, ...], source: str, written_ns: int | None) -> None:
        state = self._file_stats(names, written_ns)
        self._write_record(_Checksums({name: _crc32(self.path(name)) for name in names}, source, state))

    def _write_record(self, record: _Checksums) -> None:
        with contextlib.suppress(OSError):
            _write(self._record_path, lambda file: file.write(record.content()))

    def _file_stats(self, names: tuple[str, ...], written_ns: int | None) -> dict[str, Any]:
        """Return sizes and times that identify the files after a check."""
        found = {name: self.path(name).stat() for name in names}
        return {**{name: [one.st_size, one.st_mtime_ns] for name, one in found.items()}, "documents": written_ns}

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Lock the entry against other builders; yield whether another process held the lock first.

        Where the folder cannot be written to or its file system has no locks, all may build at once.
        """
        path, waited, file = self.stem.with_name(f".{self.stem.name}.lock"), False, None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file, waited = _open_locked(path)
            self._remove_abandoned()
        try:
            yield waited
        finally:
            if file is not None:
                path.unlink(missing_ok=True)
                file.close()

    def _remove_abandoned(self) -> None:
        for path in self.stem.parent.glob(f".{self.stem.name}-*.{_TEMPORARY}"):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class CacheReport:
    """Result of verifying a cache folder.

    Attributes:
        intact: entries whose files agree with their checksums.
        without_checksums: entries that only a run can check, because it knows what they are made from.
        damaged: files that differ from their checksums, or are missing.
    """

    intact: int
    without_checksums: int
    damaged: list[Path]


def verify_caches(folder: Path) -> CacheReport:
    """Compare every file of a cache folder with its checksum. Raises OSError if a file cannot be read."""
    intact, without, damaged = 0, 0, list[Path]()
    for description in sorted(folder.glob("*-description.txt")):
        stem = description.name.removesuffix("description.txt")
        record = _Checksums.read(folder / f"{stem}checksums.json")
        recorded = {} if record is None else {folder / f"{stem}{name}.npy": crc for name, crc in record.crc32.items()}
        changed = [path for path, crc32 in recorded.items() if not path.is_file() or _crc32(path) != crc32]
        without += record is None
        intact += record is not None and not changed
        damaged += changed
    return CacheReport(intact, without, damaged)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _open_locked(path: Path) -> tuple[IO[bytes], bool]:
    """Open and lock the lock file; return it and whether another process held the lock first.

    Raises:  OSError if it cannot be made or locked.
    """
    waited = False
    while True:
        file = path.open("ab")
        try:
            if not _try_to_lock(file, path):
                logger.warning("another process is building %s: waiting for it", path.with_suffix("").name[1:])
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            # The former holder has removed the file; only a lock on the file that now has the name counts.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file, waited
        except BaseException:
            file.close()
            raise
        file.close()


def _try_to_lock(file: IO[bytes], path: Path) -> bool:
    """Return whether the lock was free. Where locks do not exist, remove the file and raise OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name in its own folder, then rename it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{_TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
