"""csv files: which delimiter, whether the first row names the columns, and the rows one by one."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalith.data.sources.columns import choose_columns
from megalith.data.sources.documents import BadDocument, Document
from megalith.data.sources.protocol import Chunk, SourceOptions
from megalith.data.sources.rows import Row, chunks_of, size_of
from megalith.data.sources.streams import TextFile
from megalith.errors import DataError

_DELIMITERS = ",\t;|"
_NAME = re.compile(r"[^\W\d][\w .:/()\[\]#%-]{0,39}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,29}")
_LOOKED_AT = 1 << 16
_LINES_LOOKED_AT = 200
_ROWS_LOOKED_AT = 50


@dataclass(frozen=True)
class Look:
    """What the beginning of a csv shows.

    Attributes:
        delimiter: between the cells.
        rows: the first rows.
    """

    delimiter: str
    rows: list[list[str]]

    @cached_property
    def names(self) -> list[str]:
        """The cells of the first row, which may name the columns."""
        return [cell.strip() for cell in self.rows[0]]


def look_at(file: TextFile, delimiter: str | None) -> Look:
    """Read the beginning of a csv.

    Raises:  DataError if it has no row.
    """
    beginning = file.beginning(_LOOKED_AT)
    text = beginning.decode(errors="replace")
    if not text.strip():
        raise DataError(f"{file.path}: the file is empty")
    found = delimiter or _delimiter(file, text)
    rows = [row for row in csv.reader(_lines_of(text), delimiter=found) if row]
    # The last row may be cut, unless all of the file has been seen.
    return Look(found, (rows[:-1] if len(beginning) == _LOOKED_AT and len(rows) > 1 else rows)[:_ROWS_LOOKED_AT])


def has_header(look: Look, others: Sequence[Look], wanted: Sequence[str]) -> bool | None:
    """Whether the first row of a file names its columns; None if that cannot be told.

    Args:
        look: at this file.
        others: at the other files of the same command.
        wanted: names of columns that the user asks for.
    """
    first = look.names
    if set(first) & set(wanted):
        return True
    if not _can_be_names(first):
        return False
    rows = [other.names for other in others]
    sharing = 1 + rows.count(first)
    are_identifiers = all(_IDENTIFIER.fullmatch(name) for name in first if name)
    if sharing > 1 and (are_identifiers or 2 * sharing > 1 + len(rows)):
        return True
    # Files of one command mostly have the same header, so another one speaks against this row.
    is_contradicted = any(row != first and _can_be_names(row) for row in rows)
    if not _stands_above_content(first, look):
        return None if are_identifiers and not is_contradicted else False
    if is_contradicted:
        return None if are_identifiers else False
    return True if are_identifiers or len(first) > 1 else None


def _can_be_names(row: list[str]) -> bool:
    names = row[1:] if not row[0] and len(row) > 1 else row  # pandas leaves the name of its index empty
    return len(set(names)) == len(names) and all(_NAME.fullmatch(name) for name in names)


def _stands_above_content(first: list[str], look: Look) -> bool:
    """Whether below one of the names stand longer texts, or numbers."""
    rest = [row for row in look.rows[1:] if len(row) == len(first)]
    return bool(rest) and any(
        sorted(map(len, column))[len(column) // 2] > 2 * len(name) or all(_is_number(cell) for cell in column)
        for name, column in zip(first, zip(*rest, strict=True), strict=True)
        if name
    )


class CsvSource:
    """A csv of which one column, or one for each key, has the text."""

    unit = "row"

    def __init__(self, file: TextFile, look: Look, options: SourceOptions, *, header: bool) -> None:
        """Choose the columns.

        Raises:  DataError if they are not there.
        """
        self.path = file.path
        self.disk_bytes = file.path.stat().st_size
        names = [name.strip() for name in look.rows[0]] if header else None
        self._width = len(look.rows[0])
        self._columns = choose_columns(file.path, names, self._width, options)
        self._file, self._header, self._delimiter = file, header, look.delimiter
        shown = (
            ", ".join(names[at] or f"column {at + 1}" for at in self._columns) if names else _numbered(self._columns)
        )
        first = "" if header else f", no header (its first row is {look.rows[0][self._columns[0]][:30]!r})"
        self.about = f"csv, {file.about}, text from {shown}{first}"

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        return chunks_of(self._rows(), self._file.limits, start)

    def units_before(self, start: int) -> int | None:
        return None

    def _rows(self) -> Iterator[Row]:
        lines = _Lines(self._file)
        # A module-wide number; this is the only reader of the process.
        csv.field_size_limit(self._file.limits.max_document_bytes)
        reader = csv.reader(lines, delimiter=self._delimiter)
        number = 0
        try:
            for cells in reader:
                number += 1
                if number == 1 and self._header:
                    continue
                if not cells:
                    continue  # a blank line
                content = self._document(cells)
                yield Row(content, size_of(content), number, lines.disk)
        except csv.Error as error:
            limit = self._file.limits.max_document_bytes
            hint = f"; a quote that nothing closes, or a cell over {limit} bytes" if "limit" in str(error) else ""
            raise DataError(f"{self.path}, row {number + 1} (line {reader.line_num}): {error}{hint}") from error

    def _document(self, cells: list[str]) -> Document | BadDocument:
        if len(cells) != self._width and (len(cells) > self._width or len(cells) <= max(self._columns)):
            more = "; are quotes missing around a text?" if len(cells) > self._width else ""
            return BadDocument(f"it has {len(cells)} cells, the first row {self._width}{more}")
        texts: Document = [cells[at] for at in self._columns]
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            return BadDocument(f"a byte of it is no {self._file.encoding.plain_name} (--encoding names another)")
        return texts


class _Lines:
    """Lines of a text file, with their line breaks; bytes that are no text become lone surrogates."""

    def __init__(self, file: TextFile) -> None:
        self._file = file
        self.disk = 0

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        rest = ""
        for block, disk in self._file.blocks():
            self.disk = disk
            lines = (rest + decoder.decode(block)).split("\n")
            rest = lines.pop()
            if len(rest) > self._file.limits.max_document_bytes:
                raise csv.Error("line longer than the limit")
            for line in lines:
                yield line + "\n"
        rest += decoder.decode(b"", final=True)
        if rest:
            yield rest


def _delimiter(file: TextFile, text: str) -> str:
    """The delimiter that gives most rows the same number of cells, above one; the comma where none does."""
    if ".tsv" in [suffix.lower() for suffix in file.path.suffixes]:
        return "\t"
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        rows = [row for row in csv.reader(_lines_of(text)[:_LINES_LOOKED_AT], delimiter=delimiter) if row]
        cells, times = Counter(map(len, rows)).most_common(1)[0]
        if cells > most and times >= 0.9 * len(rows) - 1 and len(rows[0]) == cells:
            best, most = delimiter, cells
    return best


def _lines_of(text: str) -> list[str]:
    return [line + "\n" for line in text.split("\n")]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbered(columns: Sequence[int]) -> str:
    return ", ".join(f"column {at + 1}" for at in columns)
