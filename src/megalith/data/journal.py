"""How far an unfinished run is, on the disk, so that the same command goes on from there after a kill or a power cut.

The journal names lengths of the partial files; whatever they hold beyond was written after it and is cut off. It is
replaced as a whole, after what it names has reached the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalith.data.indexed import Written
from megalith.errors import DataError

_VERSION = 1


@dataclass(frozen=True)
class State:
    """A moment between two chunks.

    Attributes:
        source: number of the source that is being read.
        place: where to go on in it, counted as it counts.
        units: units of it before that place, None where that is not known.
        documents: documents written.
        bytes: bytes of text encoded.
        disk: bytes of the input read, over all sources.
        skipped: documents left out.
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
    """The journal of one output prefix.

    Args:
        prefix: of the output.
        settings: all that decides the output, by name; a run with others does not go on with this one.
    """

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
        differing = self._differing(found.get("settings", {}))
        if differing:
            return None, f"the unfinished run had another {', another '.join(differing)}: starting from the beginning"
        try:
            state = dict(found["state"])
            written = {prefix: Written(**sizes) for prefix, sizes in state.pop("written").items()}
            return State(**state, written=written), None
        except (KeyError, TypeError, ValueError):
            return None, f"{self.path} is damaged: starting from the beginning"

    def write(self, state: State) -> None:
        """Note a moment. What it names must have been flushed.

        Raises:  DataError if the disk is full.
        """
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

    def _differing(self, settings: Mapping[str, str]) -> list[str]:
        names = dict.fromkeys((*self._settings, *settings))
        return [name for name in names if settings.get(name) != self._settings.get(name)]
