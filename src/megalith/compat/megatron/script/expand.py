"""What the variables in a word of bash stand for, as far as a script says it; nothing is run."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megalith.compat.megatron.script.words import Part, Word

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
    """What a script knows.

    Attributes:
        values: name -> text, or the elements of an array.
        environ: variables from outside.
        arguments: `$1`, `$2` and so on.
        missing: names that were asked for and are set nowhere, in order.
        commands: commands whose output was asked for, in order.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    values: dict[str, Value] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def expand(self, word: Word) -> list[str]:
        """The words that a word becomes: none for an empty variable, several for an array or a text with blanks."""
        done: list[str] = []
        current: str | None = None
        for part in word.parts:
            pieces = self._part(part)
            if part.quoted and len(pieces) == 1:
                current = (current or "") + pieces[0]
                continue
            if not pieces:  # of an empty array not even "${A[@]}" leaves a word
                continue
            current = (current or "") + pieces[0] if pieces[0] or current is not None else None
            for piece in pieces[1:]:
                done += [current] if current is not None else []
                current = piece or None
        return [*done, current] if current is not None else done

    def text(self, word: Word) -> str:
        """A word as one text, as an assignment takes it."""
        return "".join(self._text(part.text) if part.expands else part.text for part in word.parts)

    def _part(self, part: Part) -> list[str]:
        """The pieces of a part, the first to be joined to what stands before it, the last to what comes after."""
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
        """Of `${NAME[@]}` and `$@` the elements; None for what is one text."""
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


# What is left as it stands stays one piece of a word wherever it goes, into a text that is read again too: the
# characters that mean something to a shell are kept as others, of Unicode's private area, until the end.
_SHELLS_OWN = " \t\n\"'$`()|;&<>\\#*?[]{}=-"
_KEPT = {ord(mark): 0xE000 + ord(mark) for mark in _SHELLS_OWN}
_PLAIN = {kept: mark for mark, kept in _KEPT.items()}


def _kept(text: str) -> str:
    return text.translate(_KEPT)


def plain(text: str) -> str:
    """A text with what was left as it stands as it was written."""
    return text.translate(_PLAIN)


def is_known(text: str) -> bool:
    """Whether nothing in a text was left for a shell."""
    return text == plain(text)


def _value_of(text: str) -> int:
    """The value of what stands between `$((` and `))`, with C's operators.

    Raises:
        SyntaxError, ValueError: it is something else.
    """
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
    """The value of a sum or a test of whole numbers; a test gives 0 or 1.

    Raises:
        ValueError: it is something else.
    """
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
    """`${NAME%pattern}` and its kin."""
    ends = range(len(value) + 1)
    if mark.startswith("%"):
        cuts = [cut for cut in ends if fnmatch.fnmatchcase(value[cut:], pattern)]
        return value[: (min if mark == "%%" else max)(cuts)] if cuts else value
    cuts = [cut for cut in ends if fnmatch.fnmatchcase(value[:cut], pattern)]
    return value[(max if mark == "##" else min)(cuts) :] if cuts else value
