"""Sentence splitters: the Punkt algorithm with the decisions of nltk's implementation, and punctuation rules.

Punkt (used by Megatron): a full stop ends a sentence unless it belongs to an abbreviation, an initial or a number.
Which words are abbreviations, which words start sentences and how words are written inside them are learnt from text
beforehand and read from nltk's data or a JSON file. '?' and '!' always end a sentence. Marks of other scripts, such as
Chinese, are unknown to it. nltk's older data (`punkt`) are pickles, which are not read because loading one runs code;
its newer data (`punkt_tab`) are text. Nothing is downloaded.

Punctuation rules (`--sentence-splitter marks`), for Chinese and for machines without nltk's data: an ideographic full
stop, a wide `!`, `?` or `;`, or an ellipsis ends a sentence wherever it stands, and so does the end of a line. A full
stop, `?` or `!` ends one where white space follows and then no small letter, except for a full stop after a lone
capital or one of a few abbreviations. Closing quotes and brackets belong to the sentence that they close.

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
_CHARACTERS_AT_ONCE = 1_000_000  # Megatron passes texts to the splitter in parts of this length
_WHITESPACE = " \t\n\r\x0b\x0c"

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
# Look-behinds: a run of marks or a long word is tried once from its beginning, not from each of its characters.
_PUNCTUATION_END = re.compile(
    rf"(?P<wide>[{_WIDE}]+[{_CLOSING_MARKS}]*)"
    rf"|(?<![.?!])(?P<mark>[.?!]+)[{_CLOSING_MARKS}]*(?=\s+(?P<next>\S)|\s*$)"
    r"|(?P<line>\n\s*)"
)
_LAST_WORD = re.compile(r"(?<!\S)\S*$")
_OPENING_MARKS = "\"'([{\u201c\u2018\u300c\u300e\u3010\uff08"


@dataclass(frozen=True)
class PunktParameters:
    """Learnt parameters of one language.

    Attributes:
        abbreviations: words that end with a full stop, in lower case without it.
        collocations: pairs of words between which a full stop ends no sentence.
        starters: words that often start sentences.
        orthography: how a word has been seen, as flags.
    """

    abbreviations: frozenset[str] = frozenset()
    collocations: frozenset[tuple[str, str]] = frozenset()
    starters: frozenset[str] = frozenset()
    orthography: dict[str, int] = field(default_factory=dict)


@dataclass
class _Token:
    """Token of Punkt: a word or punctuation mark with its classification."""

    text: str
    type: str
    """In small letters, numbers replaced by a sign for all of them."""
    ends: bool = False
    abbreviates: bool = False
    is_ellipsis: bool = False

    @property
    def has_period(self) -> bool:
        return self.text.endswith(".")

    @property
    def type_without_period(self) -> str:
        """Return the type without a final period, unless it is the period alone."""
        return self.type[:-1] if len(self.type) > 1 and self.type.endswith(".") else self.type

    @property
    def type_without_final_period(self) -> str:
        """Return the type without the period of its sentence, if it ends one."""
        return self.type_without_period if self.ends else self.type


class SentenceSplitter:
    """Punkt splitter; with `keep_newlines` (the flag) white space after a sentence belongs to it."""

    def __init__(self, parameters: PunktParameters, *, keep_newlines: bool) -> None:
        self._parameters = parameters
        self._possible_end = _POSSIBLE_END_WITH_BLANKS if keep_newlines else _POSSIBLE_END

    def split(self, text: str) -> list[str]:
        """Return the sentences of a text."""
        pieces = (text[at : at + _CHARACTERS_AT_ONCE] for at in range(0, len(text), _CHARACTERS_AT_ONCE))
        return [piece[start:stop] for piece in pieces for start, stop in self._realign(piece)]

    def _realign(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield sentences as ranges, with closing quotes and brackets moved to the end of theirs."""
        ranges = list(self._raw_ranges(text))
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

    def _raw_ranges(self, text: str) -> Iterator[tuple[int, int]]:
        begin = 0
        for match, context in self._possible_ends(text):
            if self._contains_sentence_end(context):
                yield begin, match.end()
                begin = match.start("next") if match.group("next") else match.end()
        yield begin, len(text.rstrip())

    def _possible_ends(self, text: str) -> Iterator[tuple[re.Match[str], str]]:
        """Yield each possible end with its context: the word before it and what follows.

        Of several possible ends in one word, as in 'e.g.', only the last counts.
        """
        last: re.Match[str] | None = None
        word = (0, 0)
        for match in self._possible_end.finditer(text):
            start = _last_word_start(text, word[1], match.start(), word[0])
            if last is not None and word[1] <= start:
                yield last, text[word[0] : word[1]] + last.group() + last.group("after")
            last, word = match, (start, match.start())
        if last is not None:
            yield last, text[word[0] : word[1]] + last.group() + last.group("after")

    def _contains_sentence_end(self, context: str) -> bool:
        words = [
            _Token(found, _NUMERIC.sub(_NUMBER, found.lower()))
            for line in context.split("\n")
            if line.strip()
            for found in _WORDS.findall(line)
        ]
        for word in words:
            self._classify(word)
        for word, following in pairwise(words):
            self._reclassify(word, following)
        return any(word.ends for word in words[:-1])

    def _classify(self, word: _Token) -> None:
        """Classify a single token: sentence end, abbreviation or ellipsis."""
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

    def _reclassify(self, word: _Token, following: _Token) -> None:
        """Reclassify a token with a period by the token that follows."""
        if not word.has_period:
            return
        word_type, next_word_type = word.type_without_period, following.type_without_final_period
        is_initial = _INITIAL.match(word.text) is not None
        if (word_type, next_word_type) in self._parameters.collocations:
            word.ends, word.abbreviates = False, True
            return
        starts = self._is_sentence_starter(following)
        capital = following.text[0].isupper()
        likely = starts is True or (capital and next_word_type in self._parameters.starters)
        if (word.abbreviates or word.is_ellipsis) and not is_initial and likely:
            word.ends = True
            return
        if is_initial or word_type == _NUMBER:
            always_capital = not self._parameters.orthography.get(next_word_type, 0) & _SMALL
            if starts is False or (starts is None and is_initial and capital and always_capital):
                word.ends, word.abbreviates = False, True

    def _is_sentence_starter(self, word: _Token) -> bool | None:
        """Return whether a word starts a sentence, by its capitalisation here and elsewhere; None if undecided."""
        if word.text in _PUNCTUATION:
            return False
        seen = self._parameters.orthography.get(word.type_without_final_period, 0)
        if word.text[0].isupper() and seen & _SMALL and not seen & _CAPITAL_INSIDE:
            return True
        if word.text[0].islower() and (seen & _CAPITALS or not seen & _SMALL_AT_START):
            return False
        return None


def _last_word_start(text: str, start: int, stop: int, otherwise: int) -> int:
    """Return where the last word of a range begins; as in nltk, a blank at the first place of the range is ignored."""
    at = max(text.rfind(blank, start, stop) for blank in _WHITESPACE)
    return at + 1 if at > start else otherwise


def find_parameters(language: str, file: str | None, folders: Sequence[str] = ()) -> PunktParameters:
    """Load the Punkt parameters of a language.

    Args:
        file: a JSON file, or a folder with nltk's tables, that the user names; None looks where nltk looks.
        folders: where nltk looks first, those of the environment's NLTK_DATA.

    Raises:  DataError if there are none, or they are damaged.
    """
    if file is not None:
        path = Path(file)
        return _from_tables(path) if path.is_dir() else _from_json(path)
    for folder in _nltk_data_folders(folders):
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
    raise DataError(_missing_data_message(language, folders))


def _nltk_data_folders(folders: Sequence[str]) -> Iterator[Path]:
    """Yield the folders where nltk looks for its data."""
    yield from map(Path, folders)
    yield Path.home() / "nltk_data"
    for base in (Path(sys.prefix), Path("/usr"), Path("/usr/local")):
        yield from (base / part / "nltk_data" for part in ("", "share", "lib"))


def _missing_data_message(language: str, folders: Sequence[str]) -> str:
    pickles = [folder / "tokenizers" / "punkt" for folder in _nltk_data_folders(folders)]
    old = next((str(folder) for folder in pickles if folder.is_dir()), None)
    found = f" ({old} is nltk's older format, a pickle, which is not loaded)" if old else ""
    return (
        f"--split-sentences needs nltk's punkt_tab data for {language} (--lang), which is not on this machine{found}. "
        "On a machine with network access: pip install nltk && python -m nltk.downloader -d DIR punkt_tab; copy DIR "
        "here and set NLTK_DATA=DIR. Or give your own parameters with --punkt-parameters FILE, or --sentence-splitter "
        "marks, which uses punctuation only (recommended for Chinese)"
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


class PunctuationSplitter:
    """Splitter by punctuation rules; white space between sentences belongs to none."""

    def split(self, text: str) -> list[str]:
        """Return the sentences of a text."""
        found, begin = list[str](), 0
        for match in _PUNCTUATION_END.finditer(text):
            if match["mark"] is not None and not _is_sentence_end(match, text[begin : match.start()]):
                continue
            found.append(text[begin : match.end()])
            begin = match.end()
        found.append(text[begin:])
        return [sentence for part in found if (sentence := part.strip())]


def _is_sentence_end(match: re.Match[str], before: str) -> bool:
    """Return whether a punctuation mark before white space ends its sentence."""
    if match["next"] is not None and match["next"].islower():
        return False
    if match["mark"] != ".":
        return True
    last = _LAST_WORD.search(before)
    word = last[0].lstrip(_OPENING_MARKS) if last is not None else ""
    return not (len(word) == 1 and word.isupper()) and word.lower() not in _ABBREVIATIONS.split()
