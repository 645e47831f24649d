"""Run commands and scripts of today, each in a process of its own that is forked from one that has torch imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.warm import PRELOADED

import megalith

from .lines import REPOSITORY

_SOURCE = Path(megalith.__file__).resolve().parents[1]
_RUNNER = Path(__file__).with_name("runner.py")
_WITHOUT_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_", "OMPI_", "PMI_", "MEGALITH_")
_WITH_A_PARSER = (
    *("megalith quickstart", "megalith preprocess", "megalith data", "megalith generate", "megalith serve"),
    *("megalith evaluate", "megalith checkpoint", "megalith schedule", "megalith compare"),
    *("megalith ladder", "megalith doctor", "megalith completion"),
    *("tools/checkpoint_util.py", "tools/checkpoint/convert.py", "tools/run_text_generation_server.py"),
    *("tools/preprocess_data.py", "tasks/main.py"),
)


@dataclass(frozen=True)
class Outcome:
    """How a command line ended.

    Attributes:
        code: exit code, negative for the signal that killed it.
        text: all that it printed.
        flags: where its parser was asked for, (command, flag) -> what the flag takes.
    """

    code: int
    text: str
    flags: Mapping[tuple[str, str], str]


def run(command_lines: Sequence[Sequence[str]], folder: Path) -> list[Outcome]:
    """Run command lines one after the other in a folder.

    Args:
        command_lines: `megalith` or the path of a script in this repository, and its words. With `flags` in front a
            command ends where it would read its words, and tells its flags.
        folder: where they run.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_WITHOUT_A_LAUNCHER)}
    environment |= {"PYTHONPATH": str(_SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, str(_RUNNER), *PRELOADED],
        input=json.dumps([str(REPOSITORY), *map(list, command_lines)]),
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment,
        text=True,
        check=True,
    )
    return [
        Outcome(code, text, {(command, flag): about for command, flag, about in flags})
        for code, text, flags in json.loads(child.stdout)
    ]


ASKING_FOR_FLAGS = [["flags", *name.split(), "--contract"] for name in _WITH_A_PARSER]
"""Command lines whose outcomes tell the flags of all commands and scripts but those of training, which are settings."""


def flags(outcomes: Iterable[Outcome]) -> dict[tuple[str, ...], str]:
    """Return (command, flag) -> what it takes, of all outcomes."""
    return {key: about for outcome in outcomes for key, about in outcome.flags.items()}


def still(recorded: str, now: str) -> bool:
    """Whether a flag takes what it took: as many values, the same default, and at least the same choices."""
    was, given = _parts(recorded), _parts(now)
    return (
        was["values"] == given["values"]
        and was.get("default") == given.get("default")
        and ("choices" not in given or set(was.get("choices", [])) <= set(given["choices"]) and "choices" in was)
        and not ("required" in given and "required" not in was)
        and not ("repeatable" in was and "repeatable" not in given)
    )


def _parts(about: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in (part.split(" ") for part in about.split("; ") if part)}
