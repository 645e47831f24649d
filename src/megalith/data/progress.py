"""What wants to know how far a preprocessing run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Standing:
    """How far a run is.

    Attributes:
        documents: documents written, those of an earlier run included.
        bytes: bytes of text encoded, likewise.
        disk: bytes of the input that have been read, likewise.
        disk_total: bytes of the input of this share.
        seconds: since the beginning of this run.
        documents_before: documents that an earlier run had written.
        bytes_before: bytes of text that it had encoded.
        disk_before: bytes of the input that it had read.
    """

    documents: int
    bytes: int
    disk: int
    disk_total: int
    seconds: float
    documents_before: int = 0
    bytes_before: int = 0
    disk_before: int = 0


class Progress(Protocol):
    """A listener."""

    def note(self, text: str) -> None:
        """Something about the inputs or the run that the user should hear."""

    def opening(self, path: str, about: str) -> None:
        """A source is about to be read; what it was found to be."""

    def started(self, seconds: float, workers: int) -> None:
        """Tokenizer and workers are there, `seconds` after the call."""

    def advanced(self, standing: Standing) -> None:
        """A chunk has been written."""

    def skipped(self, place: str, reason: str, count: int) -> None:
        """A document cannot be read and is left out; the how many-th it is."""

    def finished(self, standing: Standing) -> None:
        """All text is encoded; the files get their names next."""


class Silence:
    """Progress that nobody watches."""

    def note(self, text: str) -> None: ...

    def opening(self, path: str, about: str) -> None: ...

    def started(self, seconds: float, workers: int) -> None: ...

    def advanced(self, standing: Standing) -> None: ...

    def skipped(self, place: str, reason: str, count: int) -> None: ...

    def finished(self, standing: Standing) -> None: ...
