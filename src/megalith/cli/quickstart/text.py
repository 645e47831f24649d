"""The text that the quickstart trains on: Python's standard library, or the user's files, as documents.

The same machine gives the same documents in the same order, that of their hashes: the split into training, validation
and test cuts by position, so every split gets a fair sample of all files. No document appears twice.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megalith.data.sources import END_OF_TEXT_SEPARATOR, JSONL, BadDocument, Limits, SourceOptions, find_sources
from megalith.data.sources.formats import format_by_name
from megalith.data.sources.streams import open_text
from megalith.errors import DataError

MOST_CHARACTERS = 1 << 26  # of a corpus, and of one plain text file: more than a run of minutes can train on
PIECE_CHARACTERS = 4000  # a text file without end-of-text marks is cut into documents of about this size
SMALLEST_DOCUMENT = 32  # characters; what is shorter (an empty `__init__.py`) teaches nothing
FEWEST_DOCUMENTS, FEWEST_CHARACTERS = 20, 20_000  # below this, a split has no document or no whole sample
NOT_CODE = frozenset(
    # Installed packages and tests; character tables and the manual of the interactive help, which are data.
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
)


@dataclass(frozen=True)
class Corpus:
    """Documents to train on."""

    name: str
    documents: tuple[str, ...]

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.documents))

    def write(self, path: Path) -> None:
        """Write the documents as `megalith preprocess` reads them, one {"text": ...} a line."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in self.documents)


def standard_library(root: Path | None = None) -> Corpus:
    """Collect the source code of this Python's standard library, without its tests."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not NOT_CODE & set(path.relative_to(root).parts))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return build_corpus(f"Python {sysconfig.get_python_version()}'s library", str(root), texts)


def user_texts(paths: Iterable[Path], json_key: str = "text", encoding: str = "auto") -> Corpus:
    """Read the user's files: JSON by its name, anything else as plain text; compressed or not."""
    paths = tuple(paths)
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    texts = (text for path in paths for text in read_documents(path, json_key, encoding))
    return build_corpus(name, f"--data {' '.join(map(str, paths))}", texts)


def read_documents(path: Path, json_key: str, encoding: str = "auto") -> Iterator[str]:
    """Yield the documents of one file."""
    if format_by_name(path) != JSONL:
        yield from split_text(read_beginning(path, encoding))
        return
    found = find_sources([str(path)], SourceOptions(keys=(json_key,), encoding=encoding))
    if found.violations:
        raise DataError("\n".join(text.replace("--input", "--data") for text in found.violations))
    for source in found.sources:
        units = 1
        for chunk in source.chunks():
            part = chunk.payload.read((json_key,))
            for number, document in part.documents:
                if isinstance(document, BadDocument):
                    reason = document.reason.replace("--json-keys", "--json-key")
                    raise DataError(f"--data {path}, {source.unit} {units + number}: {reason}")
                yield from (text if isinstance(text, str) else " ".join(text) for text in document)
            units += part.num_units


def read_beginning(path: Path, encoding: str) -> str:
    """Read as much of a plain text file as is trained on."""
    file = open_text(path, encoding, Limits())
    try:
        # Not the final call of this decoder: a character that the end of the bytes cuts in two is left out.
        text = codecs.getincrementaldecoder("utf-8")().decode(file.beginning(4 * MOST_CHARACTERS))
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data {path} is not valid {file.encoding.name}: {error}; --encoding names another encoding, such as "
            "gb18030 or cp1252"
        ) from error
    return text[:MOST_CHARACTERS].replace("\r\n", "\n")


def split_text(text: str) -> Iterator[str]:
    """Cut a plain text into documents: at end-of-text marks, or else between paragraphs, lines, or anywhere."""
    if END_OF_TEXT_SEPARATOR in text:
        yield from (part.strip("\n") for part in text.split(END_OF_TEXT_SEPARATOR))
        return
    start = 0
    while start < len(text):
        earliest = start + PIECE_CHARACTERS
        ends = ((text.find(mark, earliest, earliest + PIECE_CHARACTERS), len(mark)) for mark in ("\n\n", "\n"))
        end, skipped = next(((end, length) for end, length in ends if end >= 0), (earliest, 0))
        yield text[start:end]
        start = end + skipped


def build_corpus(name: str, origin: str, texts: Iterable[str]) -> Corpus:
    """Drop repetitions and scraps, stop at the size limit, and order the rest by hash.

    Raises:  DataError naming the `origin` of the texts if they are too few or too short to train on.
    """
    by_hash: dict[bytes, str] = {}
    size = 0
    for raw in texts:
        text = raw.encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs, which are no text
        if len(text.strip()) < SMALLEST_DOCUMENT:
            continue
        if size + len(text) > MOST_CHARACTERS:
            break
        if by_hash.setdefault(hashlib.sha256(text.encode()).digest(), text) is text:
            size += len(text)
    if len(by_hash) < FEWEST_DOCUMENTS or size < FEWEST_CHARACTERS:
        raise DataError(
            f"{origin}: {len(by_hash)} different documents with {size:,} characters are too little to train on: at "
            f"least {FEWEST_DOCUMENTS} documents and {FEWEST_CHARACTERS:,} characters are needed. "
            "Give more text with --data FILE... (.jsonl or .txt)"
        )
    return Corpus(name, tuple(by_hash[key] for key in sorted(by_hash)))
