"""Sentences of a text by their marks alone: for Chinese, and for machines without nltk's data.

An ideographic full stop, a wide `!`, `?` or `;`, or an ellipsis ends a sentence wherever it stands, and so does the end
of a line. A full stop, `?` or `!` ends one where a blank follows and then no small letter; a full stop behind a capital
alone or one of a few abbreviations does not. Closing quotes and brackets belong to the sentence that they close.

Unlike Punkt (`data.punkt`) it knows nothing of a language beyond that short list, and needs nothing to know.
"""

from __future__ import annotations

import re

_WIDE = "\u3002\uff01\uff1f\uff1b\u2026\uff0e\uff61"
_CLOSING = "\"')\\]}\u201d\u2019\u300d\u300f\u3011\uff09\u300b\u3009"
_ABBREVIATIONS = "mr mrs ms dr prof st mt jr sr vs etc e.g i.e cf fig no vol pp inc ltd co corp dept gov gen rep sen"
# Look-behinds let a run of marks or a long word be tried once, from its beginning, not from each of its characters.
_END = re.compile(
    rf"(?P<wide>[{_WIDE}]+[{_CLOSING}]*)"
    rf"|(?<![.?!])(?P<mark>[.?!]+)[{_CLOSING}]*(?=\s+(?P<next>\S)|\s*$)"
    r"|(?P<line>\n\s*)"
)
_LAST_WORD = re.compile(r"(?<!\S)\S*$")
_QUOTES = "\"'([{\u201c\u2018\u300c\u300e\u3010\uff08"


class MarksSplitter:
    """Splits texts into sentences; blanks between them belong to none."""

    def split(self, text: str) -> list[str]:
        """The sentences of a text."""
        found, begin = list[str](), 0
        for match in _END.finditer(text):
            if match["mark"] is not None and not _ends(match, text[begin : match.start()]):
                continue
            found.append(text[begin : match.end()])
            begin = match.end()
        found.append(text[begin:])
        return [sentence for part in found if (sentence := part.strip())]


def _ends(match: re.Match[str], before: str) -> bool:
    """Whether a mark with a blank behind it ends the sentence that it stands in."""
    if match["next"] is not None and match["next"].islower():
        return False
    if match["mark"] != ".":
        return True
    last = _LAST_WORD.search(before)
    word = last[0].lstrip(_QUOTES) if last is not None else ""
    return not (len(word) == 1 and word.isupper()) and word.lower() not in _ABBREVIATIONS.split()
