"""What separates the documents of a text file."""

from __future__ import annotations

from collections.abc import Iterable

END_OF_TEXT_SEPARATOR = "<|endoftext|>"
_BY_PREFERENCE = (END_OF_TEXT_SEPARATOR, "\n\n", "\r\n\r\n")


def find_separator(blocks: Iterable[bytes]) -> str | None:
    """What separates the documents: `<|endoftext|>` if it occurs, else blank lines, else nothing.

    Args:
        blocks: the file, or its beginning, as UTF-8.
    """
    longest = max(map(len, _BY_PREFERENCE))
    seen: set[str] = set()
    end = b""
    for block in blocks:
        content = end + block
        seen.update(separator for separator in _BY_PREFERENCE if separator.encode() in content)
        if END_OF_TEXT_SEPARATOR in seen:
            break
        end = content[-longest:]
    return next((separator for separator in _BY_PREFERENCE if separator in seen), None)
