"""A script as the commands that it would run, in order, with their variables filled in.

Followed are assignments, arrays, `export`, `if` where its test is about variables, and `eval` of a text. Of a loop the
first pass is read. What is not followed is said in the notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megalith.compat.megatron.script.expand import Variables
from megalith.compat.megatron.script.words import Operator, Part, Token, Word, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SEPARATORS = ("\n", ";", "&&", "||", "|", "&", ";;")
_REDIRECTIONS = (">", ">>", "<", ">&", "&>", "<<", "<<-", "<<<")
_INTRODUCING = ("then", "else", "do", "{", "}", "!", "time", "function")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}


@dataclass(frozen=True)
class Command:
    """A command with its words.

    Attributes:
        words: of which the first is the program.
        variables: set for this command alone.
        line: where it begins.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    line: int


@dataclass
class Script:
    """What was read.

    Attributes:
        commands: that the script would run.
        exported: variables that it gives them.
        notes: what could not be followed, one line each.
    """

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_script(text: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Script:
    """Read a script.

    Args:
        text: of the script.
        arguments: its `$1`, `$2` and so on.
        environ: variables that it is started with.
    """
    reader = _Interpreter(Variables(environ or {}, arguments))
    reader.run(tokens(text))
    script = reader.script
    if missing := reader.variables.missing:
        script.notes.append(f"{', '.join(missing)}: set nowhere in the script, taken as empty")
    if commands := list(dict.fromkeys(reader.variables.commands)):
        script.notes.append(f"left as it stands, for it needs a shell: {', '.join(commands)}")
    return script


class _Interpreter:
    """One pass over the statements."""

    def __init__(self, variables: Variables) -> None:
        self.variables, self.script = variables, Script()
        self._skipping: list[bool] = []  # of each `if` around: whether its present branch is passed over
        self._taken: list[bool] = []  # whether a branch of it has been read

    def run(self, stream: Sequence[Token]) -> None:
        rest = list(stream)
        while rest:
            self._statement(rest)

    def _statement(self, rest: list[Token]) -> None:
        """Take one statement off the stream."""
        statement: list[Token] = []
        depth = 0
        while rest:
            token = rest.pop(0)
            if isinstance(token, Operator):
                depth += (token.text == "(") - (token.text == ")")
                joins = token.text in ("&&", "||") and _plain_head(statement) in ("if", "elif")
                if depth <= 0 and token.text in _SEPARATORS and not joins:
                    break
            statement.append(token)
        while statement and isinstance(statement[0], Word) and _plain(statement[0]) in _INTRODUCING:
            self._branch(_plain(statement.pop(0)))
        if statement:
            self._act(statement)

    def _branch(self, word: str) -> None:
        if word == "else" and self._skipping:
            self._skipping[-1] = self._taken[-1]

    def _act(self, statement: list[Token]) -> None:
        head = _plain(statement[0]) if isinstance(statement[0], Word) else ""
        if head in ("if", "elif"):
            self._test(statement[1:], statement[0].line, first=head == "if")
        elif head == "fi":
            if self._skipping:
                self._skipping.pop(), self._taken.pop()
        elif any(self._skipping):
            return
        elif head in ("for", "while", "until", "case"):
            self._loop(head, statement)
        elif head not in ("done", "esac", "in"):
            self._command(statement)

    def _test(self, condition: list[Token], line: int, *, first: bool) -> None:
        if first:
            self._skipping.append(any(self._skipping))
            self._taken.append(self._skipping[-1])
        if not self._skipping or (not first and self._taken[-1]):
            self._skipping[-1:] = [True] * len(self._skipping[-1:])
            return
        if first and self._skipping[-1]:
            return
        holds = self._condition(condition)
        if holds is None:
            self.script.notes.append(f"line {line}: this `if` needs a shell; what it guards is passed over")
        self._skipping[-1], self._taken[-1] = not holds, bool(holds)

    def _condition(self, condition: list[Token]) -> bool | None:
        """Whether tests that `&&` and `||` join hold, from left to right as in bash; None where that needs a shell."""
        result, joined, words = None, "", list[str]()
        for token in [*condition, Operator("&&", 0, False)]:
            if isinstance(token, Word):
                words.append(self.variables.text(token))
                continue
            if token.text not in ("&&", "||"):
                return None
            if not joined or (joined == "&&") == bool(result):
                holds = _holds(words)
                if holds is None:
                    return None
                result = holds
            joined, words = token.text, []
        return result

    def _loop(self, head: str, statement: list[Token]) -> None:
        words = [token for token in statement[1:] if isinstance(token, Word)]
        if head == "for" and len(words) > 2 and _plain(words[1]) == "in":
            values = [value for word in words[2:] for value in self.variables.expand(word)]
            self.variables.values[_plain(words[0])] = next(iter(values), "")
        self.script.notes.append(f"line {statement[0].line}: of this `{head}` one pass is read")

    def _command(self, statement: list[Token]) -> None:
        line = statement[0].line
        rest, own = list(statement), dict[str, str]()
        declaring = ""
        while rest and isinstance(rest[0], Word):
            if _plain(rest[0]) in _DECLARING:
                declaring = _plain(rest.pop(0))
            elif declaring and _plain(rest[0]).startswith("-"):
                rest.pop(0)
            elif match := _assigned(rest[0]):
                self._assign(match, rest, own, declaring)
            else:
                break
        if declaring == "export":
            names = [_plain(token) for token in rest if isinstance(token, Word)]
            values = {name: self.variables.values[name] for name in names if name in self.variables.values}
            self.script.exported |= {name: value for name, value in values.items() if isinstance(value, str)}
        if declaring or not rest:
            self.variables.values |= own
            self.script.exported |= own if declaring == "export" else {}
            return
        words = self._words(rest)
        if words[:1] == ["eval"]:
            self.run(tokens(" ".join(words[1:])))
        elif words[:1] == ["shift"]:
            self.variables.arguments = self.variables.arguments[1:]
        elif words:
            self.script.commands.append(Command(tuple(words), own, line))

    def _assign(self, match: re.Match[str], rest: list[Token], own: dict[str, str], declaring: str) -> None:
        """Take `NAME=value` or `NAME=(...)` off the statement."""
        word = rest.pop(0)
        assert isinstance(word, Word)
        name, adds, values = match[1], bool(match[2]), self.variables.values
        bracket = rest[0] if rest else None
        if isinstance(bracket, Operator) and bracket.text == "(" and bracket.glued:
            rest.pop(0)
            elements: list[str] = []
            while rest:
                token = rest.pop(0)
                if isinstance(token, Operator) and token.text == ")":
                    break
                elements += self.variables.expand(token) if isinstance(token, Word) else []
            before = values.get(name, []) if adds else []
            values[name] = [*([before] if isinstance(before, str) else before), *elements]
            return
        first = word.parts[0]
        value_word = Word((Part(first.text[match.end() :], True, first.quoted), *word.parts[1:]), word.line)
        text = self.variables.text(value_word)
        before = values.get(name, "") if adds else ""
        if isinstance(before, list):
            values[name] = [*before, text]
        else:
            own[name] = before + text
            if declaring or not _is_command(rest):
                values[name] = own[name]

    def _words(self, statement: list[Token]) -> list[str]:
        """The words of a command; redirections are left out."""
        words: list[str] = []
        rest = list(statement)
        while rest:
            token = rest.pop(0)
            if isinstance(token, Word):
                words += self.variables.expand(token)
            elif token.text in _REDIRECTIONS:
                if token.glued and words and words[-1].isdigit():
                    words.pop()
                if rest and isinstance(rest[0], Word):
                    rest.pop(0)
        return words


def _plain_head(statement: Sequence[Token]) -> str:
    """The first word of a statement behind `then` and its like."""
    heads = [_plain(token) for token in statement]
    return next((head for head in heads if head not in _INTRODUCING), "")


def _plain(token: Token) -> str:
    """An unquoted word as written; empty for any other."""
    if isinstance(token, Operator) or len(token.parts) != 1 or token.parts[0].quoted:
        return ""
    return token.parts[0].text


def _assigned(word: Token) -> re.Match[str] | None:
    if isinstance(word, Operator) or not word.parts or word.parts[0].quoted:
        return None
    return _ASSIGNMENT.match(word.parts[0].text)


def _is_command(rest: Sequence[Token]) -> bool:
    """Whether a command follows, so that an assignment is for it alone."""
    return any(isinstance(token, Word) and not _assigned(token) for token in rest)


def _holds(words: list[str]) -> bool | None:
    """Whether a test of texts or numbers holds; None where it needs a shell."""
    if words[:1] not in (["["], ["[["], ["test"]):
        return None
    inside = [word for word in words[1:] if word not in ("]", "]]")]
    negated = inside[:1] == ["!"]
    inside = inside[1:] if negated else inside
    result: bool | None = None
    if len(inside) == 2 and inside[0] in ("-n", "-z"):
        result = bool(inside[1]) == (inside[0] == "-n")
    elif len(inside) == 1:
        result = True if inside[0] == "-z" else False if inside[0] == "-n" else bool(inside[0])
    elif len(inside) == 3 and inside[1] in ("=", "==", "!="):
        result = (inside[0] == inside[2]) == (inside[1] != "!=")
    elif len(inside) == 3 and inside[1] in _NUMBERS and all(w.lstrip("-").isdigit() for w in (inside[0], inside[2])):
        a, b = int(inside[0]), int(inside[2])
        result = {"==": a == b, "!=": a != b, ">": a > b, ">=": a >= b, "<": a < b, "<=": a <= b}[_NUMBERS[inside[1]]]
    return result if result is None or not negated else not result
