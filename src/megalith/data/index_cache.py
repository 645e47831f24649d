"""Index arrays kept on the disk under Megatron's names, so that the second run loads what the first one built.

A set of arrays is one entry: `{md5}-{class}-{split}-{name}.npy` for each array and `...-description.txt`, the text
whose md5 names them. Arrays are loaded without pickle, as memory maps.

Several processes may build the same entry at the same time. On one machine, or a file system with locks across
machines, the first of them builds while the others wait and then load. Elsewhere each builds the same arrays, and the
last rename wins. Either way a file appears at once and whole under its name; what a killed process has left under
temporary names the next builder of the entry removes, and its lock went with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import time
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


@dataclass(frozen=True)
class Cached:
    """Arrays from the cache or just built.

    Attributes:
        problem: why they could not be saved, None if they were or need not be.
    """

    arrays: Arrays
    problem: str | None = None


def load_or_build(
    folder: Path | None,
    label: str,
    description: str,
    names: tuple[str, ...],
    build: Callable[[], Arrays],
    fit: Callable[[Arrays], bool],
    newer_than: int | None = None,
) -> Cached:
    """The arrays of an entry: from its files where there are sound ones, else built, once over all processes.

    Args:
        folder: of the cache, None to keep nothing.
        label: class and split, such as `GPTDataset-train`.
        description: everything that determines the arrays, as text.
        names: of the arrays.
        build: makes them.
        fit: whether arrays from files can be the ones that `build` makes.
        newer_than: as in `IndexCache.load`.
    """
    kind = label.replace("-", " ")
    if folder is None:
        logger.info("Build and save the %s indices", kind)
        return Cached(build())
    cache, problem = IndexCache(folder, label, description), None

    def load() -> Arrays | None:
        arrays = cache.load(names, newer_than)
        if arrays is not None and not fit(arrays):
            logger.warning("the cached %s indices do not fit their dataset: built again", kind)
            return None
        if arrays is not None:
            logger.info("Load the %s indices", kind)
        return arrays

    arrays = load() if cache.complete(names) else None
    if arrays is not None:
        return Cached(arrays)
    with cache.claim() as waited:
        arrays = load() if waited and cache.complete(names) else None
        if arrays is None:
            logger.info("Build and save the %s indices", kind)
            arrays = build()
            try:
                cache.save(arrays)
            except OSError as error:
                problem = f"{cache.stem.parent}: {error.strerror}"
    return Cached(arrays, problem)


class IndexCache:
    """One entry of a cache folder.

    Attributes:
        stem: path of the files of this entry up to the last part of their names.
    """

    def __init__(self, folder: Path, label: str, description: str) -> None:
        """Name the entry.

        Args:
            folder: where the files are or will be; it need not exist.
            label: class and split, such as `GPTDataset-train`.
            description: everything that determines the arrays, as text.
        """
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self.stem = folder / f"{digest}-{label}"
        self._description = description

    def path(self, name: str) -> Path:
        """File of an array."""
        return self.stem.with_name(f"{self.stem.name}-{name}.npy")

    def complete(self, names: tuple[str, ...]) -> bool:
        """Whether all files of the entry are there."""
        return self._description_path.is_file() and all(self.path(name).is_file() for name in names)

    def load(self, names: tuple[str, ...], newer_than: int | None = None) -> Arrays | None:
        """The arrays of the entry, or None where a file is missing, damaged or too old.

        Args:
            names: the arrays.
            newer_than: time in ns (as `st_mtime_ns`) after which every array must have been written, because the
                description names where the data are, not what they hold; None for any time.
        """
        if not self.complete(names):
            return None
        try:
            if newer_than is not None and any(self.path(name).stat().st_mtime_ns <= newer_than for name in names):
                logger.warning("index cache %s-*: older than the dataset, built again", self.stem)
                return None
            return {name: np.load(self.path(name), mmap_mode="r", allow_pickle=False) for name in names}
        except (OSError, ValueError, EOFError) as error:
            logger.warning("index cache %s-*: damaged (%s), built again", self.stem, error)
            return None

    def save(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the entry.

        Raises:  OSError if the folder cannot be written.
        """
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        self._description_path.unlink(missing_ok=True)  # an entry that is replaced is none until it is whole again
        for name, array in arrays.items():
            _write(self.path(name), partial(np.save, arr=array, allow_pickle=False))
        _write(self._description_path, lambda file: file.write(self._description.encode()))

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

    @property
    def _description_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}-description.txt")


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
