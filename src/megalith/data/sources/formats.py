"""File formats: compression by content, format by name and content, and the separator of documents."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

JSONL, ARRAY, TXT, CSV, PARQUET, ARROW = "jsonl", "json", "txt", "csv", "parquet", "arrow"
FORMATS = (JSONL, ARRAY, TXT, CSV, PARQUET, ARROW)
_FORMAT_BY_SUFFIX = {
    ".jsonl": JSONL,
    ".json": JSONL,
    ".ndjson": JSONL,
    ".txt": TXT,
    ".text": TXT,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
}
TAR, ZIP = "tar", "zip"
GZIP, XZ, ZSTD, BZIP2 = "gz", "xz", "zst", "bz2"
_MAGIC = {b"\x1f\x8b": GZIP, b"\xfd7zXZ\x00": XZ, b"\x28\xb5\x2f\xfd": ZSTD, b"BZh": BZIP2}
# RFC 8878, 3.1.2: a skippable frame, with which pzstd begins, has one of 16 magic numbers.
_MAGIC |= {bytes([0x50 + number]) + b"\x2a\x4d\x18": ZSTD for number in range(16)}
_COMPRESSED_ENDINGS = (".gz", ".xz", ".zst", ".zstd", ".bz2")
_ARCHIVE_MAGIC = {
    b"PK\x03\x04": ZIP,
    b"PK\x05\x06": ZIP,
    b"PK\x07\x08": ZIP,
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
}
NOT_DATA = re.compile(r"(readme|license|licence|copying|changelog|notice|requirements)\b.*|cache-.*\.arrow", re.I)
"""Names of files that lie beside data."""
_PARQUET_MAGIC, _ARROW_MAGIC = b"PAR1", b"ARROW1"
END_OF_TEXT_SEPARATOR = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT_SEPARATOR, "\n\n", "\r\n\r\n")
_LINE_OF_BLANKS = re.compile(rb"\n[ \t]+\r?\n")


def compression_of(beginning: bytes) -> str | None:
    """Return the compression of what begins with these 8 bytes; None if it is not compressed."""
    return next((name for magic, name in _MAGIC.items() if beginning.startswith(magic)), None)


def archive_of(beginning: bytes) -> str | None:
    """Return the kind of archive that begins so (decompressed, at least 512 bytes); None if it is none."""
    for magic, kind in _ARCHIVE_MAGIC.items():
        if beginning.startswith(magic):
            return kind
    try:
        tarfile.TarInfo.frombuf(beginning[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")  # it has a checksum
    except tarfile.HeaderError:
        return None
    return TAR


def name_without_compression(path: Path) -> str:
    """Return the name without a suffix of compression: `a.jsonl` for `a.jsonl.gz`."""
    return path.name[: -len(path.suffix)] if path.suffix.lower() in _COMPRESSED_ENDINGS else path.name


def format_by_name(path: Path) -> str | None:
    """Return the format by the suffix of the name; None if unknown."""
    return _FORMAT_BY_SUFFIX.get(Path(name_without_compression(path)).suffix.lower())


def format_by_content(beginning: bytes) -> str | None:
    """Return the format by the first bytes, decompressed and as UTF-8; None if unknown."""
    if beginning.startswith(_PARQUET_MAGIC):
        return PARQUET
    if beginning.startswith(_ARROW_MAGIC):
        return ARROW
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return JSONL
    return ARRAY if re.match(rb"\[\s*[\[{\"]", text) else None


def format_of(path: Path) -> str | None:
    """Return the format of an uncompressed file; None if neither name nor content tell."""
    with path.open("rb") as file:
        found = format_by_content(file.read(1024))
    return resolve_format(format_by_name(path), found)


def resolve_format(by_name: str | None, by_content: str | None) -> str | None:
    """Combine both: the name decides, except that the content tells JSON lines from a JSON array."""
    if by_name == JSONL and by_content == ARRAY:
        return ARRAY
    return by_name or by_content


def natural_sort_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key in which 2 comes before 10."""
    parts = re.split(r"(\d+)", text)
    return tuple((not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)


def find_separator(blocks: Iterable[bytes]) -> str | None:
    """Return the separator of the documents of a UTF-8 text: `<|endoftext|>`, else blank lines, None without either.

    In a text without empty lines, as WikiText, the most frequent of its lines of spaces or tabs are the blank lines.
    """
    longest = max(map(len, _SEPARATORS))
    seen: set[str] = set()
    of_blanks: Counter[bytes] = Counter()
    end = b""
    for block in blocks:
        content = end + block
        seen.update(separator for separator in _SEPARATORS if separator.encode() in content)
        if END_OF_TEXT_SEPARATOR in seen:
            break
        if not seen:
            of_blanks.update(_LINE_OF_BLANKS.findall(content))
        end = content[-longest:]
    if not seen and of_blanks:
        return of_blanks.most_common(1)[0][0].decode()
    return next((separator for separator in _SEPARATORS if separator in seen), None)
