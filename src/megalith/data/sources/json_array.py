"""A file that is one JSON array of objects, taken apart element by element in bounded memory."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

from megalith.data.sources.documents import PATIENT, BadDocument, Document, document_of
from megalith.data.sources.protocol import Chunk
from megalith.data.sources.rows import Row, chunks_of, size_of
from megalith.data.sources.streams import TextFile
from megalith.errors import DataError

_BETWEEN = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[0-9.eE+\-]*\Z")  # one at the end of a block may go on in the next


class ArraySource:
    """One JSON array; its elements are objects, or the texts themselves."""

    unit = "element"

    def __init__(self, file: TextFile, keys: tuple[str, ...]) -> None:
        self.path = file.path
        self.disk_bytes = file.path.stat().st_size
        self.about = f"one JSON array, {file.about}"
        self._file, self._keys = file, keys

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        return chunks_of(self._rows(), self._file.limits, start)

    def units_before(self, start: int) -> int | None:
        return None

    def _rows(self) -> Iterator[Row]:
        for number, (element, size, disk) in enumerate(self._elements(), start=1):
            content = self._document(element)
            yield Row(content, max(size, size_of(content)), number, disk)

    def _document(self, element: Any) -> Document | BadDocument:
        if isinstance(element, str) and len(self._keys) == 1:
            return [element]
        if isinstance(element, dict):
            return document_of(element, self._keys)
        return BadDocument(f"expected a JSON object or a text, found {type(element).__name__}")

    def _elements(self) -> Iterator[tuple[Any, int, int]]:
        """Each element, its size in characters, and the bytes of the file read so far.

        Raises:  DataError where the JSON breaks: nothing after such a place can be told apart.
        """
        blocks = self._texts()
        number, text, at, disk, wanted = 0, "", 0, 0, 1
        expected, trouble = "[", "the file ends within the array: it is cut short"
        while True:
            more: list[str] = []
            # An element that did not end is tried again with twice as much, so that parsing it anew stays cheap.
            while sum(map(len, more)) < wanted and (block := next(blocks, None)):
                more.append(block[0])
                disk = block[1]
            if not more:
                raise self._broken(number, trouble)
            text, at, wanted = text[at:] + "".join(more), 0, 1
            while (at := _past(text, at)) < len(text):
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
                    element, end = PATIENT.raw_decode(text, at)
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

    def _texts(self) -> Iterator[tuple[str, int]]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for block, disk in self._file.blocks():
                yield decoder.decode(block), disk
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: a text of the array is no {self._file.encoding.plain_name}") from error

    def _require_end(self, text: str, blocks: Iterator[tuple[str, int]], number: int) -> None:
        while not text.strip() and (block := next(blocks, None)):
            text = block[0]
        if text.strip():
            raise self._broken(number, f"after the array comes {text.strip()[:20]!r}")

    def _broken(self, number: int, reason: str) -> DataError:
        return DataError(f"{self.path}, element {number + 1} of the JSON array: {reason}")


def _past(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None
    return match.end()
