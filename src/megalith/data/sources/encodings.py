"""Text encodings: detection from the bytes of a file, and conversion to UTF-8.

Only what the bytes prove is detected: byte order marks, UTF-16 by its zero bytes, UTF-8 by its strict form, the Chinese
encodings by their most common characters. The user names any other: a wrong guess would make garbage of training text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UTF_8 = "UTF-8"
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8", "UTF-8 with byte order mark"),
    (codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
    (b"\x84\x31\x95\x33", "gb18030", "GB18030"),
)
_BAD_BYTES = "megalith.bad-bytes"
_BAD_BYTES_MARKER = "\udcff"
_MIN_COMMON_SHARE = 0.6  # share of common characters among those that are not ASCII; ordinary Chinese text has over 0.9
_CHARACTERS_PER_ERROR = 10  # at least; damage in a few places does not prevent detection
_GB_COMMON = re.compile(rb"[\xb0-\xd7\xa1-\xa3][\xa1-\xfe]")  # level 1 of GB 2312, punctuation, full width
_BIG5_COMMON = re.compile(rb"[\xa4-\xc6\xa1-\xa3][\x40-\x7e\xa1-\xfe]")  # level 1 of Big5, punctuation


def _replace_bad_bytes(error: UnicodeError) -> tuple[str, int]:
    """Replace undecodable bytes by a marker that is invalid in UTF-8, so that only their document is bad."""
    assert isinstance(error, UnicodeDecodeError)
    return _BAD_BYTES_MARKER, max(error.end, error.start + 1)


codecs.register_error(_BAD_BYTES, _replace_bad_bytes)


@dataclass(frozen=True)
class Encoding:
    """Text encoding of a file, after the `bom_size` bytes of a byte order mark."""

    codec: str
    name: str
    bom_size: int = 0

    @property
    def plain_name(self) -> str:
        """Return the name without the note about the byte order mark."""
        return self.name.split(" with")[0]

    @property
    def is_utf_8(self) -> bool:
        return self.codec == "utf-8"


def named_encoding(name: str, beginning: bytes) -> Encoding | None:
    """Return the encoding that a user names; None if there is no such encoding."""
    try:
        codec = codecs.lookup(name)
    except LookupError:
        return None
    found = codec.name
    if found in ("utf-8-sig", "utf-8"):
        return Encoding("utf-8", UTF_8, len(codecs.BOM_UTF8) if beginning.startswith(codecs.BOM_UTF8) else 0)
    if found in ("utf-16", "utf-32"):
        marked = _encoding_by_bom(beginning)
        return marked if marked and marked.codec.startswith(found) else Encoding(f"{found}-le", name)
    marked = _encoding_by_bom(beginning)
    return Encoding(found, name, marked.bom_size if marked and marked.codec == found else 0)


def find_encoding(samples: Sequence[bytes]) -> Encoding | None:
    """Detect the encoding from samples of a file, the first from its beginning; None if the bytes do not tell."""
    marked = _encoding_by_bom(samples[0])
    if marked is not None:
        return marked
    for codec in ("utf-16-le", "utf-16-be"):
        if _is_utf_16(samples[0], codec):
            return Encoding(codec, "UTF-16 without byte order mark")
    right, wrong = map(sum, zip(*(_count_utf_8(sample) for sample in samples), strict=True))
    if not wrong or right > wrong:
        return Encoding("utf-8", UTF_8)
    high = sum(_count_high_bytes(sample) for sample in samples)
    for codec, name, common in (("gb18030", "GB18030", _GB_COMMON), ("big5", "Big5", _BIG5_COMMON)):
        found = _count_common(samples, common)
        is_common = found >= max(2, _MIN_COMMON_SHARE * high / 2)
        if is_common and _count_errors(samples[0], codec) * _CHARACTERS_PER_ERROR <= found:
            return Encoding(codec, name)
    # A few odd bytes in an ASCII file are damage, which the errors of their lines name; many are another encoding.
    return Encoding("utf-8", UTF_8) if high < 16 else None


def transcode(blocks: Iterator[bytes], encoding: Encoding) -> Iterator[bytes]:
    """Yield text in any encoding as UTF-8; undecodable bytes become a marker that is invalid in UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding.codec)(_BAD_BYTES)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogatepass")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")


def _encoding_by_bom(beginning: bytes) -> Encoding | None:
    found = (Encoding(codec, name, len(bom)) for bom, codec, name in _BYTE_ORDER_MARKS if beginning.startswith(bom))
    return next(found, None)


def _is_utf_16(sample: bytes, codec: str) -> bool:
    """Return whether zeros stand where ASCII has them in UTF-16: nearly everywhere, or in places in invalid UTF-8."""
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    zeros, others = (odd, even) if codec.endswith("le") else (even, odd)
    units = len(sample) // 2
    mostly = zeros > 0.4 * units and zeros > 50 * others
    sometimes = zeros > 0.01 * units and not others and not _decodes(sample, "utf-8")
    return (mostly or sometimes) and _decodes(sample[: len(sample) & ~1], codec)


def _decodes(sample: bytes, codec: str) -> bool:
    """Return whether the beginning of a text is in this encoding; the last character may be cut."""
    try:
        codecs.getincrementaldecoder(codec)("strict").decode(sample)
    except UnicodeDecodeError:
        return False
    return True


def _count_errors(sample: bytes, codec: str) -> int:
    """Count undecodable places in the beginning of a text, ignoring a cut character at the end."""
    return codecs.getincrementaldecoder(codec)("replace").decode(sample).count("\ufffd")


def _count_utf_8(sample: bytes) -> tuple[int, int]:
    """Count valid characters beyond ASCII and invalid places, ignoring cut characters at the ends."""
    if sample.isascii():
        return 0, 0
    start = next((at for at in range(min(4, len(sample))) if sample[at] & 0xC0 != 0x80), 0)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(sample[start:])
    wrong = text.count("\ufffd") - sample.count("\ufffd".encode())
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    return beyond_ascii - text.count("\ufffd"), max(0, wrong)


def _count_high_bytes(sample: bytes) -> int:
    return len(sample) - len(sample.translate(None, bytes(range(0x80, 0x100))))


def _count_common(samples: Sequence[bytes], pattern: re.Pattern[bytes]) -> int:
    return sum(len(pattern.findall(sample)) for sample in samples)
