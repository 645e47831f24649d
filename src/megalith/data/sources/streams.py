"""Streams of text files: decompressed, as UTF-8, block by block in bounded memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

from megalith.data.sources.encodings import Encoding, find_encoding, named_encoding, transcode
from megalith.data.sources.formats import BZIP2, GZIP, XZ, ZSTD, compression_of
from megalith.data.sources.protocol import STDIN, Limits
from megalith.errors import DataError
from megalith.tokenizers.protocol import import_for

_BLOCK = 1 << 18
_SAMPLE = 1 << 18
_FURTHER_SAMPLES = 8  # spread over the file, because the beginning is often pure ASCII
_KEPT_BYTES = 1 << 23  # of standard input, for those who look at its beginning
_UNCHECKED_BYTES = 1 << 26  # decompressed bytes before the expansion ratio is checked
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_ZSTD_READ = 1 << 12  # bytes; a compressed block of 4 may expand to 128 KiB, so this bounds the memory


@dataclass(frozen=True)
class TextFile:
    """Text file with its compression and encoding."""

    path: Path
    compression: str | None
    encoding: Encoding
    limits: Limits

    @property
    def is_plain(self) -> bool:
        """Return whether the bytes on disk are the UTF-8 text, so that reading can begin anywhere."""
        return self.compression is None and self.encoding.is_utf_8 and self.path != STDIN

    @cached_property
    def about(self) -> str:
        """Describe encoding and compression for the user."""
        return ", ".join([self.encoding.name, *([self.compression] if self.compression else [])])

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the text as UTF-8 without byte order mark, each block with the bytes of the file read so far.

        Raises:  DataError if the file cannot be read, is damaged, or expands beyond `Limits.max_expansion`.
        """
        try:
            with open_raw(self.path) as file:
                content = limited(decompressor(self.path, file, self.compression), self.path, file, self.limits)
                for block in decoded(content, self.encoding):
                    yield block, file.tell()
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise self._damaged(error) from error
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        except DAMAGE as error:
            raise self._damaged(error) from error

    def texts(self) -> Iterator[tuple[str, int]]:
        """Yield the blocks decoded, a character at the border of two in the later one.

        Raises:  DataError as `blocks`, and where the bytes are not text in the encoding.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for block, disk in self.blocks():
                yield decoder.decode(block), disk
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not valid {self.encoding.plain_name} (byte 0x{error.object[error.start]:02x}); name "
                "its encoding with --encoding, such as gb18030 or cp1252"
            ) from error

    def beginning(self, size: int = 1 << 16) -> bytes:
        """Return the first bytes of the text as UTF-8."""
        found = bytearray()
        for block, _ in self.blocks():
            found += block
            if len(found) >= size:
                break
        return bytes(found[:size])

    def _damaged(self, error: BaseException) -> DataError:
        return DataError(f"{self.path}: the {self.compression} data is truncated or damaged: {error}")


def open_raw(path: Path) -> IO[bytes]:
    """Open a file, or standard input from its beginning again, as long as few of its bytes have been read."""
    if path != STDIN:
        return path.open("rb")
    return io.BufferedReader(_PipeReader(_pipe(sys.stdin.buffer)))


class _Pipe:
    """Stream whose first bytes are kept."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.kept, self.position = stream, bytearray(), 0


@cache
def _pipe(stream: IO[bytes]) -> _Pipe:
    return _Pipe(stream)


class _PipeReader(io.RawIOBase):
    """Reader of a pipe from its first byte. Raises DataError where those bytes are no longer kept."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe, self._at = pipe, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        pipe = self._pipe
        block = bytes(memoryview(pipe.kept)[self._at : self._at + len(buffer)])
        if not block:
            if self._at != pipe.position:
                raise DataError("-: standard input was read already; write it to a file to read it again")
            block = pipe.stream.read(len(buffer))
            pipe.position += len(block)
            if len(pipe.kept) < _KEPT_BYTES:
                pipe.kept += block
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def tell(self) -> int:
        return self._at


def open_text(path: Path, encoding: str, limits: Limits) -> TextFile:
    """Open a text file, detecting its compression and, unless it is named, its encoding.

    Raises:  DataError if it cannot be read, its encoding is unknown, or the bytes do not tell it.
    """
    raw = raw_file(path, limits)
    return replace(raw, encoding=choose_encoding(path, _samples(raw), encoding))


def choose_encoding(name: object, samples: Sequence[bytes], wanted: str) -> Encoding:
    """Return the encoding of samples of a text: the `wanted` one, or what `auto` finds. Raises as `open_text` does."""
    if wanted != "auto":
        named = named_encoding(wanted, samples[0])
        if named is None:
            raise DataError(f"--encoding {wanted}: unknown encoding; examples are utf-8, gb18030, big5 and utf-16")
        return named
    found = find_encoding(samples)
    if found is None:
        raise DataError(
            f"{name}: the text is not UTF-8 and its encoding cannot be detected; give --encoding, such as gb18030, "
            "big5, shift_jis, euc_kr, cp1252 or koi8-r"
        )
    return found


def raw_file(path: Path, limits: Limits) -> TextFile:
    """Return the file as decompressed bytes, treated as UTF-8."""
    try:
        with open_raw(path) as file:
            return TextFile(path, compression_of(file.read(8)), Encoding("utf-8", "UTF-8"), limits)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def limited(content: Any, name: object, file: IO[bytes], limits: Limits) -> Iterator[bytes]:
    """Yield the blocks of what is decompressed from `file`. Raises DataError if it expands beyond the limit."""
    produced = 0
    while block := content.read(_BLOCK):
        produced += len(block)
        if content is not file and produced > max(_UNCHECKED_BYTES, limits.max_expansion * file.tell()):
            raise DataError(
                f"{name}: its first {file.tell()} bytes hold more than {produced} bytes of text, over "
                f"{limits.max_expansion} times as much; if the file is trusted, raise --max-expansion"
            )
        yield block


def decoded(content: Iterator[bytes], encoding: Encoding) -> Iterator[bytes]:
    """Yield the blocks of a text as UTF-8 without byte order mark, none of them empty."""
    content = _without_bom(content, encoding.bom_size)
    yield from filter(None, content if encoding.is_utf_8 else transcode(content, encoding))


def _without_bom(content: Iterator[bytes], mark: int) -> Iterator[bytes]:
    for block in content:
        yield block[mark:]
        mark = max(0, mark - len(block))


def _samples(raw: TextFile) -> list[bytes]:
    """Return the beginning of a file and, if it is uncompressed, samples along it."""
    samples = [raw.beginning(_SAMPLE)]
    if raw.path == STDIN:
        return samples
    size = raw.path.stat().st_size
    if raw.compression is None and size > 2 * _SAMPLE:
        with raw.path.open("rb") as file:
            for number in range(1, _FURTHER_SAMPLES + 1):
                file.seek((size - _SAMPLE) * number // _FURTHER_SAMPLES)
                samples.append(file.read(_SAMPLE // _FURTHER_SAMPLES))
    return samples


def decompressor(path: object, file: IO[bytes], compression: str | None) -> Any:
    """Return a reader of the content of a compressed file; the file itself if it is not compressed."""
    if compression == GZIP:
        return gzip.GzipFile(fileobj=file)
    if compression == XZ:
        return lzma.LZMAFile(file)
    if compression == BZIP2:
        return bz2.BZ2File(file)
    if compression == ZSTD:
        zstandard = import_for(f"{path}: reading it", "zstandard", "data")
        # 2 GiB windows (`zstd --long=31`) are allowed to ask for their memory; the format's own bound.
        return _ZstdReader(zstandard.ZstdDecompressor(max_window_size=1 << 31), file, zstandard.ZstdError)
    return file


class _ZstdReader:
    """Reader of consecutive zstd frames.

    The stream reader of zstandard takes a truncated frame for the end of the file.
    """

    def __init__(self, decompressor: Any, file: IO[bytes], error: type[Exception]) -> None:
        self._decompressor, self._file, self._error = decompressor, file, error
        self._frame: Any = None
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return the next block, of any size above 0; empty at the end."""
        while content := self._rest or self._file.read(_ZSTD_READ):
            frame = self._frame or self._decompressor.decompressobj()
            try:
                block: bytes = frame.decompress(content)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._rest, self._frame = frame.unused_data, None if frame.eof else frame
            if block:
                return block
        if self._frame is not None:
            raise EOFError("the last frame is cut short")
        return b""
