"""Ask the program of today what a flag of training does; nothing is trained and torch is not imported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from megalith.config import RunConfig, from_values, load
from megalith.errors import ConfigError

_BASE = {
    "--num-layers": "4",
    "--hidden-size": "16",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "30",
}
_INSTEAD = {"--train-samples": "--train-iters", "--step-batch-size-schedule": "--global-batch-size"}


def words_of(flag: str, others: str = "") -> list[str]:
    """A whole command line: a small run, the other words that a flag needs, and the flag itself."""
    own = [*shlex.split(others), *shlex.split(flag)]
    base = {name: value for name, value in _BASE.items() if not any(_INSTEAD.get(word) == name for word in own)}
    return [*(word for pair in base.items() for word in pair), "--mock-data", *own]


def answer(flag: str, others: str = "") -> RunConfig | ConfigError:
    """The configuration, or the refusal."""
    try:
        return load(words_of(flag, others), {}, files=False)
    except ConfigError as error:
        return error


def setting(run: RunConfig | ConfigError, name: str) -> str:
    """The value of `group.setting` as JSON, if it was given."""
    if isinstance(run, ConfigError):
        return f"refused: {run}"
    group, _, field = name.partition(".")
    if field not in run.given:
        return "not given"
    return f"{name} = {json.dumps(getattr(getattr(run, group), field))}"


def without_effect(flag: str, run: RunConfig | ConfigError) -> str:
    """`accepted` where the flag changes nothing and a note says so."""
    if isinstance(run, ConfigError):
        return f"refused: {run}"
    if run != answer(""):
        return "has an effect"
    noted = {name for note in run.notes for name in note.needs_nothing}
    return "accepted" if flag.split()[0] in noted else "accepted without a note"


def refused(flag: str, run: RunConfig | ConfigError) -> str:
    """`refused` where one violation names the flag."""
    if not isinstance(run, ConfigError):
        return "accepted"
    name = shlex.split(flag)[0]
    naming = [violation for violation in run.violations if name in violation and "is not a flag" not in violation]
    return "refused" if naming and run.exit_code == 2 else f"refused without its name: {run}"


def through_values(run: RunConfig) -> RunConfig | ConfigError:
    """The same run by `from_values`."""
    values = {name: value for group in _given(run).values() for name, value in group.items()}
    try:
        return from_values(values, environ=_launched(run), files=False)
    except ConfigError as error:
        return error


def through_recipe(run: RunConfig, file: Path) -> RunConfig | ConfigError:
    """The same run by a recipe. TOML has no null."""
    lines = []
    for group, values in _given(run).items():
        lines += [
            f"[{group}]",
            *(f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None),
        ]
    file.write_text("\n".join(lines), encoding="utf-8")
    try:
        return load(["--config", str(file)], _launched(run), files=False)
    except ConfigError as error:
        return error


def _launched(run: RunConfig) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(run.launch.world_size)}


def _given(run: RunConfig) -> dict[str, dict[str, Any]]:
    """What was given, by group, but for the launch."""
    return {
        group: {name: value for name, value in values.items() if name in run.given}
        for group, values in run.to_dict().items()
        if group != "launch"
    }
