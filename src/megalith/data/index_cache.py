"""Index arrays kept on the disk under Megatron's names, so that the second run loads what the first one built.

A set of arrays is one entry: `{md5}-{class}-{split}-{name}.npy` for each array and `...-description.txt`, the text
whose md5 names them. Each file appears at once and whole (temporary name, then rename), so runs that build the same
entry at the same time do not disturb each other. Arrays are loaded without pickle, as memory maps.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


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

    def load(self, names: tuple[str, ...], newer_than: int | None = None) -> Arrays | None:
        """The arrays of the entry, or None where a file is missing, damaged or too old.

        Args:
            names: the arrays.
            newer_than: time in ns (as `st_mtime_ns`) after which every array must have been written, because the
                description names where the data are, not what they hold; None for any time.
        """
        if not (self._description_path.is_file() and all(self.path(name).is_file() for name in names)):
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
        for name, array in arrays.items():
            _write(self.path(name), partial(np.save, arr=array, allow_pickle=False))
        _write(self._description_path, lambda file: file.write(self._description.encode()))

    @property
    def _description_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}-description.txt")


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name in its own folder, then rename it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
