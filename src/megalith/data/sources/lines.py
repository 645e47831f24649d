"""Text sources: documents are lines, lie between separators, or are the elements of one JSON array.

An uncompressed UTF-8 file of lines is cut at multiples of `chunk_bytes`: chunk k holds the lines that begin in its
range, and a worker reads them itself, so the text never passes through the parent. Any other file (compressed, in
another encoding, with another separator) is read by the parent, from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from megalith.data.sources.documents import (
    LENIENT_DECODER,
    BadDocument,
    Document,
    count_units,
    element_document,
    json_documents,
    json_texts,
    json_value_documents,
    text_documents,
)
from megalith.data.sources.protocol import Chunk, ChunkDocuments, Limits, Row, RowSource, Source, utf8_size
from megalith.data.sources.streams import TextFile
from megalith.errors import DataError

_STEP = 1 << 14  # bytes read beyond a block, in which its last line usually ends
_NEW_LINE = "\n"
_BETWEEN = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[0-9.eE+\-]*\Z")  # a number at the end of a block may continue in the next


@dataclass(frozen=True)
class TextFormat:
    """Format of a text: lines of JSON, or plain text; without a separator it is one document, or one JSON value."""

    is_json: bool
    separator: str | None
    encoding: str
    limit: int

    @property
    def separator_bytes(self) -> bytes | None:
        return self.separator.encode() if self.separator else None

    def read(self, data: bytes, keys: tuple[str, ...], *, alone: bool, too_long: str | None = None) -> ChunkDocuments:
        """Parse the documents of a text; `too_long` adds one more, unreadable for this reason."""
        documents: Iterator[tuple[int, Document | BadDocument]]
        texts = None
        if self.is_json and not self.separator and (whole := json_value_documents(data, keys)) is not None:
            return ChunkDocuments(((0, document) for document in whole), 1, len(data))
        if self.is_json:
            lines = data.split(b"\n")
            if not lines[-1]:
                lines.pop()
            units = len(lines) if self.separator else 1
            if too_long is None and len(data) <= self.limit:
                texts = partial(json_texts, lines, keys)
            documents = json_documents(lines, keys, self.encoding, self.limit)
        else:
            units = count_units(data, self.separator_bytes) if data else 0
            documents = text_documents(data, self.separator, alone=alone, encoding=self.encoding, limit=self.limit)
        if too_long is not None:
            documents = chain(documents, [(units, BadDocument(too_long))])
        return ChunkDocuments(documents, units + (too_long is not None), len(data), texts)


@dataclass(frozen=True)
class TextPayload:
    """Whole documents of a text, sent to a worker with the separators after them.

    Attributes:
        alone: whether this is the whole file.
        too_long: why one more document after them is left out.
    """

    form: TextFormat
    data: bytes
    alone: bool
    too_long: str | None = None

    @property
    def num_units(self) -> int:
        return (count_units(self.data, self.form.separator_bytes) if self.data else 0) + (self.too_long is not None)

    def read(self, keys: tuple[str, ...]) -> ChunkDocuments:
        return self.form.read(self.data, keys, alone=self.alone, too_long=self.too_long)


@dataclass(frozen=True)
class _LinesPayload:
    """Lines of a plain file that begin within [start, stop), which the worker reads from the file."""

    form: TextFormat
    path: str
    start: int
    stop: int
    bom_size: int

    def read(self, keys: tuple[str, ...]) -> ChunkDocuments:
        """Read the lines. Raises DataError if the file cannot be read."""
        try:
            data, too_long = self._lines()
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return self.form.read(data, keys, alone=False, too_long=too_long)

    def _lines(self) -> tuple[bytes, str | None]:
        """Return the lines, and why the last one is left out if it is."""
        with open(self.path, "rb") as file:
            base = self.start - 1 if self.start else 0  # a line begins at `start` if a line break precedes it
            file.seek(base)
            data = file.read(self.stop - base + _STEP)
            first = (data.find(b"\n") + 1 or len(data)) if self.start else self.bom_size
            last = self.stop - base - 1
            if self.start and first > last:
                return b"", None
            end = data.find(b"\n", last) + 1
            if end or len(data) < self.stop - base + _STEP:
                return data[first : end or len(data)], None
            begins = max(first, data.rfind(b"\n", 0, last) + 1)
            whole = bytearray(memoryview(data)[first:])
            while block := file.read(_STEP):
                end = block.find(b"\n") + 1
                whole += block[: end or len(block)]
                if end:
                    break
                if file.tell() - base - begins > self.form.limit:
                    return data[first:begins], _too_long_line(base + begins, self.form.limit)
            return bytes(whole), None


def _too_long_line(begins: int, limit: int) -> str:
    return f"the line that begins at byte {begins} is longer than {limit} bytes (--max-document-bytes)"


class TextSource(Source):
    """Text file: jsonl or txt."""

    def __init__(self, file: TextFile, *, is_json: bool, separator: str | None) -> None:
        super().__init__(file.path, file.limits)
        self.unit = "line" if is_json else "document"
        self._file = file
        self._form = TextFormat(is_json, separator, file.encoding.plain_name, file.limits.max_document_bytes)
        self.about = f"{'jsonl' if is_json else _describe_format(separator)}, {file.about}"

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        if self._file.is_plain and self._form.separator == _NEW_LINE:
            return self._chunks_by_offset(start)
        return self._chunks_from_start(start)

    def units_before(self, start: int) -> int | None:
        """Count the lines that begin before a byte of a plain file; None for other files."""
        if not start:
            return 0
        if not (self._file.is_plain and self._form.separator == _NEW_LINE):
            return None
        lines, position = 1, 0
        with self.path.open("rb") as file:
            while position < start - 1 and (block := file.read(min(1 << 20, start - 1 - position))):
                lines += block.count(b"\n")
                position += len(block)
        return lines

    def _chunks_by_offset(self, start: int) -> Iterator[Chunk]:
        size, step = self.disk_bytes, self._limits.chunk_bytes
        for begin in range(start, size, step):
            end = min(begin + step, size)
            payload = _LinesPayload(self._form, str(self.path), begin, end, self._file.encoding.bom_size)
            yield Chunk(payload, begin, end, begin, end, None)

    def _chunks_from_start(self, start: int) -> Iterator[Chunk]:
        """Yield chunks by reading from the beginning; positions count bytes of the text."""
        disk_start = 0
        for begin, end, disk, text in split_at_separators(self._file.blocks(), self._form, self._limits, self.path):
            if end > start:
                yield Chunk(text, begin, end, disk_start, disk, text.num_units)
            disk_start = disk


def _describe_format(separator: str | None) -> str:
    return "txt, the whole file is one document" if separator is None else f"txt, separated by {separator!r}"


def split_at_separators(
    blocks: Iterator[tuple[bytes, int]], form: TextFormat, limits: Limits, name: object
) -> Iterator[tuple[int, int, int, TextPayload]]:
    """Cut a text after the last separator of each block, skipping documents beyond the limit.

    Yields where a part begins and ends in the text, the bytes of the file read so far, and the part. A separator that
    can overlap itself, such as '----', is searched from the left, as splitting does.
    """
    word = form.separator_bytes
    last_end = _last_end_from_left if word and _overlaps(word) else _last_end
    rest, position, disk, skipping = bytearray(), 0, 0, -1
    for block, disk in _chunk_sized(blocks, limits.chunk_bytes):
        seen = max(0, len(rest) - len(word) + 1) if word else 0  # a separator may lie across the border of two blocks
        rest += block
        if skipping >= 0:
            assert word is not None
            found = rest.find(word)
            if found < 0:
                keep = len(word) - 1
                position += len(rest) - keep
                del rest[: len(rest) - keep]
                continue
            end = found + len(word)
            yield skipping, position + end, disk, TextPayload(form, b"", False, _too_long(word, skipping, limits))
            del rest[:end]
            position, skipping, seen = position + end, -1, 0
        end = last_end(rest, word, seen) if word else 0
        if end:
            yield position, position + end, disk, TextPayload(form, bytes(rest[:end]), False)
            del rest[:end]
            position += end
        if len(rest) > limits.max_document_bytes:
            if word is None:
                raise DataError(f"{name}: {_too_long(None, position, limits)}")
            skipping = position
    end = position + len(rest)
    if skipping >= 0:
        yield skipping, end, disk, TextPayload(form, b"", False, _too_long(word, skipping, limits))
    elif rest:
        yield position, end, disk, TextPayload(form, bytes(rest), position == 0)


def _chunk_sized(blocks: Iterator[tuple[bytes, int]], size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the blocks of a text, regrouped to about the size of a chunk."""
    gathered = bytearray()
    disk = 0
    for block, disk in blocks:
        for at in range(0, len(block), size):
            gathered += block[at : at + size]
            if len(gathered) >= size:
                yield bytes(gathered), disk
                gathered.clear()
    if gathered:
        yield bytes(gathered), disk


def _overlaps(word: bytes) -> bool:
    """Return whether occurrences can share bytes in a way that matters: not in blank lines, which are stripped."""
    if not word.strip(b"\r\n"):
        return False
    return any(word.startswith(word[at:]) for at in range(1, len(word)))


def _last_end(text: bytearray, word: bytes, seen: int) -> int:
    found = text.rfind(word, seen)
    return found + len(word) if found >= 0 else 0


def _last_end_from_left(text: bytearray, word: bytes, seen: int) -> int:
    end = 0
    for match in re.finditer(re.escape(word), text):
        end = match.end()
    return end


def _too_long(word: bytes | None, begins: int, limits: Limits) -> str:
    if word == b"\n":
        return _too_long_line(begins, limits.max_document_bytes)
    kind = f"no {word.decode()!r} ends" if word else "nothing separates"
    return (
        f"{kind} the document that begins at byte {begins} within {limits.max_document_bytes} bytes "
        "(--max-document-bytes); raise the limit, or give the separator of the documents with --document-separator, "
        "such as '\\n', in place of --one-document-per-file"
    )


class ArraySource(RowSource):
    """File with one JSON array, whose elements are objects or texts."""

    unit = "element"

    def __init__(self, file: TextFile, keys: tuple[str, ...]) -> None:
        super().__init__(file.path, file.limits)
        self.about = f"one JSON array, {file.about}"
        self._file, self._keys = file, keys

    def _rows(self) -> Iterator[Row]:
        for number, (element, size, disk) in enumerate(self._elements(), start=1):
            content = element_document(element, self._keys)
            yield Row(content, max(size, utf8_size(content)), number, disk)

    def _elements(self) -> Iterator[tuple[Any, int, int]]:
        """Yield each element, its size in characters, and the bytes of the file read so far.

        Raises:  DataError where the JSON breaks: elements after that cannot be told apart.
        """
        blocks = self._file.texts()
        number, text, at, disk, wanted = 0, "", 0, 0, 1
        expected, trouble = "[", "the file ends within the array: it is cut short"
        while True:
            more: list[str] = []
            # An incomplete element is parsed again with twice as much text, so that reparsing stays cheap.
            while sum(map(len, more)) < wanted and (block := next(blocks, None)):
                more.append(block[0])
                disk = block[1]
            if not more:
                raise self._broken(number, trouble)
            text, at, wanted = text[at:] + "".join(more), 0, 1
            while (at := _skip_separators(text, at)) < len(text):
                if expected in ("[", ",]"):
                    if text[at] not in expected:
                        raise self._broken(number, f"expected {' or '.join(expected)}, found {text[at : at + 20]!r}")
                    if text[at] == "]":
                        self._require_end(text[at + 1 :], blocks, number)
                        return
                    at, expected = at + 1, "element"
                    continue
                if text[at] == "]" and number == 0:
                    return
                try:
                    element, end = LENIENT_DECODER.raw_decode(text, at)
                except RecursionError:
                    raise self._broken(number, "it is nested too deeply") from None
                except ValueError as error:
                    element, end, trouble = None, -1, f"{error} (or the file is cut short)"
                if end < 0 or (end == len(text) and _NUMBER.match(text, at)):
                    wanted = len(text) - at
                    if wanted > self._file.limits.max_document_bytes:
                        raise self._broken(number, f"{trouble}, or longer than --max-document-bytes")
                    break
                number += 1
                yield element, end - at, disk
                at, expected = end, ",]"

    def _require_end(self, text: str, blocks: Iterator[tuple[str, int]], number: int) -> None:
        while not text.strip() and (block := next(blocks, None)):
            text = block[0]
        if text.strip():
            raise self._broken(number, f"after the array comes {text.strip()[:20]!r}")

    def _broken(self, number: int, reason: str) -> DataError:
        return DataError(f"{self.path}, element {number + 1} of the JSON array: {reason}")


def _skip_separators(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None
    return match.end()
