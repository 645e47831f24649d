"""Add what is new to the record: `python -m tests.contract.record`. Nothing in it is changed or removed by this.

The record is what other people's programs and command lines hold on to. Text files hold it, one fact a line, and a test
of each compares today's program with it. A test fails where a line no longer holds, never because something was added.
To remove a line is a decision of its own, which the changelog names.

A new flag of training: write `--flag VALUE | group.setting = ?` into `flags_that_work.txt`, with the other words that
it needs as a third column; this fills in the value. An exit code: write `WORDS | ?` into `exit_codes.txt`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from . import library, programs, scenario, training
from .lines import add, read, write


def main() -> None:
    """Complete all files."""
    add("run_config", library.fields())
    add("errors", library.error_classes())
    add("signatures", {(name,): library.signature(name) for name in library.CALLED})
    write("names", [*read("names"), *((name,) for name in library.documented_names())])
    write("packaging", [*read("packaging"), *((line,) for line in library.packaging())])
    write("flags_that_work", [_completed(*columns) for columns in read("flags_that_work")])
    launchers = [(words, library.place(words) if place == "?" else place) for words, place in read("launchers")]
    write("launchers", launchers)
    with TemporaryDirectory() as folder:
        add("flags_of_commands", programs.flags(programs.run(programs.ASKING_FOR_FLAGS, Path(folder))))
        _complete_exit_codes(Path(folder))


def _completed(flag: str, effect: str, *others: str) -> tuple[str, ...]:
    if not effect.endswith(" = ?"):
        return (flag, effect, *others)
    return (flag, training.setting(training.answer(flag, *others), effect.partition(" ")[0]), *others)


def _complete_exit_codes(folder: Path) -> None:
    outcomes = programs.run(scenario.command_lines(folder), folder)
    rows = [
        (words, str(outcome.code) if recorded == "?" else recorded)
        for (words, recorded), outcome in zip(read("exit_codes"), outcomes, strict=True)
    ]
    write("exit_codes", rows, ordered=True)


if __name__ == "__main__":
    main()
