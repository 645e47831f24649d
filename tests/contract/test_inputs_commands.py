"""Commands and scripts: their flags, and the exit codes of whole command lines."""

from __future__ import annotations

from pathlib import Path

from . import programs, scenario
from .lines import complain, read


def test_flags_of_commands(tmp_path: Path) -> None:
    """No flag is gone or takes something else, and none has become required."""
    now = programs.flags(tmp_path)
    recorded = {(command, flag): about for command, flag, about in read("flags_of_commands")}
    found = [
        f"{command} {flag}: was {about}, is {now.get((command, flag), 'gone')}"
        for (command, flag), about in recorded.items()
        if not programs.still(about, now.get((command, flag), "values gone"))
    ]
    found += [f"{' '.join(key)}: is required now" for key in now.keys() - recorded.keys() if "required" in now[key]]
    assert not found, complain("flags_of_commands", found)


def test_exit_codes(tmp_path: Path) -> None:
    found = [
        f"{words}: was {recorded}, is {code}"
        for (words, recorded), code in zip(read("exit_codes"), scenario.exit_codes(tmp_path), strict=True)
        if code != recorded
    ]
    assert not found, complain("exit_codes", found)
