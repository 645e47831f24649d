"""The text that the quickstart trains on: Python's standard library, or the user's files, as documents.

The same machine gives the same documents in the same order. The order is that of their hashes: the data split cuts by
position, and so every split gets a fair sample of all folders. No document appears twice.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megalith.data.sources.formats import JSONL, format_by_name
from megalith.data.sources.protocol import Limits
from megalith.data.sources.streams import open_text
from megalith.errors import DataError

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 4000
"""A text file without end-of-text marks is cut into documents of about this size, between paragraphs."""

MOST_OF_A_FILE = 1 << 26
"""Characters of a plain text that are read, and of one line of JSON: more than a run of minutes can train on."""

SMALLEST_DOCUMENT = 32
"""Characters. What is shorter (an empty `__init__.py`) teaches nothing."""

FEWEST_DOCUMENTS = 20
FEWEST_CHARACTERS = 20_000
"""Below this, a split has no document or no whole sample."""

NOT_CODE = frozenset(
    # Installed packages and tests; character tables and the manual of the interactive help, which are data.
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
)


@dataclass(frozen=True)
class Corpus:
    """Documents ready for training.

    Attributes:
        name: what they are, for the screen.
        documents: distinct texts.
        num_files: the files they came from.
    """

    name: str
    documents: tuple[str, ...]
    num_files: int

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.documents))


def standard_library(size_limit: int, root: Path | None = None) -> Corpus:
    """Collect the source code of this Python's standard library, without its tests.

    Args:
        size_limit: characters to stop at.
        root: the folder to read instead of this Python's own.

    Raises:
        DataError: there is no source code there (some minimal images ship compiled files only).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not NOT_CODE & set(path.relative_to(root).parts))
    texts = (text for text in map(read_source, files) if text is not None)
    name = f"Python {sysconfig.get_python_version()}'s library"
    try:
        return build_corpus(name, texts, len(files), size_limit)
    except DataError as error:
        raise DataError(f"{root}: {error}") from error


def read_source(path: Path) -> str | None:
    """Read a Python file in the encoding that it declares; None where it cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None


def user_texts(paths: Iterable[Path], size_limit: int, text_key: str = "text", encoding: str = "auto") -> Corpus:
    """Read the user's files: `.jsonl` with one JSON object a line, anything else as plain text; compressed or not.

    Args:
        paths: the files.
        size_limit: characters to stop at.
        text_key: the field of a JSON object that holds the text.
        encoding: of the files; auto to find it out.

    Raises:
        DataError: a file is missing or is not what its name says, or there is too little text.
    """
    paths = tuple(paths)
    texts = (text for path in paths for text in read_documents(path, text_key, encoding))
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return build_corpus(name, texts, len(paths), size_limit)


def read_documents(path: Path, text_key: str, encoding: str = "auto") -> Iterator[str]:
    """Yield the documents of one file."""
    file = open_text(path, encoding, Limits())
    text = codecs.iterdecode((block for block, _ in file.blocks()), "utf-8")
    try:
        if format_by_name(path) == JSONL:
            for number, line in enumerate(_lines(text, path), start=1):
                if line.strip():
                    yield text_of_line(line, text_key, f"{path}, line {number}")
        else:
            yield from split_text(_beginning(text))
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data {path} holds bytes that are no text in {file.encoding.name}: {error}; "
            "--encoding names another encoding, such as gb18030 or cp1252"
        ) from error


def _beginning(text: Iterable[str]) -> str:
    """As much of a text as is taken of one file."""
    parts, size = [], 0
    for part in text:
        parts.append(part)
        size += len(part)
        if size >= MOST_OF_A_FILE:
            break
    return "".join(parts).replace("\r\n", "\n")


def _lines(text: Iterable[str], path: Path) -> Iterator[str]:
    begun: list[str] = []
    for part in text:
        first, *others = part.split("\n")
        begun.append(first)
        if others:
            yield "".join(begun)
            yield from others[:-1]
            begun = [others[-1]]
        elif sum(map(len, begun)) > MOST_OF_A_FILE:
            raise DataError(f"--data {path} has a line of more than {MOST_OF_A_FILE:,} characters")
    yield "".join(begun)


def text_of_line(line: str, text_key: str, place: str) -> str:
    """Take the text out of one line of JSON."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}); a .jsonl file has one JSON object on every line") from error
    if not isinstance(value, dict) or not isinstance(value.get(text_key), str):
        fields = f"its fields are {', '.join(value)}" if isinstance(value, dict) else "it is no object"
        raise DataError(f'{place}: no text in the field "{text_key}" ({fields}); expected {{"{text_key}": "..."}}')
    return str(value[text_key])


def split_text(text: str) -> Iterator[str]:
    """Cut a plain text into documents: at end-of-text marks, or where it has none between paragraphs, or else lines."""
    if END_OF_TEXT in text:
        yield from (part.strip("\n") for part in text.split(END_OF_TEXT))
    else:
        yield from _pieces(text, "\n\n", "\n", "")


def _pieces(text: str, separator: str, *finer: str) -> Iterator[str]:
    """Cut at one of the separators, where pieces become long enough; a part that is far too long, at a finer one."""
    size = 0
    kept: list[str] = []
    parts = text.split(separator) if separator else _characters(text)
    for part in parts:
        if finer and len(part) >= 2 * PIECE_CHARACTERS:
            if kept:
                yield separator.join(kept)
            size, kept = 0, []
            yield from _pieces(part, *finer)
            continue
        kept.append(part)
        size += len(part) + len(separator)
        if size >= PIECE_CHARACTERS:
            yield separator.join(kept)
            size, kept = 0, []
    if kept:
        yield separator.join(kept)


def _characters(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))


def build_corpus(name: str, texts: Iterable[str], num_files: int, size_limit: int) -> Corpus:
    """Drop repetitions and scraps, stop at the size limit, and put the rest into the order of their hashes.

    Raises:
        DataError: what remains is too little to split and train on.
    """
    by_hash: dict[bytes, str] = {}
    size = 0
    for raw in texts:
        text = raw.encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs, which are no text
        if len(text.strip()) < SMALLEST_DOCUMENT:
            continue
        if size + len(text) > size_limit:
            break
        if by_hash.setdefault(hashlib.sha256(text.encode()).digest(), text) is text:
            size += len(text)
    documents = tuple(by_hash[key] for key in sorted(by_hash))
    if len(documents) < FEWEST_DOCUMENTS or size < FEWEST_CHARACTERS:
        raise DataError(
            f"{len(documents)} different documents with {size:,} characters are too little to train on: "
            f"at least {FEWEST_DOCUMENTS} documents and {FEWEST_CHARACTERS:,} characters are needed. "
            "Give more text with --data FILE... (.jsonl or .txt)"
        )
    return Corpus(name, documents, num_files)


def write_jsonl(corpus: Corpus, path: Path) -> None:
    """Write the documents as `megalith preprocess` reads them: one {"text": ...} a line."""
    with path.open("w", encoding="utf-8") as file:
        for text in corpus.documents:
            file.write(json.dumps({"text": text}) + "\n")
