"""Lexer of bash scripts: quoting, comments, continued lines and the expansion of variables.

A word is a list of parts, because quoting decides whether the value of a variable is split again. Nothing is run.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-|<<|>>|>&|&>|<\(|>\(|[;|&<>()\n]")
_CONTINUED_COMMENT = re.compile(r"\\[ \t]*(#[^\n]*)?\n")


@dataclass(frozen=True)
class Part:
    """Part of a word with one kind of quoting."""

    text: str
    expands: bool  # whether variables in it are expanded: everywhere but in single quotes
    quoted: bool  # whether it is quoted, so that blanks in it do not split the word


@dataclass(frozen=True)
class Word:
    """Word of a script."""

    parts: tuple[Part, ...]
    line: int


@dataclass(frozen=True)
class Operator:
    """Token between words: `;`, a bracket, the end of a line."""

    text: str
    line: int
    glued: bool  # whether it directly follows a word, as the bracket of `NAME=(` and the `>` of `2>` do


Token = Word | Operator


class _Lexer:
    """Single pass over the text of a script."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self.line = text, 0, 1

    def read(self) -> list[Token]:
        """Return all tokens; the word after `<<` becomes the text of its here-document."""
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
        """Read a here-document up to the line that equals `name`; a quoted name prevents expansion."""
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
            line, before = self.line, self._text[self._at - 1 : self._at]
            if operator := _OPERATOR.match(self._text, self._at):
                yield Operator(self._take(len(operator[0])), line, bool(before) and before not in " \t\r\n;&|()")
            else:
                yield Word(tuple(self._parts()), line)

    def _skipped(self) -> bool:
        """Skip blanks, comments, and continuations of lines; return whether anything was skipped.

        In bash a backslash before blanks or a comment continues nothing. In a list of flags it is meant to, as scripts
        of users show, so it counts as a continuation.
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
            if letter in " \t\r" or _OPERATOR.match(self._text, self._at):
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
        """Take `${...}` or `$(...)` up to its closing bracket."""
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
    """Return the words and operators of a script, without comments."""
    return _Lexer(text).read()


def _unescaped(text: str, letters: str) -> Iterator[Part]:
    """Yield the parts of a text in double quotes: a backslash escapes `letters` and joins lines."""
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


Value = str | list[str]

_REFERENCE = re.compile(
    r"\$(?:(?P<name>[A-Za-z_]\w*)|(?P<digit>\d)|(?P<special>[@*#?$!])|\{(?P<braced>(?:[^{}]|\{[^{}]*\}|\$\{[^{}]*\})*)\}"
    r"|\(\((?P<sum>.*?)\)\)|\((?P<command>(?:[^()]|\([^()]*\))*)\))|`(?P<ticks>[^`]*)`",
    re.DOTALL,
)
_BRACED = re.compile(r"(?P<length>#)?(?P<name>[A-Za-z_]\w*|\d+|[@*#])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL)
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
}


@dataclass
class Variables:
    """Variables of a script and their expansion."""

    environ: Mapping[str, str] = field(default_factory=dict)  # environment variables
    arguments: Sequence[str] = ()
    values: dict[str, Value] = field(default_factory=dict)  # name -> text, or the elements of an array
    missing: list[str] = field(default_factory=list)  # referenced names that are not set, in order
    commands: list[str] = field(default_factory=list)  # command substitutions, in order

    def expand(self, word: Word) -> list[str]:
        """Return the words that a word expands to: none for an empty variable, several for an array or blanks."""
        done: list[str] = []
        current: str | None = None
        for part in word.parts:
            pieces = self._part(part)
            if part.quoted and len(pieces) == 1:
                current = (current or "") + pieces[0]
                continue
            if not pieces:  # an empty array leaves no word, not even as "${A[@]}"
                continue
            current = (current or "") + pieces[0] if pieces[0] or current is not None else None
            for piece in pieces[1:]:
                done += [current] if current is not None else []
                current = piece or None
        return [*done, current] if current is not None else done

    def text(self, word: Word) -> str:
        """Expand a word to one text, as in an assignment."""
        return "".join(self._text(part.text) if part.expands else part.text for part in word.parts)

    def _part(self, part: Part) -> list[str]:
        """Expand a part to pieces: the first joins the text before it, the last the text after it."""
        if not part.expands:
            return [part.text]
        whole = _REFERENCE.fullmatch(part.text)
        if whole and (elements := self._elements(whole)) is not None:
            if part.quoted:
                return [" ".join(elements)] if "*" in whole[0] else elements
            return [piece for element in elements for piece in element.split()]
        if part.quoted:
            return [self._text(part.text)]
        text = self._text(part.text)
        pieces = text.split()
        if not pieces:
            return [""] if text else []
        return [*([""] if text[0].isspace() else []), *pieces, *([""] if text[-1].isspace() else [])]

    def _elements(self, reference: re.Match[str]) -> list[str] | None:
        """Return the elements of `${NAME[@]}` or `$@`; None for a reference to one text."""
        if reference["special"] in ("@", "*"):
            return list(self.arguments)
        braced = _BRACED.fullmatch(reference["braced"] or "")
        if braced is None or braced["length"] or braced["index"] not in ("@", "*") and braced["name"] not in "@*":
            return None
        if braced["name"] in "@*":
            return list(self.arguments)
        value = self._value(braced["name"])
        if value is None or value == []:
            return [] if value == [] else self._absent(braced["name"])
        return list(value) if isinstance(value, list) else [value]

    def _absent(self, name: str) -> list[str]:
        self._miss(name)
        return []

    def _text(self, text: str) -> str:
        return _REFERENCE.sub(self._referred, text)

    def _referred(self, reference: re.Match[str]) -> str:
        if reference["command"] is not None or reference["ticks"] is not None:
            self.commands.append(plain(reference[0]))
            return _kept(reference[0])
        if reference["sum"] is not None:
            return self._sum(reference["sum"])
        if reference["special"] is not None:
            known = {"#": str(len(self.arguments)), "@": " ".join(self.arguments), "*": " ".join(self.arguments)}
            return known.get(reference["special"], "0")
        if reference["braced"] is not None:
            return self._braced(reference["braced"])
        return self._named(reference["name"] or reference["digit"])

    def _braced(self, inside: str) -> str:
        match = _BRACED.fullmatch(inside)
        if match is None:
            return "${" + inside + "}"
        name, rest = match["name"], match["rest"]
        if match["length"]:
            value = self._value(name)
            return str(len(value or ""))
        value = self._at(name, match["index"])
        for mark in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
            if rest.startswith(mark):
                return self._with_default(name, value, mark, rest[len(mark) :])
        if value is None:
            self._miss(name)
            return ""
        for mark in ("%%", "%", "##", "#"):
            if rest.startswith(mark):
                return _trimmed(value, mark, self._text(rest[len(mark) :]))
        return value

    def _with_default(self, name: str, value: str | None, mark: str, default: str) -> str:
        there = value is not None and (value != "" or not mark.startswith(":"))
        if mark.endswith("+"):
            return self._text(default).strip("\"'") if there else ""
        if there:
            return value or ""
        if mark.endswith("?"):
            self._miss(name)
            return ""
        text = self._text(default).strip("\"'")
        if mark.endswith("="):
            self.values[name] = text
        return text

    def _at(self, name: str, index: str | None) -> str | None:
        value = self._value(name)
        if not isinstance(value, list):
            return value
        if index in ("@", "*"):
            return " ".join(value)
        place = int(index) if index and index.isdigit() else 0
        return value[place] if place < len(value) else None

    def _named(self, name: str) -> str:
        value = self._value(name)
        if value is None:
            self._miss(name)
            return ""
        return value if isinstance(value, str) else next(iter(value), "")

    def _value(self, name: str) -> Value | None:
        if name.isdigit():
            place = int(name) - 1
            return "script" if place < 0 else self.arguments[place] if place < len(self.arguments) else None
        if name == "#":
            return str(len(self.arguments))
        return self.values.get(name, self.environ.get(name))

    def _miss(self, name: str) -> None:
        shown = f"${name}"
        if shown not in self.missing:
            self.missing.append(shown)

    def _sum(self, text: str) -> str:
        named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda match: self._named(match[1]) or "0", self._text(text))
        try:
            return str(_value_of(named))
        except (SyntaxError, ValueError, ZeroDivisionError):
            self.commands.append(f"$(({text}))")
            return _kept(f"$(({text}))")


# Text that only a shell could expand must stay one part of a word wherever it goes, also when a text is read again.
# Its special characters are therefore mapped to Unicode's private use area until the end.
_SHELLS_OWN = " \t\n\"'$`()|;&<>\\#*?[]{}=-"
_KEPT = {ord(mark): 0xE000 + ord(mark) for mark in _SHELLS_OWN}
_PLAIN = {kept: mark for mark, kept in _KEPT.items()}


def _kept(text: str) -> str:
    return text.translate(_KEPT)


def plain(text: str) -> str:
    """Return a text with protected characters restored."""
    return text.translate(_PLAIN)


def is_known(text: str) -> bool:
    """Return whether a text has no part that only a shell could expand."""
    return text == plain(text)


def _value_of(text: str) -> int:
    """Evaluate the expression in `$((...))`, with C's operators. Raises SyntaxError or ValueError if impossible."""
    condition, question, branches = text.partition("?")
    if question:
        open_questions = 1
        for place, mark in enumerate(branches):
            open_questions += {"?": 1, ":": -1}.get(mark, 0)
            if not open_questions:
                return _value_of(branches[:place] if _value_of(condition) else branches[place + 1 :])
        raise ValueError("a question without its second answer")
    if "~" in text:
        raise ValueError("bits")
    # Python's ~ binds as C's ! does, and its `not` does not.
    pythons = re.sub(r"!(?!=)", "~", text.replace("&&", " and ").replace("||", " or "))
    return _number(ast.parse(pythons.strip(), mode="eval").body)


_TESTS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _number(node: ast.expr) -> int:
    """Evaluate arithmetic on whole numbers, where a comparison gives 0 or 1. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        value = _number(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TESTS:
        return int(_TESTS[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [_number(value) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("not a sum of whole numbers")


def _trimmed(value: str, mark: str, pattern: str) -> str:
    """Expand `${NAME%pattern}`, `%%`, `#` or `##`."""
    ends = range(len(value) + 1)
    if mark.startswith("%"):
        cuts = [cut for cut in ends if fnmatch.fnmatchcase(value[cut:], pattern)]
        return value[: (min if mark == "%%" else max)(cuts)] if cuts else value
    cuts = [cut for cut in ends if fnmatch.fnmatchcase(value[:cut], pattern)]
    return value[(max if mark == "##" else min)(cuts) :] if cuts else value
