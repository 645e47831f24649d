"""The words of a bash script: quoting, comments and continued lines, without expanding anything.

A word is a list of parts, for its quoting decides whether what a variable holds is split again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "<<<",
    "<<-",
    "<<",
    ">>",
    ">&",
    "&>",
    "<(",
    ">(",
    ";",
    "|",
    "&",
    "<",
    ">",
    "(",
    ")",
    "\n",
)
_CONTINUED_COMMENT = re.compile(r"\\[ \t]*(#[^\n]*)?\n")


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Attributes:
        text: as written, without its quotes.
        expands: whether variables in it are looked up: everywhere but in single quotes.
        quoted: whether it stands in quotes, so that blanks in it do not divide.
    """

    text: str
    expands: bool
    quoted: bool


@dataclass(frozen=True)
class Word:
    """One word."""

    parts: tuple[Part, ...]
    line: int


@dataclass(frozen=True)
class Operator:
    """What stands between words: `;`, a bracket, the end of a line.

    Attributes:
        text: as written.
        glued: whether it stands directly behind a word, as the bracket of `NAME=(` and the mark of `2>` do.
    """

    text: str
    line: int
    glued: bool


Token = Word | Operator


class _Reader:
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self.line = text, 0, 1

    def read(self) -> list[Token]:
        """All tokens; the word behind `<<` is the text of the here-document, which follows at the end of its line."""
        done: list[Token] = []
        waiting: list[int] = []  # places of the words that name the end of a here-document
        for token in self._tokens():
            if isinstance(token, Word) and done and isinstance(done[-1], Operator) and done[-1].text in ("<<", "<<-"):
                waiting.append(len(done))
            done.append(token)
            if isinstance(token, Operator) and token.text == "\n":
                for place in waiting:
                    name, operator = done[place], done[place - 1]
                    assert isinstance(name, Word) and isinstance(operator, Operator)
                    done[place] = self._document(name, strips=operator.text == "<<-")
                waiting = []
        return done

    def _document(self, name: Word, *, strips: bool) -> Word:
        """The lines up to the one that is the name; quotes around the name keep what is in them as it is."""
        end, lines = "".join(part.text for part in name.parts), list[str]()
        expands = not any(part.quoted for part in name.parts)
        while self._at < len(self._text):
            stop = self._text.find("\n", self._at)
            line = self._take((len(self._text) if stop < 0 else stop + 1) - self._at)
            line = line.lstrip("\t") if strips else line
            if line.rstrip("\n") == end:
                break
            lines.append(line)
        text = "".join(lines)
        if not expands:
            return replace(name, parts=(Part(text, False, True),))
        return replace(name, parts=tuple(_unescaped(text, "$`\\")))

    def _tokens(self) -> Iterator[Token]:
        while self._at < len(self._text):
            if self._skipped():
                continue
            operator = next((word for word in _OPERATORS if self._text.startswith(word, self._at)), "")
            if operator:
                before = self._text[self._at - 1 : self._at]
                token = Operator(operator, self.line, bool(before) and before not in " \t\r\n;&|()")
                self._take(len(operator))
                yield token
            else:
                line = self.line
                yield Word(tuple(self._parts()), line)

    def _skipped(self) -> bool:
        """Pass over blanks, comments, and the ends of continued lines.

        A backslash that blanks or a comment follow continues nothing in bash; in a list of flags it is meant to, and
        the scripts that users have show it, so the line is taken as continued.
        """
        letter = self._text[self._at]
        if letter in " \t\r":
            self._take(1)
            return True
        if letter == "#":
            end = self._text.find("\n", self._at)
            self._take((len(self._text) if end < 0 else end) - self._at)
            return True
        if letter == "\\" and (match := _CONTINUED_COMMENT.match(self._text, self._at)):
            self._take(len(match[0]))
            return True
        return False

    def _parts(self) -> Iterator[Part]:
        plain = ""
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter in " \t\r" or any(self._text.startswith(word, self._at) for word in _OPERATORS):
                break
            if letter == "\\":
                if match := _CONTINUED_COMMENT.match(self._text, self._at):
                    # Glued to a word: bash joins it with the next line, whose indent then ends it.
                    self._take(len(match[0]))
                    if match[1] is not None or match[0][1] in " \t#":
                        break
                    continue
                yield from [Part(plain, True, False)] if plain else []
                plain = ""
                yield Part(self._text[self._at + 1 : self._at + 2], False, True)
                self._take(2)
            elif letter in "'\"":
                yield from [Part(plain, True, False)] if plain else []
                plain = ""
                yield from self._quoted(letter)
            elif letter == "$" and self._text[self._at + 1 : self._at + 2] in ("{", "("):
                plain += self._braced()
            elif letter == "`":
                end = self._text.find("`", self._at + 1)
                plain += self._take((len(self._text) - 1 if end < 0 else end) - self._at + 1)
            else:
                plain += self._take(1)
        yield from [Part(plain, True, False)] if plain else []

    def _quoted(self, quote: str) -> Iterator[Part]:
        self._take(1)
        text = ""
        while self._at < len(self._text) and self._text[self._at] != quote:
            if quote == '"' and self._text[self._at] == "\\":
                text += self._take(2)
            elif quote == '"' and self._text[self._at] == "$" and self._text[self._at + 1 : self._at + 2] in ("{", "("):
                text += self._braced()
            else:
                text += self._take(1)
        self._take(1)
        return iter([Part(text, False, True)]) if quote == "'" else _unescaped(text, '$`"\\')

    def _braced(self) -> str:
        """`${...}` or `$(...)` to its closing bracket."""
        opening = self._text[self._at + 1]
        closing = {"{": "}", "(": ")"}[opening]
        depth, end = 0, self._at + 1
        while end < len(self._text):
            depth += (self._text[end] == opening) - (self._text[end] == closing)
            end += 1
            if depth == 0:
                break
        return self._take(end - self._at)

    def _take(self, length: int) -> str:
        taken = self._text[self._at : self._at + length]
        self.line += taken.count("\n")
        self._at += length
        return taken


def tokens(text: str) -> list[Token]:
    """The words and operators of a script, comments left out."""
    return _Reader(text).read()


def _unescaped(text: str, letters: str) -> Iterator[Part]:
    """A text in double quotes as its parts: a backslash takes the meaning of these letters and joins lines."""
    plain, at = "", 0
    while at < len(text):
        pair = text[at : at + 2]
        if pair[0] == "\\" and pair[1:] and pair[1] in letters:
            yield from [Part(plain, True, True)] if plain else []
            yield Part(pair[1], False, True)
            plain, at = "", at + 2
        elif pair == "\\\n":
            at += 2
        else:
            plain, at = plain + pair[0], at + 1
    if plain or not text:
        yield Part(plain, True, True)
