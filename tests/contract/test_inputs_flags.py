"""The flags of training, by what they do: they work, are accepted without effect, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.errors import ConfigError

from . import training
from .lines import complain, read


def test_flags_that_work() -> None:
    found = []
    for flag, recorded, *others in read("flags_that_work"):
        now = training.setting(training.answer(flag, *others), recorded.partition(" ")[0])
        found += [f"{flag}: was {recorded}, is {now}"] if now != recorded else []
    assert not found, complain("flags_that_work", found)


def test_settings_by_name_and_by_recipe(tmp_path: Path) -> None:
    """All settings but those of the launch can be given to `from_values`, and in a recipe where they are not None."""
    found = []
    settings = {columns[1]: columns for columns in read("flags_that_work")}
    for flag, recorded, *others in settings.values():
        run, name = training.answer(flag, *others), recorded.partition(" ")[0]
        if isinstance(run, ConfigError) or name.startswith("launch."):
            continue
        if (now := training.setting(training.through_values(run), name)) != recorded:
            found.append(f"from_values: {recorded}: is {now}")
        recipe = training.through_recipe(run, tmp_path / "recipe.toml")
        if not recorded.endswith(" = null") and (now := training.setting(recipe, name)) != recorded:
            found.append(f"recipe: {recorded}: is {now}")
    assert not found, complain("flags_that_work", found)


def test_flags_accepted_without_effect() -> None:
    found = []
    for (flag,) in read("flags_without_effect"):
        if (now := training.without_effect(flag, training.answer(flag))) not in ("accepted", "has an effect"):
            found.append(f"{flag}: was accepted with a note, is {now}")
    assert not found, complain("flags_without_effect", found)


def test_flags_refused_by_name() -> None:
    """One that works now is an addition; one that is accepted and does nothing is not."""
    found = []
    for (flag,) in read("flags_refused"):
        run = training.answer(flag)
        now = training.refused(flag, run)
        if now != "refused" and training.without_effect(flag, run) != "has an effect":
            found.append(f"{flag}: was refused, is {now}")
    assert not found, complain("flags_refused", found)


def test_values_refused_by_name() -> None:
    found = [
        f"{flag}: was refused, is {now}"
        for flag, *others in read("values_refused")
        if (now := training.refused(flag, training.answer(flag, *others))) != "refused"
    ]
    assert not found, complain("values_refused", found)


def test_the_command_names_every_refused_flag_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for (flag,) in read("flags_refused")]
    assert main(["train", *training.words_of(" ".join(flags))]) == 2
    said = capsys.readouterr().err
    assert [flag for flag in flags if flag.split()[0] not in said] == []
