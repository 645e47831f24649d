"""Documents that the leading process has already taken out of a table or an array, on their way to a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megalith.data.sources.documents import BadDocument, Document
from megalith.data.sources.protocol import Chunk, Limits, Part


@dataclass(frozen=True)
class Row:
    """A row, or an element of an array.

    Attributes:
        content: its texts, or why it cannot be read.
        num_bytes: size of its text.
        end: where the next one begins, counted as the source counts.
        disk: bytes of the file up to its end.
    """

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


def chunks_of(rows: Iterable[Row], limits: Limits, start: int) -> Iterator[Chunk]:
    """Rows as chunks of about `chunk_bytes`.

    Args:
        rows: in order, from the beginning of the source.
        limits: of memory and time.
        start: where an earlier chunk ended; the rows before it are left out.
    """
    contents: list[Document | BadDocument] = []
    gathered = begins = disk = disk_start = 0
    row = None
    for row in rows:
        contents.append(row.content)
        gathered += row.num_bytes
        if gathered >= limits.chunk_bytes:
            if row.end > start:
                yield Chunk(_Rows(contents, gathered), begins, row.end, disk_start, row.disk, len(contents))
            contents, gathered, begins, disk_start = [], 0, row.end, row.disk
        disk = row.disk
    if contents and row is not None and row.end > start:
        yield Chunk(_Rows(contents, gathered), begins, row.end, disk_start, disk, len(contents))
