"""Text files as chunks that hold whole documents, and chunks as documents.

One process reads chunks in order and needs only to find where documents end; any process turns a chunk into
documents. So memory does not grow with the file, and the order does not depend on who works on what.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.errors import DataError

JSONL, TXT = "jsonl", "txt"
END_OF_TEXT_SEPARATOR = "<|endoftext|>"
_FORMAT_OF_ENDING = {".jsonl": JSONL, ".json": JSONL, ".ndjson": JSONL, ".txt": TXT, ".text": TXT}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """A part of a file that ends where a document ends.

    Attributes:
        data: bytes; the separator after the last document is part of it, except at the end of the file.
        is_first: whether it is the beginning of the file.
    """

    data: bytes
    is_first: bool


class BadDocumentError(Exception):
    """A document that cannot be read, with its number in the chunk, counted from 0."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number, self.reason = number, reason


def format_of(path: Path) -> str | None:
    """`jsonl` or `txt` by the ending of the file name, or by the first character; None if neither fits."""
    known = _FORMAT_OF_ENDING.get(path.suffix.lower())
    if known is not None:
        return known
    with path.open("rb") as file:
        beginning = file.read(1024).removeprefix(_BYTE_ORDER_MARK).lstrip()
    return JSONL if beginning.startswith(b"{") else None


def find_separator(path: Path) -> str | None:
    """What separates the documents of a text file: `<|endoftext|>` if it occurs, else blank lines, else nothing."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for separator in (END_OF_TEXT_SEPARATOR, "\n\n", "\r\n\r\n"):
            if content.find(separator.encode()) >= 0:
                return separator
    return None


def read_chunks(path: Path, separator: bytes | None, *, chunk_bytes: int, max_document_bytes: int) -> Iterator[Chunk]:
    """Chunks of about `chunk_bytes`, more where a document is longer.

    Args:
        path: file to read.
        separator: ends a document; None makes the file one document.
        chunk_bytes: how much is read at once.
        max_document_bytes: the longest document that is taken into memory.

    Raises:
        DataError: a document is too long, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            rest = bytearray(file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK))
            begins, is_first = file.tell() - len(rest), True
            while block := file.read(chunk_bytes):
                # A separator may lie across the border of two blocks.
                seen = max(0, len(rest) - len(separator) + 1) if separator else 0
                rest += block
                end = rest.rfind(separator, seen) if separator else -1
                if end >= 0:
                    assert separator is not None
                    end += len(separator)
                    yield Chunk(bytes(rest[:end]), is_first)
                    del rest[:end]
                    begins, is_first = begins + end, False
                if len(rest) > max_document_bytes:
                    raise DataError(_too_long(path, separator, begins, max_document_bytes))
            if rest:
                yield Chunk(bytes(rest), is_first)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _too_long(path: Path, separator: bytes | None, begins: int, limit: int) -> str:
    if separator == b"\n":
        return f"{path}: the line that begins at byte {begins} is longer than {limit} bytes (--max-document-bytes)"
    kind = f"no {separator.decode()!r} ends" if separator else "nothing separates"
    return (
        f"{path}: {kind} the document that begins at byte {begins} within {limit} bytes (--max-document-bytes); "
        f"name what separates the documents of this file with --document-separator, such as '\\n'"
    )


def json_documents(chunk: Chunk, keys: tuple[str, ...]) -> Iterator[tuple[int, list[list[str]]]]:
    """Documents of a chunk of JSON lines.

    Yields:
        The number of the line in the chunk, and for each key the texts of the document: one, or several where the
        value is a list. Blank lines are passed over.

    Raises:
        BadDocumentError: a line is not a JSON object with text under every key.
    """
    for number, line in enumerate(chunk.data.split(b"\n")):
        if line.strip():
            yield number, _texts_of(number, line, keys)


def _texts_of(number: int, line: bytes, keys: tuple[str, ...]) -> list[list[str]]:
    try:
        document = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadDocumentError(number, f"byte {error.start} of the line is no UTF-8") from error
    except RecursionError as error:
        raise BadDocumentError(number, "the JSON is nested too deeply") from error
    except ValueError as error:
        hint = "; it looks like a JSON array, give one object per line" if line.lstrip().startswith(b"[") else ""
        raise BadDocumentError(number, f"no JSON: {error}{hint}") from error
    if not isinstance(document, dict):
        kind = "an array: give one object per line" if isinstance(document, list) else f"a {type(document).__name__}"
        raise BadDocumentError(number, f"expected a JSON object, found {kind}")
    return [_text_of(number, document, key) for key in keys]


def _text_of(number: int, document: dict[str, Any], key: str) -> list[str]:
    if key not in document:
        found = ", ".join(json.dumps(name) for name in document) or "none"
        raise BadDocumentError(number, f"no key {json.dumps(key)}; its keys are {found} (--json-keys names the text)")
    value = document[key]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise BadDocumentError(number, f"the value of {json.dumps(key)} is not text but {json.dumps(value)[:60]}")
    return texts


def text_documents(chunk: Chunk, separator: str | None) -> Iterator[tuple[int, list[list[str]]]]:
    """Documents of a chunk of text, as `json_documents` yields them.

    Line breaks next to a separator belong to neither document, and documents without a visible character are left
    out. A file without any separator is one document as it stands.

    Raises:
        BadDocumentError: the chunk is no UTF-8; the number is that of the document.
    """
    try:
        text = chunk.data.decode()
    except UnicodeDecodeError as error:
        before = chunk.data[: error.start]
        number = before.count(separator.encode()) if separator else 0
        raise BadDocumentError(number, f"byte 0x{chunk.data[error.start]:02x} is no UTF-8") from error
    parts = text.split(separator) if separator else [text]
    alone = chunk.is_first and len(parts) == 1
    for number, part in enumerate(parts):
        document = part if alone else part.strip("\r\n")
        if document.strip():
            yield number, [[document]]


def count_documents(chunk: Chunk, separator: bytes | None) -> int:
    """Lines, or documents of a text, that end in this chunk."""
    if separator is None:
        return 1
    return chunk.data.count(separator) + (not chunk.data.endswith(separator))
