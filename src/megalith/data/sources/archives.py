"""Archives of texts, tar (also compressed) and zip: read in their order, as streams, without unpacking to disk.

Each member is a sample, as in the shards of webdataset: a txt is one document, a json one object, an array, or lines.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any

from typing_extensions import Self

from megalith.data.sources.documents import BadDocument
from megalith.data.sources.formats import (
    ARRAY,
    JSONL,
    NOT_DATA,
    TAR,
    TXT,
    ZIP,
    compression_of,
    format_by_name,
    name_without_compression,
)
from megalith.data.sources.lines import TextFormat, TextPayload, split_at_separators
from megalith.data.sources.protocol import STDIN, ChunkDocuments, Row, RowSource, SourceOptions
from megalith.data.sources.streams import DAMAGE, choose_encoding, decoded, decompressor, limited, open_raw, raw_file
from megalith.errors import DataError

_DAMAGE = (*DAMAGE, OSError, tarfile.TarError, zipfile.BadZipFile, NotImplementedError)
_ENCRYPTED = 1  # flag of a member of a zip
_Members = Iterator[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class _Part:
    """Whole documents of a member; `units` lines or documents of it come before them."""

    member: str
    units: int
    text: TextPayload


@dataclass(frozen=True)
class _PartsPayload:
    """Parts of members, together one chunk."""

    parts: list[_Part]
    num_bytes: int

    @property
    def num_units(self) -> int:
        return sum(part.text.num_units for part in self.parts)

    def read(self, keys: tuple[str, ...]) -> ChunkDocuments:
        found = [part.text.read(keys) for part in self.parts]
        texts = partial(_texts_of, found, keys) if all(each.texts is not None for each in found) else None
        return ChunkDocuments(self._documents(found), self.num_units, self.num_bytes, texts)

    def _documents(self, found: list[ChunkDocuments]) -> Iterator[tuple[int, Any]]:
        before = 0
        for part, each in zip(self.parts, found, strict=True):
            for number, document in each.documents:
                if isinstance(document, BadDocument):
                    unit = "line" if part.text.form.is_json else "document"
                    document = BadDocument(f"{part.member}, {unit} {part.units + number + 1}: {document.reason}")
                yield before + number, document
            before += part.text.num_units


def _texts_of(found: list[ChunkDocuments], keys: tuple[str, ...]) -> list[list[str]] | None:
    """Return the texts of all parts for each key; None unless each part has them."""
    every = [each.texts() for each in found if each.texts is not None]
    columns = [texts for texts in every if texts is not None]
    if len(columns) < len(found):
        return None
    return [list(chain.from_iterable(texts[at] for texts in columns)) for at in range(len(keys))]


class ArchiveSource(RowSource):
    """Archive whose members are txt, or json and jsonl; other members are left out."""

    unit = "document"
    payload = _PartsPayload

    def __init__(self, path: Path, packing: str, options: SourceOptions) -> None:
        """Find the first text. Raises DataError if there is none, or the archive is damaged before it."""
        super().__init__(path, options.limits)
        self._options, self._packing, self._member = options, packing, ""
        kinds = {"auto": (TXT, JSONL), TXT: (TXT,)}.get(options.input_format, (JSONL,))
        if options.input_format not in ("auto", TXT, JSONL, ARRAY):
            raise DataError(
                f"{path}: of an archive txt, json and jsonl are read, not {options.input_format}; unpack it and give "
                f"the folder ({_UNPACK[packing].format(path)})"
            )
        if packing == ZIP and path == STDIN:
            raise DataError("-: a zip archive has its list at the end; write it to a file and give its path")
        self.kind: str | None = None
        with self._opened() as (_, members):
            self.kind = next((kind for name, _ in members if (kind := _kind(name)) in kinds), None)
        if self.kind is None:
            raise DataError(
                f"{path}: the {packing} archive holds no {' or '.join(kinds)} file; unpack what it holds and give the "
                f"folder ({_UNPACK[packing].format(path)})"
            )
        whole = "the objects of each json and jsonl" if self.kind == JSONL else "each txt is one document"
        if self.kind == TXT and options.document_separator:
            whole = f"each txt is separated by {options.document_separator!r}"
        self.about = f"{packing} archive, {whole}, other members are left out"

    def _rows(self) -> Iterator[Row]:
        number = 0
        with self._opened() as (file, members):
            for name, opener in members:
                kind = _kind(name)
                if kind is not None and kind != self.kind and self._options.input_format == "auto":
                    raise DataError(
                        f"{self.path} holds both {self.kind} and {kind} ({name}); --input-format txt or jsonl chooses"
                    )
                if kind != self.kind:
                    continue
                self._member, units = name, 0
                form, blocks = self._text(name, opener, file)
                for *_, disk, text in split_at_separators(blocks, form, self._limits, f"{self.path}: {name}"):
                    number += 1
                    yield Row(_Part(name, units, text), len(text.data), number, disk)
                    units += text.num_units

    def _text(
        self, name: str, opener: Callable[[], Any], file: IO[bytes]
    ) -> tuple[TextFormat, Iterator[tuple[bytes, int]]]:
        """Return the format of a member, and the blocks of its text with the bytes of the archive read so far."""
        shown = f"{self.path}: {name}"
        content = opener()
        packed = decompressor(shown, content, compression_of(content.peek(8)[:8]))
        raw = limited(packed, shown, file, self._limits)
        first = next(raw, b"")
        encoding = choose_encoding(shown, [first], self._options.encoding)
        separator: str | None = self._options.document_separator
        if self.kind == JSONL:
            separator = None if name_without_compression(Path(name)).lower().endswith(".json") else "\n"
        form = TextFormat(self.kind == JSONL, separator, encoding.plain_name, self._limits.max_document_bytes)
        return form, ((block, file.tell()) for block in decoded(chain([first], raw), encoding))

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], _Members]]:
        """Open the archive; errors of reading become a DataError that names the member."""
        self._member = ""
        try:
            with open_raw(self.path) as file:
                yield file, (self._zip_members if self._packing == ZIP else self._tar_members)(file)
        except _DAMAGE as error:
            place = f"{self.path}: at or after {self._member}" if self._member else str(self.path)
            raise DataError(f"{place}: the {self._packing} archive is truncated or damaged: {error}") from error

    def _tar_members(self, file: IO[bytes]) -> _Members:
        compression = raw_file(self.path, self._limits).compression
        content, mode = decompressor(self.path, file, compression), "r|" if compression or self.path == STDIN else "r:"
        # `ignore_zeros`: archives may have been concatenated, as by `cat`.
        with tarfile.open(fileobj=content, mode=mode, tarinfo=_strict_header(), ignore_zeros=True) as tape:  # type: ignore[call-overload]
            while (member := tape.next()) is not None:
                tape.members.clear()  # or they grow with the archive
                if member.isfile():
                    yield member.name, partial(tape.extractfile, member)

    def _zip_members(self, file: IO[bytes]) -> _Members:
        with zipfile.ZipFile(file) as archive:
            for member in sorted(archive.infolist(), key=lambda found: found.header_offset):
                if member.flag_bits & _ENCRYPTED and _kind(member.filename):
                    raise zipfile.BadZipFile(f"{member.filename} is encrypted")
                if not member.is_dir():
                    yield member.filename, partial(archive.open, member)


_UNPACK = {TAR: "tar -xf {} -C DIR", ZIP: "unzip {} -d DIR"}


def _kind(name: str) -> str | None:
    """Return the format of a member that is text: txt or jsonl; None for any other."""
    parts = PurePosixPath(name).parts
    if any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in parts):
        return None
    kind = format_by_name(Path(name))
    return kind if kind in (TXT, JSONL) and not NOT_DATA.fullmatch(parts[-1]) else None


def _strict_header() -> type[tarfile.TarInfo]:
    """Return a class of headers for one archive: tarfile takes a damaged header, or no more bytes, for the end."""

    class Header(tarfile.TarInfo):
        ended = False

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
            try:
                return super().frombuf(buf, encoding, errors)
            except tarfile.HeaderError as error:
                if any(buf) or not (buf or cls.ended):
                    raise tarfile.ReadError(f"{error} (no header of a member, or no end)") from error
                cls.ended = True
                raise

    return Header
