"""The process behind `programs.run`: reads command lines as JSON, answers with how each ended. Not imported."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 120


class _Found(BaseException):
    """The command has made its parser."""


def main() -> None:
    """Answer on the standard output."""
    repository, *requests = json.load(sys.stdin)
    del sys.path[0]  # this folder
    _import_once()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([_run(words, Path(repository), Path(folder)) for words in requests]))


def _import_once() -> None:
    """Import here what most commands import, so that those that are forked find it."""
    names = Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines()
    for name in (*sys.argv[1:], *(name.rpartition(".")[0] for name in names if not name.startswith("#"))):
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):  # at a length of 8 tokens the index of 100,000 made-up documents takes seconds
        importlib.import_module("megalith.data.mock").NUM_DOCUMENTS = 2000
    gc.collect()
    gc.freeze()


def _run(words: list[str], repository: Path, folder: Path) -> tuple[int, str, list[tuple[str, str, str]]]:
    said, found, when = folder / "said", folder / "found", ""
    found.write_text("[]")
    asks = words[0] == "flags"
    words = words[1:] if asks else words
    reader = words[0] != "unread"
    words = words if reader else words[1:]
    if words[0] == "after":
        _, when, numbers, *words = words
    child = os.fork()
    if child == 0:
        _redirect(said, reader)
        os._exit(_child(words, repository, found if asks else None))
    if when:
        _interrupt(child, said, when, [signal.Signals[name] for name in numbers.split(",")])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, said.read_text(encoding="utf-8", errors="replace"), json.loads(found.read_text())


def _redirect(said: Path, reader: bool) -> None:
    """Give a command no input, and a file for its output or a pipe that nobody reads any more."""
    log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    output = log
    if not reader:
        end, output = os.pipe()
        os.close(end)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(log, 2)


def _interrupt(child: int, said: Path, when: str, numbers: list[signal.Signals]) -> None:
    """Send signals to a command when it has printed a text."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (said.exists() and when in said.read_text(encoding="utf-8", errors="replace")):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return  # it has ended
        if time.monotonic() > deadline:
            numbers = [signal.SIGKILL]
            break
        time.sleep(0.01)
    for number in numbers:
        time.sleep(0.3)
        os.kill(child, number)


def _child(words: list[str], repository: Path, found: Path | None) -> int:
    parsers: list[argparse.ArgumentParser] = []
    if found is not None:
        _listen(parsers)
    try:
        code = _exit_code(words, repository)
    except BaseException as error:
        if not isinstance(error, _Found):
            traceback.print_exc()
        code = 1
    if found is not None:
        command = " ".join(words[:2] if words[0] == "megalith" else words[:1])
        rows = [row for parser in parsers for row in _rows(command, parser)]
        found.write_text(json.dumps(rows))
    sys.stdout.flush(), sys.stderr.flush()
    return code


def _exit_code(words: list[str], repository: Path) -> int:
    while words[0] == "env":
        name, _, value = words[1].partition("=")
        os.environ[name] = value
        words = words[2:]
    sys.argv = [words[0] if words[0] == "megalith" else str(repository / words[0]), *words[1:]]
    try:
        if words[0] == "megalith":
            runpy.run_module("megalith", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _listen(parsers: list[argparse.ArgumentParser]) -> None:
    """Have argparse tell its parsers in place of reading words."""

    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        parsers.append(self)
        raise _Found

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        parsers.append(self)
        return argparse.Namespace(**{action.dest: action.default for action in self._actions}), list(args or ())

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _rows(command: str, parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    rows, position = [], 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                rows += _rows(f"{command} {name}", inner)
            continue
        if not action.option_strings:
            position += 1
        for flag in action.option_strings or [f"argument {position}"]:
            rows.append((command, flag, _about(action)))
    return rows


def _about(action: argparse.Action) -> str:
    """What a flag takes: `values 1; default 4; choices a b; required; hidden`."""
    words = [f"values {1 if action.nargs is None else action.nargs}"]
    default = action.default
    if not (default is None or default is False or default in ([], argparse.SUPPRESS)):
        words.append(f"default {' '.join(map(str, default)) if isinstance(default, list | tuple) else default}")
    if action.choices is not None:
        words.append(f"choices {' '.join(map(str, action.choices))}")
    if action.required and action.option_strings:
        words.append("required")
    if isinstance(action, argparse._AppendAction | argparse._ExtendAction):
        words.append("repeatable")
    if action.help == argparse.SUPPRESS:
        words.append("hidden")
    return "; ".join(words)


if __name__ == "__main__":
    main()
