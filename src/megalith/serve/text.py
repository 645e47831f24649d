"""From ids to the text that can be shown: whole characters only, and nothing that may become a stop text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_CONTEXT = 6  # ids before the first, for tokenizers that join words by what stands before them
_UNFINISHED = "\ufffd"  # ends the text of ids that end within a character
_LONGEST_CHARACTER = 8  # ids; more of them in a row are no character


class TextStream:
    """Text of a growing list of ids, in pieces that end at whole characters.

    A character of several bytes may be spread over several ids; until it is whole, its text ends in U+FFFD. Only the
    last few ids are decoded, so that long texts take no longer.

    Args:
        decode: Text of ids.
        before: What the ids continue.
        hidden: Ids that have no text here.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = (), hidden: Collection[int] = ()
    ) -> None:
        self._decode, self._hidden = decode, hidden
        self._ids = list(before[-_CONTEXT:])
        self._shown_ids = len(self._ids)
        self._shown = len(decode(self._ids)) if self._ids else 0

    def push(self, token: int) -> str:
        """The text that is whole with one more id."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED) and len(self._ids) - self._shown_ids < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def rest(self) -> str:
        """What is left at the end, whole or not."""
        return self._take(self._decode(self._ids)) if len(self._ids) > self._shown_ids else ""

    def _take(self, text: str) -> str:
        piece = text[self._shown :]
        self._ids = self._ids[max(0, self._shown_ids - 1) :][-_CONTEXT:]
        self._shown_ids = len(self._ids)
        self._shown = len(self._decode(self._ids))
        return piece


class StopTexts:
    """Cuts a stream of text before the first of these texts; holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """What can be shown now, and the stop text that has come."""
        if not self._texts:
            return piece, None
        self._held += piece
        found = [(place, text) for text in self._texts if (place := self._held.find(text)) >= 0]
        if found:
            place, text = min(found)
            shown, self._held = self._held[:place], ""
            return shown, text
        keep = max(self._overlap(text) for text in self._texts)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def rest(self) -> str:
        """What was held back and became no stop text."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """How many of the last characters may be the first of this text."""
        return next((n for n in range(min(len(text) - 1, len(self._held)), 0, -1) if self._held.endswith(text[:n])), 0)
