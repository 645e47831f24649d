"""Commands and scripts: their flags, and the exit codes of whole command lines."""

from __future__ import annotations

import pytest

from . import programs, scenario
from .lines import complain, read

Outcomes = list[programs.Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    """Of the command lines that tell their flags, and of those with a recorded exit code."""
    folder, asking = tmp_path_factory.mktemp("commands"), programs.ASKING_FOR_FLAGS
    found = programs.run([*asking, *scenario.command_lines(folder)], folder)
    return found[: len(asking)], found[len(asking) :]


def test_flags_of_commands(outcomes: tuple[Outcomes, Outcomes]) -> None:
    """No flag is gone or takes something else, and none has become required."""
    now = programs.flags(outcomes[0])
    recorded = {(command, flag): about for command, flag, about in read("flags_of_commands")}
    found = [
        f"{command} {flag}: was {about}, is {now.get((command, flag), 'gone')}"
        for (command, flag), about in recorded.items()
        if not programs.still(about, now.get((command, flag), "values gone"))
    ]
    found += [f"{' '.join(key)}: is required now" for key in now.keys() - recorded.keys() if "required" in now[key]]
    assert not found, complain("flags_of_commands", found)


def test_exit_codes(outcomes: tuple[Outcomes, Outcomes]) -> None:
    found = [
        f"{words}: was {recorded}, is {outcome.code}"
        for (words, recorded), outcome in zip(read("exit_codes"), outcomes[1], strict=True)
        if str(outcome.code) != recorded
    ]
    assert not found, complain("exit_codes", found)
