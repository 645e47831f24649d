"""Whether a zstd file ends where its last frame ends: the library reads a file that is cut short without a word.

Source:  RFC 8878, section 3.1 (frame header, blocks of at most 2^21 bytes, checksum) and 3.1.2 (skippable frames).
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

_MAGIC, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE = 1


def require_whole(path: Path) -> None:
    """Walk over the frames by the sizes that they state.

    Raises:  EOFError if the last one is cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            _pass_frame(file)
            if file.tell() > size:
                raise EOFError("the last frame is cut short")


def _pass_frame(file: IO[bytes]) -> None:
    magic = _number(file, 4)
    if magic & 0xFFFFFFF0 == _SKIPPABLE:
        file.seek(_number(file, 4), 1)
        return
    if magic != _MAGIC:
        raise EOFError("what follows the last frame is no frame")
    descriptor = _number(file, 1)
    single_segment = descriptor >> 5 & 1
    content_size = _CONTENT_SIZE_BYTES[descriptor >> 6] or single_segment
    file.seek((0 if single_segment else 1) + _DICTIONARY_BYTES[descriptor & 3] + content_size, 1)
    last = False
    while not last:
        header = _number(file, 3)
        last = bool(header & 1)
        file.seek(1 if header >> 1 & 3 == _RLE else header >> 3, 1)
    file.seek(4 if descriptor >> 2 & 1 else 0, 1)


def _number(file: IO[bytes], size: int) -> int:
    content = file.read(size)
    if len(content) < size:
        raise EOFError("the last frame is cut short")
    return int.from_bytes(content, "little")
