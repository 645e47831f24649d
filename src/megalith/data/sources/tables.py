"""Table sources: parquet and Arrow files (Hugging Face datasets) and csv files, and the choice of text columns.

For a csv, the delimiter and whether the first row is a header are detected.
"""

from __future__ import annotations

import codecs
import csv
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megalith.data.sources.documents import MESSAGES, BadDocument, Document, dialogue_hint, dialogue_keys, document_of
from megalith.data.sources.protocol import Row, RowSource, SourceOptions, utf8_size
from megalith.data.sources.streams import TextFile
from megalith.errors import DataError
from megalith.tokenizers.protocol import import_for

_BATCH_ROWS = 512
_ARROW_FILE = b"ARROW1"
_DELIMITERS = ",\t;|"
_NAME = re.compile(r"[^\W\d][\w .:/()\[\]#%-]{0,39}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,29}")
_PREVIEW_BYTES = 1 << 16
_PREVIEW_LINES = 200
_PREVIEW_ROWS = 50
_SHOWN = 40  # characters of a cell in an error


def choose_columns(path: Path, names: Sequence[str] | None, count: int, options: SourceOptions) -> list[int]:
    """Return the column number, from 0, of each key or of `--text-column`; `names` is None for a csv without header.

    Raises:  DataError if a column is missing, or the choice is ambiguous.
    """
    if options.text_column is not None:
        return [_column_number(path, names, count, options.text_column)]
    if names is None:
        if count == 1 and len(options.keys) == 1:
            return [0]
        raise DataError(
            f"{path} has {count} columns and no header; give the number of the column with the text, such as "
            f"--text-column {min(2, count)} (or --csv-header yes if the first row is a header)"
        )
    if options.keys == (MESSAGES,) and (dialogue := dialogue_keys(names)):
        return [list(names).index(name) for name in dialogue]
    missing = [key for key in options.keys if key not in names]
    if not missing:
        return [list(names).index(key) for key in options.keys]
    if count == 1 and len(options.keys) == 1:
        return [0]
    found = f"{path}: no column {', '.join(missing)}; its columns are {', '.join(names)}"
    if options.keys == (MESSAGES,):
        raise DataError(found + dialogue_hint(names))
    raise DataError(f"{found}. Give the column with the text as --text-column")


def _column_number(path: Path, names: Sequence[str] | None, count: int, wanted: str) -> int:
    if names is not None and wanted in names:
        return list(names).index(wanted)
    if wanted.isdecimal() and 1 <= int(wanted) <= count:
        return int(wanted) - 1
    have = f"its columns are {', '.join(names)}" if names is not None else f"it has {count} columns and no header"
    raise DataError(f"--text-column {wanted}: {path} has no such column; {have}")


class _ColumnarSource(RowSource):
    """Table read by pyarrow, with the text in one column for each key."""

    kind: str
    _names: list[str]

    def __init__(self, path: Path, options: SourceOptions) -> None:
        super().__init__(path, options.limits)
        self._options = options

    def units_before(self, start: int) -> int | None:
        return start

    @abstractmethod
    def _batches(self) -> Iterator[Any]:
        """Yield record batches of few rows each."""

    @abstractmethod
    def _disk_bytes_after(self, rows: int) -> int:
        """Return the number of bytes of the file up to the end of row `rows`."""

    def _rows(self) -> Iterator[Row]:
        number = 0
        with self._read_errors_translated():
            for batch in self._batches():
                columns = [batch.column(name).to_pylist() for name in self._names]
                for cells in zip(*columns, strict=True):
                    number += 1
                    content = _document(self._names, cells, self._options.keys)
                    yield Row(content, utf8_size(content), number, self._disk_bytes_after(number))

    @contextmanager
    def _read_errors_translated(self) -> Iterator[None]:
        """Translate pyarrow's errors about a damaged file into DataError."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the {self.kind} file is truncated or damaged: {error}") from error

    def _library(self, module: str) -> Any:
        return import_for(f"{self.path}: reading it", module, "data")


class ParquetSource(_ColumnarSource):
    """Parquet file."""

    kind = "parquet"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Read the schema and choose the columns. Raises DataError if the file is damaged or has no such text."""
        super().__init__(path, options)
        with self._read_errors_translated(), self._open() as file:
            schema = file.schema_arrow
            self._num_rows = file.metadata.num_rows
        self._names = _text_columns(path, schema, options)
        self.about = f"parquet, {self._num_rows} rows, text from {', '.join(self._names)}"

    def _disk_bytes_after(self, rows: int) -> int:
        return self.disk_bytes * rows // max(1, self._num_rows)

    def _open(self) -> Any:
        return self._library("pyarrow.parquet").ParquetFile(self.path, memory_map=True, pre_buffer=False)

    def _batches(self) -> Iterator[Any]:
        with self._open() as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=self._names, use_threads=False)


class ArrowSource(_ColumnarSource):
    """Arrow file: a stream as Hugging Face datasets write it (`save_to_disk`, cache), or Feather."""

    kind = "arrow"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Read the schema and choose the columns. Raises DataError if the file is damaged or has no such text."""
        super().__init__(path, options)
        with self._read_errors_translated(), self._mapped() as mapped:
            schema = self._reader(mapped).schema
        self._names = _text_columns(path, schema, options)
        self.about = f"arrow, text from {', '.join(self._names)}"
        self._position = 0

    def _disk_bytes_after(self, rows: int) -> int:
        return self._position

    def _mapped(self) -> Any:
        return self._library("pyarrow").memory_map(str(self.path))

    def _reader(self, mapped: Any) -> Any:
        ipc = self._library("pyarrow.ipc")
        with self.path.open("rb") as file:
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        return ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)

    def _batches(self) -> Iterator[Any]:
        with self._mapped() as mapped:
            reader = self._reader(mapped)
            numbered = hasattr(reader, "num_record_batches")
            batches = map(reader.get_batch, range(reader.num_record_batches)) if numbered else iter(reader)
            for number, batch in enumerate(batches, start=1):
                # A stream is read sequentially; a file is not, but its batches are of similar size.
                done = self.disk_bytes * number // reader.num_record_batches if numbered else mapped.tell()
                self._position = done
                for at in range(0, batch.num_rows, _BATCH_ROWS):
                    yield batch.slice(at, _BATCH_ROWS)


def _document(names: Sequence[str], cells: Sequence[Any], keys: tuple[str, ...]) -> Document | BadDocument:
    """Return the document of a row: a column for each key whatever its name, or those of a dialogue by their names."""
    if keys == (MESSAGES,):
        cells = [_without_nulls(cell) for cell in cells]
    return document_of(dict(zip(keys if len(keys) == len(names) else names, cells, strict=True)), keys)


def _without_nulls(value: Any) -> Any:
    """Return the value of a column without what other rows have: the keys of a struct are those of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _text_columns(path: Path, schema: Any, options: SourceOptions) -> list[str]:
    """Return the names of the text columns. Raises DataError if one holds neither text nor lists of text."""
    types = import_for(f"{path}: reading it", "pyarrow.types", "data")
    names = [schema.names[at] for at in choose_columns(path, schema.names, len(schema.names), options)]
    for name in names:
        if (count := schema.names.count(name)) > 1:
            raise DataError(
                f"{path}: {count} columns are called {name}; rename all but one, or give another as --text-column"
            )
        kind = schema.field(name).type
        is_list = types.is_list(kind) or types.is_large_list(kind)
        inner = kind.value_type if is_list or types.is_dictionary(kind) else kind
        if is_list and (types.is_struct(inner) or types.is_list(inner)):  # messages, of which each row tells
            continue
        if types.is_null(kind) and options.keys == (MESSAGES,):  # such as tools, of which no row has any
            continue
        if not (types.is_string(inner) or types.is_large_string(inner) or _is_string_view(types, inner)):
            raise DataError(f"{path}: column {name} holds {kind}, not text; give another as --text-column")
    return names


def _is_string_view(types: Any, kind: Any) -> bool:
    return hasattr(types, "is_string_view") and bool(types.is_string_view(kind))


@dataclass(frozen=True)
class CsvPreview:
    """First rows of a csv, and its delimiter."""

    delimiter: str
    rows: list[list[str]]

    @cached_property
    def names(self) -> list[str]:
        """Return the cells of the first row, which may be a header."""
        return [cell.strip() for cell in self.rows[0]]


def preview_csv(file: TextFile, delimiter: str | None) -> CsvPreview:
    """Read the beginning of a csv. Raises DataError if it has no row, or its structure breaks there."""
    beginning = file.beginning(_PREVIEW_BYTES)
    text = beginning.decode(errors="replace")
    if not text.strip():
        raise DataError(f"{file.path}: the file is empty")
    found = delimiter or _delimiter(file, text)
    reader = csv.reader(_lines_of(text), delimiter=found)
    every: list[list[str]] = []
    try:
        for row in reader:
            every.append(row)
    except csv.Error as error:
        raise _broken(file, len(every) + 1, reader.line_num, error) from error
    rows = [row for row in every if row]
    # The last row may be truncated, unless the whole file has been read.
    whole = rows[:-1] if len(beginning) == _PREVIEW_BYTES and len(rows) > 1 else rows
    return CsvPreview(found, whole[:_PREVIEW_ROWS])


def has_header(preview: CsvPreview, others: Sequence[CsvPreview], wanted: Sequence[str]) -> bool | None:
    """Return whether the first row of a csv is a header; None if undecided.

    The other csv files of the command help to decide, and the `wanted` names of columns.
    """
    first = preview.names
    if set(first) & set(wanted):
        return True
    if not _can_be_names(first):
        return False
    rows = [other.names for other in others]
    sharing = 1 + rows.count(first)
    are_identifiers = all(_IDENTIFIER.fullmatch(name) for name in first if name)
    if sharing > 1 and (are_identifiers or 2 * sharing > 1 + len(rows)):
        return True
    # Files of one command mostly share a header, so a different one is evidence against this row.
    is_contradicted = any(row != first and _can_be_names(row) for row in rows)
    if not _differs_from_rows(first, preview):
        return None if are_identifiers and not is_contradicted else False
    if is_contradicted:
        return None if are_identifiers else False
    return True if are_identifiers or len(first) > 1 else None


def _can_be_names(row: list[str]) -> bool:
    names = row[1:] if not row[0] and len(row) > 1 else row  # pandas leaves the name of its index empty
    return len(set(names)) == len(names) and all(_NAME.fullmatch(name) for name in names)


def _differs_from_rows(first: list[str], preview: CsvPreview) -> bool:
    """Return whether the texts below one of the names are longer, or all numbers."""
    rest = [row for row in preview.rows[1:] if len(row) == len(first)]
    return bool(rest) and any(
        sorted(map(len, column))[len(column) // 2] > 2 * len(name) or all(_is_number(cell) for cell in column)
        for name, column in zip(first, zip(*rest, strict=True), strict=True)
        if name
    )


class CsvSource(RowSource):
    """Csv file with the text in one column for each key."""

    def __init__(self, file: TextFile, preview: CsvPreview, options: SourceOptions, *, header: bool) -> None:
        """Choose the columns. Raises DataError if one is missing."""
        super().__init__(file.path, file.limits)
        names = [name.strip() for name in preview.rows[0]] if header else None
        self._keys = options.keys
        self._width = len(preview.rows[0])
        self._columns = choose_columns(file.path, names, self._width, options)
        self._file, self._header, self._delimiter = file, header, preview.delimiter
        self._names = [(names[at] if names else "") or f"column {at + 1}" for at in self._columns]
        first = "" if header else f", no header (its first row is {preview.rows[0][self._columns[0]][:30]!r})"
        self.about = f"csv, {file.about}, text from {', '.join(self._names)}{first}"

    def _rows(self) -> Iterator[Row]:
        lines = _LineReader(self._file)
        # A global of the csv module; this is the only reader in the process.
        csv.field_size_limit(self._file.limits.max_document_bytes)
        reader = csv.reader(lines, delimiter=self._delimiter)
        number = 0
        try:
            for cells in reader:
                number += 1
                if lines.ended or len(lines.of_row) > 1:
                    self._require_closed_quotes(cells, lines, number, reader.line_num)
                lines.of_row.clear()
                if number == 1 and self._header:
                    continue
                if not cells:
                    continue  # a blank line
                content = self._document(cells)
                yield Row(content, utf8_size(content), number, lines.disk)
        except csv.Error as error:
            raise _broken(self._file, number + 1, reader.line_num, error) from error

    def _require_closed_quotes(self, cells: list[str], lines: _LineReader, number: int, line: int) -> None:
        """Raise DataError if a row, which ends in `line`, has an open quote at the end of the file or inside.

        Only rows of several lines are checked inside, where an open quote ends at the next quote of a later row: in one
        line, text behind a closing quote does no harm.
        """
        remedy = "write a text with quotes in quotes, and its own quotes doubled"
        if lines.ended:
            begin = line - cells[-1].count("\n") + cells[-1].endswith("\n")
            raise DataError(
                f"{self.path}, row {number} (line {begin}): the file ends within the quotes of the cell "
                f"{cells[-1][:_SHOWN]!r}, so it is cut short, or the quote belongs to the text; {remedy}"
            )
        try:
            next(csv.reader(lines.of_row, delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise DataError(
                f"{self.path}, row {number} (lines {line - len(lines.of_row) + 1} to {line}): text follows a closing "
                f"quote, so the quote that opens the cell may belong to the text; {remedy}"
            ) from error

    def _document(self, cells: list[str]) -> Document | BadDocument:
        if len(cells) != self._width:
            more = "; are quotes missing around a text?" if len(cells) > self._width else ""
            return BadDocument(f"it has {len(cells)} cells, the first row {self._width}{more}")
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            return BadDocument(f"a byte is not valid {self._file.encoding.plain_name} (--encoding sets another)")
        chosen: Document = [cells[at] for at in self._columns]
        if len(chosen) == len(self._keys) and self._keys != (MESSAGES,):
            return chosen
        return _document(self._names, chosen, self._keys)


class _LineReader:
    """Iterator over the lines of a text file, with line breaks; undecodable bytes become lone surrogates.

    Attributes:
        of_row: lines since the caller cleared them, those of one row.
        ended: whether a line was asked for after the last one; a row that comes then has an open quote.
    """

    def __init__(self, file: TextFile) -> None:
        self._file = file
        self.disk = 0
        self.of_row: list[str] = []
        self.ended = False

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
                self.of_row.append(line + "\n")
                yield self.of_row[-1]
        rest += decoder.decode(b"", final=True)
        if rest:
            self.of_row.append(rest)
            yield rest
        self.ended = True


def _broken(file: TextFile, row: int, line: int, error: csv.Error) -> DataError:
    """Return the error about a csv whose structure breaks in a row, from the error of the csv module."""
    limit = file.limits.max_document_bytes
    reason = str(error)
    if "limit" in reason:
        reason += f"; an unclosed quote, or a cell over {limit} bytes (--max-document-bytes)"
    elif "new-line" in reason:  # whose remedy, an argument of `open`, is not the user's
        reason = (
            "a carriage return stands outside quotes; put its cell into quotes, or, where it ends a line, write line "
            "feeds: tr '\\r' '\\n' < FILE"
        )
    return DataError(f"{file.path}, row {row} (line {line}): {reason}")


def _delimiter(file: TextFile, text: str) -> str:
    """Return the delimiter by which most rows have the same number of cells, above one; the comma if none does."""
    if ".tsv" in [suffix.lower() for suffix in file.path.suffixes]:
        return "\t"
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        try:
            rows = [row for row in csv.reader(_lines_of(text)[:_PREVIEW_LINES], delimiter=delimiter) if row]
        except csv.Error:  # such as a line break in a cell that only another delimiter parts from its neighbours
            continue
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
