"""Collect the documents that the quickstart trains on, from Python's standard library or from the user's files.

Documents are deduplicated and sorted by hash. The order is the same in every run, and the splits, which are ranges of
documents, each sample all files.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.sources import END_OF_TEXT_SEPARATOR, JSONL, BadDocument, Limits, SourceOptions, find_sources
from megalith.data.sources.formats import format_by_name
from megalith.data.sources.streams import open_text
from megalith.errors import DataError

MAX_CHARACTERS = 1 << 26  # of the corpus and of each plain text file; a run of minutes trains on fewer
# A document of a text without <|endoftext|>: up to the end of a paragraph, or else of a line, or of any length.
PIECE = re.compile(r"(.{4000,8000}?)\n\n|(.{4000,8000}?)\n|(.{1,4000})", re.DOTALL)
MIN_DOCUMENT = 32  # characters; shorter files, such as an empty __init__.py, are left out
MIN_DOCUMENTS, MIN_CHARACTERS = 26, 20_000  # with fewer, a split of --split 94,4,2 has no document or no sample
# Installed packages, tests, character tables and the manual of the interactive help.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and the name to show for them."""

    name: str
    documents: tuple[str, ...]
    num_characters: int


def standard_library(root: Path | None = None) -> Corpus:
    """Read the source code of this Python's standard library, without its tests."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return build_corpus(f"Python {sysconfig.get_python_version()}'s library", str(root), texts)


def user_texts(paths: Sequence[Path], json_key: str = "text", encoding: str = "auto") -> Corpus:
    """Read the user's files, which may be compressed."""
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    texts = (text for path in paths for text in read_documents(path, json_key, encoding))
    return build_corpus(name, f"--data {' '.join(map(str, paths))}", texts)


def read_documents(path: Path, json_key: str, encoding: str = "auto") -> Iterator[str]:
    """Yield the documents of one file: of JSON if its name says so, else of plain text.

    Raises:  DataError if the file or one of its lines cannot be read.
    """
    if format_by_name(path) != JSONL:
        text = ""
        for block, _ in open_text(path, encoding, Limits()).texts():
            text += block
            if len(text) >= MAX_CHARACTERS:
                break
        yield from split_text(text.replace("\r\n", "\n"))
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


def split_text(text: str) -> Iterator[str]:
    """Cut a plain text into documents: at <|endoftext|>, or else after paragraphs, lines, or anywhere."""
    if END_OF_TEXT_SEPARATOR in text:
        yield from (part.strip("\n") for part in text.split(END_OF_TEXT_SEPARATOR))
    else:
        yield from (piece[piece.lastindex or 0] for piece in PIECE.finditer(text))


def build_corpus(name: str, origin: str, texts: Iterable[str]) -> Corpus:
    """Drop duplicates and very short texts, stop at MAX_CHARACTERS and sort by hash.

    Raises:  DataError that names `origin` if too little text remains to train on.
    """
    by_hash: dict[bytes, str] = {}
    size = 0
    for raw in texts:
        text = raw.encode("utf-8", "replace").decode()  # JSON may hold unpaired surrogates
        if len(text.strip()) < MIN_DOCUMENT:
            continue
        if size + len(text) > MAX_CHARACTERS:
            break
        if by_hash.setdefault(hashlib.sha256(text.encode()).digest(), text) is text:
            size += len(text)
    if len(by_hash) < MIN_DOCUMENTS or size < MIN_CHARACTERS:
        raise DataError(
            f"{origin}: {len(by_hash)} different documents with {size:,} characters are too little to train on; "
            f"give at least {MIN_DOCUMENTS} with {MIN_CHARACTERS:,} by --data FILE... (.jsonl or .txt)"
        )
    return Corpus(name, tuple(by_hash[key] for key in sorted(by_hash)), size)
