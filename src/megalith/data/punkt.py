"""Sentences of a text: the Punkt algorithm, with the decisions of nltk's implementation, which Megatron uses.

A full stop ends a sentence unless it belongs to an abbreviation, an initial or a number. Which words are
abbreviations, which words start sentences and how words are written inside them is learnt from text beforehand
(`punkt_parameters`). '?' and '!' always end one. Other languages' marks, such as those of Chinese, are not known to it.

Source:  Kiss and Strunk 2006, Unsupervised Multilingual Sentence Boundary Detection, Computational Linguistics 32(4),
section 4 for the decisions; nltk 3.8 for what the paper leaves open (tokens, contexts, realignment).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

ENDS = (".", "?", "!")
_CAPITALS = 1 << 1 | 1 << 2 | 1 << 3  # orthographic context: seen with a capital at the start, inside, or unknown where
_CAPITAL_INSIDE = 1 << 2
_SMALL_AT_START = 1 << 4
_SMALL = 1 << 4 | 1 << 5 | 1 << 6
_PUNCTUATION = tuple(";:,.!?")
_NUMBER = "##number##"
_PIECE = 1_000_000  # characters; Megatron hands a text to the splitter in such pieces
_BLANKS = " \t\n\r\x0b\x0c"

_NON_WORD = r"(?:[)\";}\]*:@'({\[?!])"
_REPEATED = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_WORDS = re.compile(
    rf"{_REPEATED}"
    r"|(?=[^(\"`{\[:;&#*@)}\]\-,])\S+?"
    rf"(?=\s|$|{_NON_WORD}|{_REPEATED}|,(?=$|\s|{_NON_WORD}|{_REPEATED}))"
    r"|\S"
)
_POSSIBLE_END = re.compile(rf"[.?!](?=(?P<after>{_NON_WORD}|\s+(?P<next>\S+)))")
_POSSIBLE_END_WITH_BLANKS = re.compile(rf"\S*[.?!]\s*(?=(?P<after>{_NON_WORD}|(?P<next>\S+)))")
_CLOSING = re.compile(r"[\"')\]}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
_NUMERIC = re.compile(r"^-?[.,]?\d[\d,.\-]*\.?$")
_ELLIPSIS = re.compile(r"\.\.+$")
_INITIAL = re.compile(r"[^\W\d]\.$")


@dataclass(frozen=True)
class PunktParameters:
    """What has been learnt of a language.

    Attributes:
        abbreviations: words that end with a full stop of their own, in small letters without it.
        collocations: pairs of words between which a full stop ends no sentence.
        starters: words that often start sentences.
        orthography: how a word has been seen, as flags.
    """

    abbreviations: frozenset[str] = frozenset()
    collocations: frozenset[tuple[str, str]] = frozenset()
    starters: frozenset[str] = frozenset()
    orthography: dict[str, int] = field(default_factory=dict)


@dataclass
class _Word:
    text: str
    kind: str
    """In small letters, numbers replaced by a sign for all of them."""
    ends: bool = False
    abbreviates: bool = False
    is_ellipsis: bool = False

    @property
    def has_stop(self) -> bool:
        return self.text.endswith(".")

    @property
    def bare(self) -> str:
        return self.kind[:-1] if len(self.kind) > 1 and self.kind.endswith(".") else self.kind

    @property
    def of_sentence(self) -> str:
        """The word without the stop of its sentence."""
        return self.bare if self.ends else self.kind


class SentenceSplitter:
    """Splits texts into sentences.

    Args:
        parameters: of the language.
        keep_newlines: let blanks and line breaks behind a sentence be part of it (`--keep-newlines`).
    """

    def __init__(self, parameters: PunktParameters, *, keep_newlines: bool) -> None:
        self._parameters = parameters
        self._possible_end = _POSSIBLE_END_WITH_BLANKS if keep_newlines else _POSSIBLE_END

    def split(self, text: str) -> list[str]:
        """The sentences of a text."""
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return [piece[start:stop] for piece in pieces for start, stop in self._realigned(piece)]

    def _realigned(self, text: str) -> Iterator[tuple[int, int]]:
        """Sentences as ranges; quotes and brackets that close one are moved to its end."""
        ranges = list(self._ranges(text))
        moved = 0
        for (start, stop), following in zip(ranges, [*ranges[1:], None], strict=True):
            begin = start + moved
            closing = _CLOSING.match(text[following[0] : following[1]]) if following is not None else None
            if following is not None and closing is not None:
                moved = closing.end()
                yield begin, following[0] + len(closing.group().rstrip())
                continue
            moved = 0
            if text[begin:stop]:
                yield begin, stop

    def _ranges(self, text: str) -> Iterator[tuple[int, int]]:
        begin = 0
        for match, context in self._contexts(text):
            if self._has_end_inside(context):
                yield begin, match.end()
                begin = match.start("next") if match.group("next") else match.end()
        yield begin, len(text.rstrip())

    def _contexts(self, text: str) -> Iterator[tuple[re.Match[str], str]]:
        """Each possible end with the word before it and what comes after.

        Of possible ends in one word, as in 'e.g.', only the last is looked at.
        """
        last: re.Match[str] | None = None
        word = (0, 0)
        for match in self._possible_end.finditer(text):
            start = _after_last_blank(text, word[1], match.start(), word[0])
            if last is not None and word[1] <= start:
                yield last, text[word[0] : word[1]] + last.group() + last.group("after")
            last, word = match, (start, match.start())
        if last is not None:
            yield last, text[word[0] : word[1]] + last.group() + last.group("after")

    def _has_end_inside(self, context: str) -> bool:
        words = [
            _Word(found, _NUMERIC.sub(_NUMBER, found.lower()))
            for line in context.split("\n")
            if line.strip()
            for found in _WORDS.findall(line)
        ]
        for word in words:
            self._judge(word)
        for word, following in pairwise(words):
            self._judge_again(word, following)
        return any(word.ends for word in words[:-1])

    def _judge(self, word: _Word) -> None:
        """Each word for itself."""
        text = word.text
        if text in ENDS:
            word.ends = True
        elif _ELLIPSIS.match(text):
            word.is_ellipsis = True
        elif text.endswith(".") and not text.endswith(".."):
            stem = text[:-1].lower()
            known = self._parameters.abbreviations
            word.abbreviates = stem in known or stem.split("-")[-1] in known
            word.ends = not word.abbreviates

    def _judge_again(self, word: _Word, following: _Word) -> None:
        """A word with a full stop, by the word that follows."""
        if not word.has_stop:
            return
        kind, next_kind = word.bare, following.of_sentence
        is_initial = _INITIAL.match(word.text) is not None
        if (kind, next_kind) in self._parameters.collocations:
            word.ends, word.abbreviates = False, True
            return
        starts = self._starts_sentence(following)
        capital = following.text[0].isupper()
        likely = starts is True or (capital and next_kind in self._parameters.starters)
        if (word.abbreviates or word.is_ellipsis) and not is_initial and likely:
            word.ends = True
            return
        if is_initial or kind == _NUMBER:
            always_capital = not self._parameters.orthography.get(next_kind, 0) & _SMALL
            if starts is False or (starts is None and is_initial and capital and always_capital):
                word.ends, word.abbreviates = False, True

    def _starts_sentence(self, word: _Word) -> bool | None:
        """Whether a word starts a sentence, by how it is written here and elsewhere; None if that does not tell."""
        if word.text in _PUNCTUATION:
            return False
        seen = self._parameters.orthography.get(word.of_sentence, 0)
        if word.text[0].isupper() and seen & _SMALL and not seen & _CAPITAL_INSIDE:
            return True
        if word.text[0].islower() and (seen & _CAPITALS or not seen & _SMALL_AT_START):
            return False
        return None


def _after_last_blank(text: str, start: int, stop: int, otherwise: int) -> int:
    """Where the last word of a range begins; as in nltk, a blank in the first place of the range does not count."""
    at = max(text.rfind(blank, start, stop) for blank in _BLANKS)
    return at + 1 if at > start else otherwise
