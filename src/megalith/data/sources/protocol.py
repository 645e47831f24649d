"""Interface of sources: chunks of whole documents, and where each of them ends."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megalith.data.sources.documents import BadDocument, Dialogue, Document

STDIN = Path("-")
"""Standard input in the place of a file: of unknown size, and read once."""
UNKNOWN_SIZE = sys.maxsize


@dataclass(frozen=True)
class Limits:
    """Bounds on the memory and time that a source may need.

    Attributes:
        chunk_bytes: text that a worker gets at once; more if one document is longer.
        max_document_bytes: longest line or document that is read into memory.
        max_expansion: largest ratio of the content of a compressed file to its size.
    """

    chunk_bytes: int = 1 << 20
    max_document_bytes: int = 1 << 26
    max_expansion: int = 250


@dataclass(frozen=True)
class SourceOptions:
    """Options of reading the inputs, as the user gives them.

    Attributes:
        keys: keys of JSON objects, or names of columns; each makes a dataset.
        input_format: one of `formats.FORMATS`, or auto to go by name and content.
        encoding: name of a text encoding, or auto to find it.
        document_separator: what separates the documents of a txt; None finds out.
        one_document_per_file: each txt is one document, whatever is in it.
        text_column: column of a table that has the text, by name or by number from 1; None goes by `keys`.
        csv_header: yes, no, or auto to find out.
        csv_delimiter: character between the cells of a csv; None finds out.
        dataset_split: split of a dataset folder that has several.
    """

    keys: tuple[str, ...] = ("text",)
    input_format: str = "auto"
    encoding: str = "auto"
    document_separator: str | None = None
    one_document_per_file: bool = False
    text_column: str | None = None
    csv_header: str = "auto"
    csv_delimiter: str | None = None
    dataset_split: str = "train"
    limits: Limits = Limits()


@dataclass(frozen=True)
class ChunkDocuments:
    """Documents of a chunk.

    Attributes:
        documents: number of each non-blank unit, and its document or why it cannot be read.
        num_units: lines of a jsonl, documents of a txt, rows of a table; the unit of positions.
        texts: returns the same documents all at once: for each key the text of every unit, or None if one of the units
            is not a document of one text for each key. It is None where that is unknown.
    """

    documents: Iterator[tuple[int, Document | BadDocument]]
    num_units: int
    num_bytes: int
    texts: Callable[[], list[list[str]] | None] | None = None


class Payload(Protocol):
    """Picklable content of a chunk, sent to a worker: small, or about `Limits.chunk_bytes`."""

    def read(self, keys: tuple[str, ...]) -> ChunkDocuments:
        """Parse the documents of the chunk."""


@dataclass(frozen=True)
class Chunk:
    """Part of a source that ends where a document ends.

    Attributes:
        start: where it begins, in the source's own positions.
        end: where the next chunk begins.
        disk_start: bytes of the file on disk before it; decides which share it belongs to.
        disk_end: bytes of the file on disk up to its end.
        num_units: units in it, None if only reading it tells.
    """

    payload: Payload
    start: int
    end: int
    disk_start: int
    disk_end: int
    num_units: int | None


class Source(ABC):
    """File with documents."""

    unit: str
    """What a place in it is counted in: line, document, row or element."""
    about: str
    """What it was found to be, for the user."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path, self._limits = path, limits
        self.disk_bytes = UNKNOWN_SIZE if path == STDIN else path.stat().st_size

    @abstractmethod
    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """Yield the chunks in order, from the `end` of an earlier one on.

        Raises:  DataError if the file is damaged, or a limit is exceeded where the rest cannot be read.
        """

    def units_before(self, start: int) -> int | None:
        """Count the units before the end of a chunk; None if continuing from there does not need the number."""
        return None


@dataclass(frozen=True)
class Row:
    """Row of a table, element of an array, part of an archive; `end` is the next position, `disk` the bytes to it."""

    content: Any
    num_bytes: int
    end: int
    disk: int


@dataclass(frozen=True)
class RowsPayload:
    """Parsed rows of a chunk."""

    contents: list[Document | BadDocument]
    num_bytes: int

    @property
    def num_units(self) -> int:
        return len(self.contents)

    def read(self, keys: tuple[str, ...]) -> ChunkDocuments:
        return ChunkDocuments(iter(enumerate(self.contents)), len(self.contents), self.num_bytes)


def utf8_size(document: Document | BadDocument) -> int:
    """Return the size of the texts of a document in UTF-8 bytes."""
    if isinstance(document, Dialogue):
        return sum(len(str(message.get("content"))) for message in document.messages)
    if isinstance(document, BadDocument):
        return 0
    every = (text for texts in document for text in ([texts] if isinstance(texts, str) else texts))
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in every)


class RowSource(Source):
    """Source whose rows the parent process reads from the beginning; positions are numbers of rows."""

    unit = "row"
    payload: type[Any] = RowsPayload

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """Yield all rows in order. Raises DataError as `chunks` does."""

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """Yield the rows as chunks of about `chunk_bytes`, from the `end` of an earlier one on."""
        contents: list[Any] = []
        gathered = begins = disk = disk_start = 0
        row = None
        for row in self._rows():
            contents.append(row.content)
            gathered += row.num_bytes
            if gathered >= self._limits.chunk_bytes:
                if row.end > start:
                    payload = self.payload(contents, gathered)
                    yield Chunk(payload, begins, row.end, disk_start, row.disk, payload.num_units)
                contents, gathered, begins, disk_start = [], 0, row.end, row.disk
            disk = row.disk
        if contents and row is not None and row.end > start:
            payload = self.payload(contents, gathered)
            yield Chunk(payload, begins, row.end, disk_start, disk, payload.num_units)
