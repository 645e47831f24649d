"""What the rest of the preprocessing knows of a source: chunks that hold whole documents, and where each ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megalith.data.sources.documents import BadDocument, Document


@dataclass(frozen=True)
class Limits:
    """What bounds the memory and time that a source may cost.

    Attributes:
        chunk_bytes: how much text a worker gets at once; more where a document is longer.
        max_document_bytes: the longest line or document that is taken into memory.
        max_expansion: how many times its size on the disk a compressed file may hold.
    """

    chunk_bytes: int = 1 << 20
    max_document_bytes: int = 1 << 26
    max_expansion: int = 250


@dataclass(frozen=True)
class SourceOptions:
    """How the inputs are to be read, as far as the user says it.

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
class Part:
    """A chunk, read.

    Attributes:
        documents: number of each unit that is no blank, and its document, or why it cannot be read.
        num_units: lines of a jsonl, documents of a txt, rows of a table; what places are counted in.
        batches: the same documents a few at a time: for each key the text of every unit. None in place of a batch
            where one of its units is anything else than a document of one text, and for all where that is not known.
    """

    documents: Iterator[tuple[int, Document | BadDocument]]
    num_units: int
    num_bytes: int
    batches: Iterator[list[list[str]] | None] | None = None


class Payload(Protocol):
    """The content of a chunk on its way to a worker: small or about `Limits.chunk_bytes`, and picklable."""

    def read(self, keys: tuple[str, ...]) -> Part:
        """Turn it into documents."""


@dataclass(frozen=True)
class Chunk:
    """A part of a source that ends where a document ends.

    Attributes:
        start: where it begins, counted as the source counts.
        end: where the next chunk begins.
        disk_start: bytes of the file on the disk before it; decides whose share it is.
        disk_end: bytes of the file on the disk up to its end.
        num_units: units in it, None where only reading it tells.
    """

    payload: Payload
    start: int
    end: int
    disk_start: int
    disk_end: int
    num_units: int | None


class Source(ABC):
    """A file with documents."""

    unit: str
    """What a place in it is counted in: line, document, row or element."""
    about: str
    """What it was found to be, for the user."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path, self.disk_bytes, self._limits = path, path.stat().st_size, limits

    @abstractmethod
    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """Its chunks in order, from where an earlier one ended.

        Raises:  DataError if the file is damaged, or a limit is exceeded where the rest cannot be read.
        """

    def units_before(self, start: int) -> int | None:
        """How many units lie before a place that a chunk ended at; None if reading on from there does not need it."""
        return None


@dataclass(frozen=True)
class Row:
    """A row, or an element of an array; `end` is where the next one begins, `disk` the bytes of the file up to it."""

    content: Document | BadDocument
    num_bytes: int
    end: int
    disk: int


@dataclass(frozen=True)
class _Rows:
    contents: list[Document | BadDocument]
    num_bytes: int

    def read(self, keys: tuple[str, ...]) -> Part:
        return Part(iter(enumerate(self.contents)), len(self.contents), self.num_bytes)


def size_of(document: Document | BadDocument) -> int:
    """How many bytes the texts of a document have as UTF-8."""
    if isinstance(document, BadDocument):
        return 0
    every = (text for texts in document for text in ([texts] if isinstance(texts, str) else texts))
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in every)


class RowSource(Source):
    """A source whose rows the leading process takes out from the beginning; a place is a number of rows."""

    unit = "row"

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """All rows in order. Raises DataError as `chunks` does."""

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The rows as chunks of about `chunk_bytes`, from where an earlier one ended."""
        contents: list[Document | BadDocument] = []
        gathered = begins = disk = disk_start = 0
        row = None
        for row in self._rows():
            contents.append(row.content)
            gathered += row.num_bytes
            if gathered >= self._limits.chunk_bytes:
                if row.end > start:
                    yield Chunk(_Rows(contents, gathered), begins, row.end, disk_start, row.disk, len(contents))
                contents, gathered, begins, disk_start = [], 0, row.end, row.disk
            disk = row.disk
        if contents and row is not None and row.end > start:
            yield Chunk(_Rows(contents, gathered), begins, row.end, disk_start, disk, len(contents))
