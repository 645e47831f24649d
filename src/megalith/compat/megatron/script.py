"""Interpreter of bash launch scripts, without a shell: which programs they start, with which arguments.

A script is reduced to the commands that it would run, in order, with their variables expanded. Supported are
assignments, arrays, `export`, `if` and `case` on variables, functions, `eval` of a text, and scripts inside the script:
texts after `bash -c` and here-documents for a shell, also through `sbatch` or `srun`. Of a loop the first pass is read.
Text that only a shell could expand, such as the output of a command, is kept literally; notes name what was not
followed.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from megalith.compat.megatron.script_words import Operator, Part, Token, Variables, Word, is_known, plain, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SEPARATORS = ("\n", ";", "&&", "||", "|", "&", ";;")
_REDIRECTIONS = (">", ">>", "<", ">&", "&>", "<<", "<<-", "<<<")
_KEYWORDS = ("then", "else", "do", "{", "}", "!", "time", "function")
_SHELLS = ("bash", "sh", "zsh", "dash")
_READ_SCRIPTS = (*_SHELLS, "sbatch", "ssh")  # run their standard input
_MAX_DEPTH = 20  # nesting of functions and scripts; recursion may be infinite
_MAX_RUNS = 1000  # of functions and scripts in all; a function that calls itself twice would make a million
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt},
    **{"-ge": operator.ge, "-lt": operator.lt, "-le": operator.le},
}


@dataclass(frozen=True)
class Command:
    """Command of a script: its words, of which the first is the program, and its first line."""

    words: tuple[str, ...]
    line: int


@dataclass
class Script:
    """Result of reading a script."""

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)  # environment variables of the commands
    # options of `#SBATCH` lines: "nodes", "ntasks", "ntasks-per-node"
    directives: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be followed, one line each


def read_script(text: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Script:
    """Read a script started with these arguments (`$1`, `$2` and so on) and environment variables."""
    reader = _Interpreter(Variables(environ or {}, arguments))
    reader.read(text)
    script = reader.script
    if missing := reader.variables.missing:
        numbered = any(name[1:].isdigit() for name in missing)
        hint = "; append the arguments of the script to the command" if numbered else ""
        script.notes.append(f"{', '.join(missing)}: not set in the script, taken as empty{hint}")
    if commands := list(dict.fromkeys(reader.variables.commands)):
        script.notes.append(f"kept literally, as it needs a shell: {', '.join(commands)}")
    script.exported = {name: plain(value) for name, value in script.exported.items()}
    script.commands = [Command(tuple(map(plain, command.words)), command.line) for command in script.commands]
    return script


_DIRECTIVE = re.compile(r"(?:--(nodes|ntasks|ntasks-per-node)|-(N|n))[= ]?(\d+)\b")
_SLURM_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}


def _directives(text: str) -> dict[str, str]:
    """Return the options of the `#SBATCH` lines that concern processes."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    found = [match for line in lines for match in _DIRECTIVE.finditer(line)]
    return {match[1] or {"N": "nodes", "n": "ntasks"}[match[2]]: match[3] for match in found}


class _Interpreter:
    """Single pass over the statements of a script."""

    def __init__(self, variables: Variables) -> None:
        self.variables, self.script = variables, Script()
        self._skipping: list[bool] = []  # for each enclosing `if`: whether its current branch is skipped
        self._taken: list[bool] = []  # for each enclosing `if`: whether one of its branches has been run
        self._functions: dict[str, list[Token]] = {}
        self._outside: tuple[str, ...] = ()  # words before the shell that reads the current text
        self._depth, self._followed = 0, 0
        self._line: int | None = None  # line of the script, for commands of a nested text

    def read(self, text: str) -> None:
        """Run a script: the outer one, or one inside it."""
        asked = _directives(text)
        self.script.directives |= asked
        # sbatch sets these in the job; the caller's environment takes precedence.
        given = {name: value for what, value in asked.items() for name in _SLURM_VARIABLES[what]}
        self.variables.environ = given | dict(self.variables.environ)
        self.run(tokens(text))

    def run(self, stream: Sequence[Token]) -> None:
        rest = list(stream)
        while rest:
            self._statement(rest)

    def _run_nested(self, stream: Sequence[Token], outside: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        """Run a function or a nested script with its arguments and the words before its shell."""
        self._followed += 1
        if self._depth >= _MAX_DEPTH or self._followed > _MAX_RUNS:
            note = f"recursive functions or scripts are followed to a depth of {_MAX_DEPTH} and {_MAX_RUNS} runs"
            self.script.notes += [] if note in self.script.notes else [note]
            return
        before = self.variables.arguments, self._outside, self._skipping, self._taken
        self.variables.arguments, self._outside = arguments, (*self._outside, *outside)
        self._skipping, self._taken, self._depth = [], [], self._depth + 1
        self.run(stream)
        self.variables.arguments, self._outside, self._skipping, self._taken = before
        self._depth -= 1

    def _run_text(self, text: str, line: int, arguments: Sequence[str], outside: Sequence[str] = ()) -> None:
        """Run a text of the script; its commands count as those of its line."""
        before, self._line = self._line, self._line or line
        self._run_nested(tokens(text), outside, arguments)
        self._line = before

    def _statement(self, rest: list[Token]) -> None:
        """Take one statement off the stream and run it."""
        statement: list[Token] = []
        depth = 0
        while rest:
            token = rest.pop(0)
            if isinstance(token, Operator):
                depth += (token.text == "(") - (token.text == ")")
                # `if [ A ] && [ B ]` is one condition, elsewhere && ends a statement.
                joins = token.text in ("&&", "||") and _plain_head(statement) in ("if", "elif")
                if depth <= 0 and token.text in _SEPARATORS and not joins:
                    break
            statement.append(token)
        while statement and isinstance(statement[0], Word) and _plain(statement[0]) in _KEYWORDS:
            self._branch(_plain(statement.pop(0)))
        if statement:
            self._act(statement, rest)

    def _branch(self, word: str) -> None:
        if word == "else" and self._skipping:
            self._skipping[-1] = self._taken[-1]

    def _act(self, statement: list[Token], rest: list[Token]) -> None:
        """Run a statement; `case` and functions also take their parts off `rest`, the statements that follow."""
        head = _plain(statement[0]) if isinstance(statement[0], Word) else ""
        if head in ("if", "elif"):
            self._test(statement[1:], statement[0].line, first=head == "if")
        elif head == "fi":
            if self._skipping:
                self._skipping.pop(), self._taken.pop()
        elif any(self._skipping):
            return
        elif name := _function_name(statement):
            self._functions[name] = _block(statement, rest)
        elif head == "case":
            self._case(statement, rest)
        elif head in ("for", "while", "until"):
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
            self.script.notes.append(f"line {line}: this `if` needs a shell; its branches are skipped")
        self._skipping[-1], self._taken[-1] = not holds, bool(holds)

    def _condition(self, condition: list[Token]) -> bool | None:
        """Evaluate tests joined by `&&` and `||`, from left to right as bash does; None if that needs a shell."""
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

    def _case(self, statement: list[Token], rest: list[Token]) -> None:
        """Run the branch of `case WORD in PATTERN) ... ;; esac` whose pattern matches the word."""
        whole, depth = list(statement), 1
        while rest and depth:
            token = rest.pop(0)
            depth += {"case": 1, "esac": -1}.get(_plain(token), 0)
            whole.append(token)
        value = self.variables.text(whole[1]) if len(whole) > 1 and isinstance(whole[1], Word) else ""
        inside = whole[3:-1]
        while inside:
            patterns = list[str]()
            while inside:
                token = inside.pop(0)
                if isinstance(token, Word):
                    patterns.append(self.variables.text(token))
                elif token.text == ")":
                    break
            body, depth = list[Token](), 0
            while inside:
                token = inside.pop(0)
                depth += {"case": 1, "esac": -1}.get(_plain(token), 0)
                if depth == 0 and isinstance(token, Operator) and token.text == ";;":
                    break
                body.append(token)
            if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                self.run(body)
                return

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
        words, document = self._words(rest)
        if words[:1] == ["eval"]:
            self._run_text(" ".join(words[1:]), line, self.variables.arguments)
        elif words[:1] == ["shift"]:
            self.variables.arguments = self.variables.arguments[1:]
        elif words and words[0] in self._functions:
            self._run_nested(self._functions[words[0]], arguments=words[1:])
        elif (place := _shell_text(words)) is not None:
            self._run_text(words[place], line, words[place + 2 :], words[:place])
        elif document and any(PurePath(word).name in _READ_SCRIPTS for word in words):
            self.script.directives |= _directives(document)
            self._run_text(document, line, (), words)
        elif words[:1] in (["."], ["source"]) and len(words) > 1:
            self.script.notes.append(f"line {self._line or line}: {plain(words[1])} is not read")
        elif words:
            self._other_scripts(words, line)
            self.script.commands.append(Command((*self._outside, *words), self._line or line))

    def _other_scripts(self, words: Sequence[str], line: int) -> None:
        """Note the script files that a command starts."""
        for word in words:
            if word.endswith(".sh") and words[0] not in ("echo", "printf", "chmod", "cp", "mv"):
                self.script.notes.append(f"line {self._line or line}: it starts {plain(word)}, which is not read")

    def _assign(self, match: re.Match[str], rest: list[Token], own: dict[str, str], declaring: str) -> None:
        """Take `NAME=value` or `NAME=(...)` off the statement and assign it."""
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
            if declaring or not _is_command(rest):  # `A=1 command` sets A for that command alone
                values[name] = own[name]

    def _words(self, statement: list[Token]) -> tuple[list[str], str]:
        """Return the words of a command without redirections, and the here-document that it reads."""
        words: list[str] = []
        document = ""
        rest = list(statement)
        while rest:
            token = rest.pop(0)
            if isinstance(token, Word):
                words += self.variables.expand(token)
            elif token.text in _REDIRECTIONS:
                if token.glued and words and words[-1].isdigit():  # a file descriptor, as in 2>&1
                    words.pop()
                if rest and isinstance(rest[0], Word):
                    target = rest.pop(0)
                    if token.text.startswith("<<") and isinstance(target, Word):
                        document = self.variables.text(target)
        return words, document


def _shell_text(words: Sequence[str]) -> int | None:
    """Return the index of SCRIPT in `... bash -c SCRIPT ...`; None if there is none."""
    shell = next((place for place, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    for place in range(shell + 1, len(words) - 1) if shell is not None else ():
        if not words[place].startswith("-"):
            return None
        if not words[place].startswith("--") and "c" in words[place]:  # -c may be one of several letters: -lc
            return place + 1
    return None


def _function_name(statement: Sequence[Token]) -> str:
    """Return the name of the function that a statement begins to define; empty for any other statement."""
    marks = [token.text if isinstance(token, Operator) else _plain(token) for token in statement[:4]]
    names = bool(marks) and re.fullmatch(r"[\w.:-]+", marks[0])
    return marks[0] if names and (marks[1:3] == ["(", ")"] or marks[1:2] == ["{"]) else ""


def _block(statement: Sequence[Token], rest: list[Token]) -> list[Token]:
    """Take the statements between the braces of a function off the stream."""
    opening = next((place for place, token in enumerate(statement) if _plain(token) == "{"), None)
    inside = list(statement[opening + 1 :]) if opening is not None else []
    depth = 1 if opening is not None else 0
    if inside:
        inside.append(Operator(";", statement[0].line, False))  # the separator that ended the statement
    while rest:
        token = rest.pop(0)
        depth += {"{": 1, "}": -1}.get(_plain(token), 0)
        if depth == 0 and _plain(token) == "}":
            break
        if depth and not (depth == 1 and not inside and _plain(token) == "{"):
            inside.append(token)
    return inside


def _plain_head(statement: Sequence[Token]) -> str:
    """Return the first word of a statement after `then` and similar words."""
    heads = [_plain(token) for token in statement]
    return next((head for head in heads if head not in _KEYWORDS), "")


def _plain(token: Token) -> str:
    """Return an unquoted word as written; empty for any other token."""
    if isinstance(token, Operator) or len(token.parts) != 1 or token.parts[0].quoted:
        return ""
    return token.parts[0].text


def _assigned(word: Token) -> re.Match[str] | None:
    if isinstance(word, Operator) or not word.parts or word.parts[0].quoted:
        return None
    return _ASSIGNMENT.match(word.parts[0].text)


def _is_command(rest: Sequence[Token]) -> bool:
    """Return whether a command follows, so that an assignment is for it alone."""
    return any(isinstance(token, Word) and not _assigned(token) for token in rest)


def _holds(words: list[str]) -> bool | None:
    """Evaluate a test of texts or numbers; None if it needs a shell."""
    if words[:1] not in (["["], ["[["], ["test"]) or not all(is_known(word) for word in words):
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
        result = _NUMBERS[inside[1]](int(inside[0]), int(inside[2]))
    return result if result is None or not negated else not result


# Options of torchrun and torch.distributed.launch -> keys of `Launch.options`; `_SWITCHES` take no value.
_OPTIONS = {
    "nproc-per-node": "processes",
    "nnodes": "hosts",
    "num-gpus": "processes",
    "num-nodes": "hosts",
    "node-rank": "host",
    "master-addr": "address",
    "master-port": "port",
}
_SWITCHES = ("use-env", "standalone", "no-python", "run-path", "m", "module", "use_env")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run", "deepspeed")
_PRINTERS = ("echo", "printf")
_TASKS = ("srun", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Launch:
    """Program with its flags, and the launcher that starts it."""

    program: str  # path of the .py file, as the script writes it
    flags: tuple[str, ...]  # its arguments
    launcher: str  # "torchrun", "torch.distributed.launch", "deepspeed", "srun", "mpirun" or "python"
    options: dict[str, str]  # launcher options: processes (per host), hosts, host, address, port
    line: int  # of the script

    @property
    def name(self) -> str:
        """Return the file name of the program."""
        return PurePath(self.program).name

    @property
    def processes(self) -> int | None:
        """Return the processes per host; None if the script gives no number."""
        return _positive_int(self.options.get("processes", "1"))

    @property
    def hosts(self) -> int | None:
        """Return the number of hosts; None if the script gives no number."""
        return _positive_int(self.options.get("hosts", "1"))


def find_launch(script: Script) -> list[Launch]:
    """Return the Python programs that a script starts, in order, without helpers such as `mkdir`."""
    found = [_launch(command, script.directives) for command in script.commands]
    return [launch for launch in found if launch is not None]


def _launch(command: Command, directives: Mapping[str, str]) -> Launch | None:
    words = list(command.words)
    program = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if program is None or words[0] in _PRINTERS:
        return None
    before, flags = words[:program], words[program + 1 :]
    if any(word.endswith(".sh") for word in before):  # a script that passes its arguments on, which may be one text
        flags = [piece for word in flags for piece in (word.split() if word.lstrip().startswith("--") else [word])]
    launcher = next((PurePath(word).name for word in before if PurePath(word).name in _LAUNCHERS), "")
    launcher = launcher or next((PurePath(word).name for word in before if PurePath(word).name in _TASKS), "")
    runs = any(PurePath(word).name.startswith("python") for word in before) or program == 0
    if not launcher and not runs:
        return None
    options = _task_options(before, directives) if launcher in _TASKS else _launcher_options(before)
    return Launch(words[program], tuple(flags), launcher or "python", options, command.line)


def _task_options(words: Sequence[str], directives: Mapping[str, str]) -> dict[str, str]:
    """Return processes per host and hosts of srun or mpirun; its own options go before directives."""
    said = dict(directives)
    names = {"N": "nodes", "nodes": "nodes", "ntasks-per-node": "ntasks-per-node", "npernode": "ntasks-per-node"}
    names |= {"n": "ntasks", "np": "ntasks", "ntasks": "ntasks"}
    for place, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names and (has_value or place + 1 < len(words)):
            said[names[name]] = value if has_value else words[place + 1]
    hosts, each, tasks = (said.get(name, "") for name in ("nodes", "ntasks-per-node", "ntasks"))
    if not each and tasks.isdigit():  # --ntasks counts over all hosts
        each = str(int(tasks) // int(hosts)) if hosts.isdigit() and int(hosts) else tasks
    return {name: value for name, value in (("processes", each), ("hosts", hosts)) if value}


def _launcher_options(words: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.lstrip("-").partition("=")
        said = _OPTIONS.get(name.replace("_", "-"))
        if not word.startswith("-") or name in _SWITCHES:
            continue
        if said is not None and (has_value or rest):
            options[said] = value if has_value else rest.pop(0)
    return options


def _positive_int(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) > 0 else None
