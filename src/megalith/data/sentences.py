"""Sentences of a text: by the Punkt algorithm, with the decisions of nltk's implementation, or by marks alone.

Punkt, which Megatron uses: a full stop ends a sentence unless it belongs to an abbreviation, an initial or a number.
Which words are abbreviations, which words start sentences and how words are written inside them is learnt from text
beforehand, and read from nltk's data or a JSON file. '?' and '!' always end one. Other languages' marks, such as those
of Chinese, are not known to it. nltk's older data (`punkt`) are pickles, which are not read: loading one runs code. Its
newer ones (`punkt_tab`) are text. Nothing is downloaded.

By marks alone, for Chinese and for machines without nltk's data: an ideographic full stop, a wide `!`, `?` or `;`, or
an ellipsis ends a sentence wherever it stands, and so does the end of a line. A full stop, `?` or `!` ends one where a
blank follows and then no small letter; a full stop behind a capital alone or one of a few abbreviations does not.
Closing quotes and brackets belong to the sentence that they close.

Source:  Kiss and Strunk 2006, Unsupervised Multilingual Sentence Boundary Detection, Computational Linguistics 32(4),
section 4 for the decisions; nltk 3.8 for what the paper leaves open (tokens, contexts, realignment).
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megalith.errors import DataError

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
_TABLES = ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab")
_WIDE = "\u3002\uff01\uff1f\uff1b\u2026\uff0e\uff61"
_CLOSING_MARKS = "\"')\\]}\u201d\u2019\u300d\u300f\u3011\uff09\u300b\u3009"
_ABBREVIATIONS = "mr mrs ms dr prof st mt jr sr vs etc e.g i.e cf fig no vol pp inc ltd co corp dept gov gen rep sen"
# Look-behinds let a run of marks or a long word be tried once, from its beginning, not from each of its characters.
_END_BY_MARKS = re.compile(
    rf"(?P<wide>[{_WIDE}]+[{_CLOSING_MARKS}]*)"
    rf"|(?<![.?!])(?P<mark>[.?!]+)[{_CLOSING_MARKS}]*(?=\s+(?P<next>\S)|\s*$)"
    r"|(?P<line>\n\s*)"
)
_LAST_WORD = re.compile(r"(?<!\S)\S*$")
_OPENING_MARKS = "\"'([{\u201c\u2018\u300c\u300e\u3010\uff08"


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
    """Splits texts into sentences; with `keep_newlines` (the flag) blanks and line breaks behind one are part of it."""

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


def find_parameters(language: str, file: str | None, folders: Sequence[str] = ()) -> PunktParameters:
    """The parameters of a language.

    Args:
        file: a JSON file, or a folder with nltk's tables, that the user names; None looks where nltk looks.
        folders: where nltk looks first, those of the environment's NLTK_DATA.

    Raises:  DataError if there are none, or they are damaged.
    """
    if file is not None:
        path = Path(file)
        return _from_tables(path) if path.is_dir() else _from_json(path)
    for folder in _places(folders):
        tables = folder / "tokenizers" / "punkt_tab" / language
        if tables.is_dir():
            return _from_tables(tables)
        archive = folder / "tokenizers" / "punkt_tab.zip"
        if archive.is_file():
            try:
                packed = zipfile.Path(archive, f"punkt_tab/{language}/")
            except zipfile.BadZipFile as error:
                raise DataError(f"{archive} is damaged: {error}") from error
            if (packed / _TABLES[0]).exists():
                return _from_tables(packed)
    raise DataError(_missing(language, folders))


def _places(folders: Sequence[str]) -> Iterator[Path]:
    """Where nltk looks for its data."""
    yield from map(Path, folders)
    yield Path.home() / "nltk_data"
    for base in (Path(sys.prefix), Path("/usr"), Path("/usr/local")):
        yield from (base / part / "nltk_data" for part in ("", "share", "lib"))


def _missing(language: str, folders: Sequence[str]) -> str:
    pickles = [folder / "tokenizers" / "punkt" for folder in _places(folders)]
    old = next((str(folder) for folder in pickles if folder.is_dir()), None)
    found = f" ({old} is nltk's older format, a pickle, which is not loaded)" if old else ""
    return (
        f"--split-sentences needs nltk's punkt_tab data for {language} (--lang), and they are not on this "
        f"machine{found}. On one with a network: pip install nltk && python -m nltk.downloader -d DIR punkt_tab; bring "
        "DIR here and set NLTK_DATA=DIR. Or give parameters of your own with --punkt-parameters FILE, or "
        "--sentence-splitter marks, which goes by punctuation alone (and is the one for Chinese)"
    )


def _from_tables(folder: Path | zipfile.Path) -> PunktParameters:
    try:
        texts = [(folder / name).read_text(encoding="utf-8") for name in _TABLES]
        abbreviations, collocations, starters, orthography = (text.split("\n") for text in texts)
        pairs = (line.split("\t") for line in collocations if line)
        counts = (line.rsplit("\t", 1) for line in orthography if line)
        return PunktParameters(
            abbreviations=frozenset(filter(None, abbreviations)),
            collocations=frozenset((first, second) for first, second in pairs),
            starters=frozenset(filter(None, starters)),
            orthography={word: int(flags) for word, flags in counts},
        )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{folder}: the punkt tables are missing or damaged: {error}") from error


def _from_json(path: Path) -> PunktParameters:
    try:
        found = json.loads(path.read_bytes())
        return PunktParameters(
            abbreviations=frozenset(found["abbrev_types"]),
            collocations=frozenset((first, second) for first, second in found["collocations"]),
            starters=frozenset(found["sent_starters"]),
            orthography={word: int(flags) for word, flags in found["ortho_context"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"--punkt-parameters {path}: expected JSON with abbrev_types, collocations, sent_starters and "
            f"ortho_context ({error!r})"
        ) from error


class MarksSplitter:
    """Splits texts into sentences; blanks between them belong to none."""

    def split(self, text: str) -> list[str]:
        """The sentences of a text."""
        found, begin = list[str](), 0
        for match in _END_BY_MARKS.finditer(text):
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
    word = last[0].lstrip(_OPENING_MARKS) if last is not None else ""
    return not (len(word) == 1 and word.isupper()) and word.lower() not in _ABBREVIATIONS.split()
