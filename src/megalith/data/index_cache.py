"""Index arrays cached on disk under Megatron's names, so that the second run loads what the first one built.

A set of arrays is one entry: `{md5}-{class}-{split}-{name}.npy` for each array and `...-description.txt`, the text
whose md5 names them. Arrays are loaded without pickle, as memory maps.

`...-checksums.json` beside them is ours: the CRC-32 of each file and a digest of the documents that the arrays were
built from. Every start verifies both, on one rank; the other ranks of that start rely on the size and time of the files
that it verified, which the same file records. An entry without checksums, written by Megatron or by an older version,
is checked exactly where arrays can be checked without being built, else built anew; then it has checksums. Megatron
reads entries of ours and ignores the checksums.

Several processes may build the same entry at the same time. On one machine, or a file system with locks across
machines, the first of them builds while the others wait and then load. Elsewhere each builds the same arrays, and the
last rename wins. Either way a file appears at once and whole under its name; what a killed process has left under
temporary names the next builder of the entry removes, and its lock went with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_TEMPORARY = "partial"
_ABANDONED_SECONDS = 3600.0  # a temporary file that has not grown for so long belongs to no one
_RECORD_FORMAT = 1
_BLOCK = 1 << 24  # bytes that are read at once for a checksum
_TELL_SECONDS = 10.0


@dataclass(frozen=True)
class Cached:
    """Arrays from the cache or just built; `problem` says why they could not be saved, if they had to be."""

    arrays: Arrays
    problem: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How the arrays of an entry are made.

    Attributes:
        label: class and split, such as `GPTDataset-train`.
        description: the text whose md5 names the entry, Megatron's.
        source: digest of everything else that they depend on, above all the lengths of the documents.
        is_sound: whether arrays of unknown origin can be the ones that `build` makes, checked entry by entry; None if
            only building them tells.
    """

    label: str
    description: str
    names: tuple[str, ...]
    build: Callable[[], Arrays]
    source: Callable[[], str] = lambda: ""
    is_sound: Callable[[Arrays], bool] | None = None

    @property
    def title(self) -> str:
        """For the log."""
        return f"{self.label.replace('-', ' ')} indices"


def load_or_build(
    folder: Path | None, recipe: Recipe, written_ns: int | None = None, *, is_checked: bool = False
) -> Cached:
    """Load the arrays of an entry if they are intact; else build them, once over all processes, and save them.

    Args:
        folder: of the cache, None to keep nothing.
        written_ns: when the documents were written, as `st_mtime_ns`; part of what the checked files are known by.
        is_checked: another rank of this start has loaded the entry: do not read files again whose size and time are
            those that were checked last.
    """
    if folder is None:
        return Cached(_built(recipe))
    cache, problem = IndexCache(folder, recipe.label, recipe.description), None
    arrays = cache.load(recipe, written_ns, is_checked=is_checked)
    if arrays is not None:
        return Cached(arrays)
    with cache.claim() as waited:
        arrays = cache.load(recipe, written_ns, is_checked=is_checked) if waited else None
        if arrays is None:
            arrays = _built(recipe)
            try:
                cache.save(arrays, recipe.source(), written_ns)
            except OSError as error:
                problem = f"{cache.stem.parent}: {error.strerror}"
    return Cached(arrays, problem)


def _built(recipe: Recipe) -> Arrays:
    logger.info("Build and save the %s", recipe.title)
    with _reported(f"build the {recipe.title}"):
        return recipe.build()


@dataclass(frozen=True)
class _Record:
    """What the checksum file of an entry says.

    Attributes:
        crc32: of each file, by the name of its array.
        source: digest of what the arrays were built from.
        checked: size and time in ns of each file, and when the documents were written, at the last check.
    """

    crc32: dict[str, int]
    source: str
    checked: dict[str, Any]

    @classmethod
    def read(cls, path: Path, names: tuple[str, ...] | None = None) -> _Record | None:
        """Return the record, or None if the file is missing, damaged or about other arrays than `names`."""
        if not path.is_file():  # to open a pipe may wait for ever
            return None
        try:
            content = json.loads(path.read_bytes())
            record = cls(dict(content["crc32"]), str(content["source"]), dict(content["checked"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        is_known = content.get("format") == _RECORD_FORMAT and set(record.crc32) == set(names or record.crc32)
        return record if is_known else None

    def content(self) -> bytes:
        fields = {"format": _RECORD_FORMAT, "crc32": self.crc32, "source": self.source, "checked": self.checked}
        return json.dumps(fields, indent=1).encode() + b"\n"


class IndexCache:
    """One entry of a cache folder; `stem` is the path of its files up to the last part of their names."""

    def __init__(self, folder: Path, label: str, description: str) -> None:
        """Name the entry; the folder need not exist."""
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self.stem = folder / f"{digest}-{label}"
        self._description = description
        self._description_path = folder / f"{self.stem.name}-description.txt"
        self._record_path = folder / f"{self.stem.name}-checksums.json"

    def path(self, name: str) -> Path:
        """File of an array."""
        return self.stem.with_name(f"{self.stem.name}-{name}.npy")

    def complete(self, names: tuple[str, ...]) -> bool:
        """Whether all files of the entry that Megatron needs exist."""
        return self._description_path.is_file() and all(self.path(name).is_file() for name in names)

    def load(self, recipe: Recipe, written_ns: int | None = None, *, is_checked: bool = False) -> Arrays | None:
        """The arrays of the entry; None where a file is missing, damaged or of other documents. See `load_or_build`."""
        if not self.complete(recipe.names):
            return None
        try:
            with _reported(f"check the {recipe.title} in {self.stem.parent}"):
                problem = self._problem(recipe, written_ns, is_checked=is_checked)
            if problem is None:
                logger.info("Load the %s", recipe.title)
                return self._mapped(recipe.names)
        except Exception as error:  # numpy's reader of damaged headers raises whatever Python's tokenizer does
            problem = f"damaged ({type(error).__name__}: {error})"
        logger.warning("index cache %s-*: %s, built again", self.stem, problem)
        return None

    def save(self, arrays: Mapping[str, NDArray[Any]], source: str = "", written_ns: int | None = None) -> None:
        """Write the entry; files that hold the arrays already stay. Raises OSError if the folder cannot be written."""
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        for path in (self._description_path, self._record_path):  # no entry until all of it is replaced
            path.unlink(missing_ok=True)
        for name, array in arrays.items():
            if not self._holds(name, array):
                _write(self.path(name), partial(np.save, arr=array, allow_pickle=False))
        self._record(tuple(arrays), source, written_ns)
        _write(self._description_path, lambda file: file.write(self._description.encode()))

    def _holds(self, name: str, array: NDArray[Any]) -> bool:
        """Whether the file of an array is there and sound: another run may have it mapped, and loses it over NFS."""
        try:
            found = np.load(self.path(name), mmap_mode="r", allow_pickle=False)
            return bool(found.dtype == array.dtype and np.array_equal(found, array))
        except Exception:  # as in `load`
            return False

    def _problem(self, recipe: Recipe, written_ns: int | None, *, is_checked: bool) -> str | None:
        """Why the files cannot be used, None if they can."""
        record = _Record.read(self._record_path, recipe.names)
        if record is None:
            return self._problem_without_checksums(recipe, written_ns)
        state = self._state(recipe.names, written_ns)
        if is_checked and record.checked == state:
            return None
        if damaged := self._damaged(record):
            return f"{', '.join(damaged)} damaged (another checksum)"
        if record.source != recipe.source():
            return "built from other documents"
        if record.checked != state:
            self._write_record(_Record(record.crc32, record.source, state))
        return None

    def _problem_without_checksums(self, recipe: Recipe, written_ns: int | None) -> str | None:
        if recipe.is_sound is None:
            return "without checksums"
        if not recipe.is_sound(self._mapped(recipe.names)):
            return "damaged, or built from other documents"
        with contextlib.suppress(OSError):
            self._record(recipe.names, recipe.source(), written_ns)
        return None

    def _mapped(self, names: tuple[str, ...]) -> Arrays:
        return {name: np.load(self.path(name), mmap_mode="r", allow_pickle=False) for name in names}

    def _damaged(self, record: _Record) -> list[str]:
        return [self.path(name).name for name, crc32 in record.crc32.items() if _crc32(self.path(name)) != crc32]

    def _record(self, names: tuple[str, ...], source: str, written_ns: int | None) -> None:
        state = self._state(names, written_ns)
        self._write_record(_Record({name: _crc32(self.path(name)) for name in names}, source, state))

    def _write_record(self, record: _Record) -> None:
        with contextlib.suppress(OSError):
            _write(self._record_path, lambda file: file.write(record.content()))

    def _state(self, names: tuple[str, ...], written_ns: int | None) -> dict[str, Any]:
        """What the files are known by once they have been checked."""
        found = {name: self.path(name).stat() for name in names}
        return {**{name: [one.st_size, one.st_mtime_ns] for name, one in found.items()}, "documents": written_ns}

    @contextlib.contextmanager
    def claim(self) -> Iterator[bool]:
        """Keep other processes from building this entry; tells whether one was waited for.

        Where the folder cannot be written to or its file system has no locks, all may build at once.
        """
        path, waited, file = self.stem.with_name(f".{self.stem.name}.lock"), False, None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file, waited = _locked(path)
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
    """What the entries of a cache folder are worth.

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
        record = _Record.read(folder / f"{stem}checksums.json")
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


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Log what a block does at intervals, should it take long."""
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(_TELL_SECONDS):
            logger.warning("%s: %.0f s so far", what, time.monotonic() - started)

    thread = threading.Thread(target=report, name="megalith-index-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _locked(path: Path) -> tuple[IO[bytes], bool]:
    """The lock file, held by this process alone until it is closed, and whether another one held it before.

    Raises:  OSError if it cannot be made or locked.
    """
    waited = False
    while True:
        file = path.open("ab")
        try:
            if not _try_to_lock(file, path):
                logger.warning("another process builds %s: waiting for it", path.with_suffix("").name[1:])
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it has removed the name; the lock that counts is the one of the file that has it now.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file, waited
        except BaseException:
            file.close()
            raise
        file.close()


def _try_to_lock(file: IO[bytes], path: Path) -> bool:
    """Whether the lock was free; the file goes again where there are no locks, which raises OSError."""
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
