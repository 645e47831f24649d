"""parquet files and Arrow files (those of Hugging Face datasets), read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalith.data.sources.columns import choose_columns
from megalith.data.sources.documents import BadDocument, Document, text_of
from megalith.data.sources.extras import import_for
from megalith.data.sources.protocol import Chunk, SourceOptions
from megalith.data.sources.rows import Row, chunks_of, size_of
from megalith.errors import DataError

_ROWS_AT_ONCE = 512
_ARROW_FILE = b"ARROW1"


class ParquetSource:
    """A parquet file of which one column, or one for each key, has the text."""

    unit = "row"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Read the schema and choose the columns.

        Raises:  DataError if the file is damaged or has no such columns of text.
        """
        self.path, self.disk_bytes = path, path.stat().st_size
        self._options = options
        with self._open() as file:
            schema = file.schema_arrow
            self._num_rows = file.metadata.num_rows
        self._names = _text_columns(path, schema, options)
        self.about = f"parquet, {self._num_rows} rows, text from {', '.join(self._names)}"

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        return chunks_of(_rows(self._batches(), self._keys(), self._disk_after), self._options.limits, start)

    def units_before(self, start: int) -> int | None:
        return start

    def _keys(self) -> tuple[str, ...]:
        return self._options.keys

    def _disk_after(self, rows: int) -> int:
        return self.disk_bytes * rows // max(1, self._num_rows)

    def _open(self) -> Any:
        parquet = import_for(self.path, "pyarrow.parquet")
        try:
            return parquet.ParquetFile(self.path, memory_map=True, pre_buffer=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the parquet file is cut short or damaged: {error}") from error

    def _batches(self) -> Iterator[list[list[Any]]]:
        with self._open() as file:
            try:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=self._names, use_threads=False):
                    yield [batch.column(name).to_pylist() for name in self._names]
            except (OSError, ValueError) as error:
                raise DataError(f"{self.path}: the parquet file is damaged: {error}") from error


class ArrowSource:
    """An Arrow file, as `save_to_disk` and the cache of Hugging Face's datasets write it (a stream), or Feather."""

    unit = "row"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Read the schema and choose the columns.

        Raises:  DataError if the file is damaged or has no such columns of text.
        """
        self.path, self.disk_bytes = path, path.stat().st_size
        self._options = options
        with self._mapped() as mapped:
            self._names = _text_columns(path, self._reader(mapped).schema, options)
        self.about = f"arrow, text from {', '.join(self._names)}"
        self._position = 0

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        return chunks_of(
            _rows(self._batches(), self._options.keys, lambda rows: self._position), self._options.limits, start
        )

    def units_before(self, start: int) -> int | None:
        return start

    def _mapped(self) -> Any:
        return import_for(self.path, "pyarrow").memory_map(str(self.path))

    def _reader(self, mapped: Any) -> Any:
        ipc = import_for(self.path, "pyarrow.ipc")
        with self.path.open("rb") as file:
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        try:
            return ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the arrow file is cut short or damaged: {error}") from error

    def _batches(self) -> Iterator[list[list[Any]]]:
        with self._mapped() as mapped:
            reader = self._reader(mapped)
            numbered = hasattr(reader, "num_record_batches")
            try:
                batches = map(reader.get_batch, range(reader.num_record_batches)) if numbered else iter(reader)
                for number, batch in enumerate(batches, start=1):
                    # A stream is read from front to back; a file is not, and its batches are about alike.
                    done = self.disk_bytes * number // reader.num_record_batches if numbered else mapped.tell()
                    self._position = done
                    for at in range(0, batch.num_rows, _ROWS_AT_ONCE):
                        part = batch.slice(at, _ROWS_AT_ONCE)
                        yield [part.column(name).to_pylist() for name in self._names]
            except (OSError, ValueError) as error:
                raise DataError(f"{self.path}: the arrow file is cut short or damaged: {error}") from error


def _rows(batches: Iterator[list[list[Any]]], keys: tuple[str, ...], disk_after: Any) -> Iterator[Row]:
    number = 0
    for columns in batches:
        for cells in zip(*columns, strict=True):
            number += 1
            content = _document(cells, keys)
            yield Row(content, size_of(content), number, disk_after(number))


def _document(cells: tuple[Any, ...], keys: tuple[str, ...]) -> Document | BadDocument:
    texts: Document = []
    for cell, key in zip(cells, keys, strict=True):
        text = text_of(cell, key)
        if isinstance(text, BadDocument):
            return text
        texts.append(text)
    return texts


def _text_columns(path: Path, schema: Any, options: SourceOptions) -> list[str]:
    """Names of the columns, which hold text or lists of it."""
    types = import_for(path, "pyarrow.types")
    names = [schema.names[at] for at in choose_columns(path, schema.names, len(schema.names), options)]
    for name in names:
        kind = schema.field(name).type
        inner = kind.value_type if types.is_list(kind) or types.is_dictionary(kind) else kind
        if not (types.is_string(inner) or types.is_large_string(inner) or _is_view(types, inner)):
            raise DataError(f"{path}: column {name} is no text but {kind}; name another with --text-column")
    return names


def _is_view(types: Any, kind: Any) -> bool:
    return hasattr(types, "is_string_view") and bool(types.is_string_view(kind))
