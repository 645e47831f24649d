"""What a program imports: names, signatures, errors, and the fields of the configuration."""

from __future__ import annotations

import pytest

import megalith
from megalith.config import RunConfig, load
from megalith.errors import ConfigError, MegalithError

from . import library, training
from .lines import complain, lost, read


def test_fields_of_the_configuration() -> None:
    found = lost("run_config", library.fields())
    assert not found, complain("run_config", found)


def test_errors_and_their_exit_codes() -> None:
    found = lost("errors", library.error_classes())
    assert not found, complain("errors", found)


def test_an_error_of_the_configuration_has_all_its_violations() -> None:
    with pytest.raises(MegalithError) as caught:
        load(training.words_of("--num-layers 0 --seq-length x --no-such-flag"), {}, files=False)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value.violations, tuple)
    for flag in ("--num-layers", "--seq-length", "--no-such-flag"):
        assert [line for line in caught.value.violations if flag in line], flag
    assert ConfigError("one").violations == ("one",)


def test_signatures() -> None:
    found = []
    for name, recorded in read("signatures"):
        now = library.without_additions(recorded, library.signature(name))
        found += [f"{name}({recorded}) is {name}({now})"] if now != recorded else []
    assert not found, complain("signatures", found)


def test_names_can_be_imported() -> None:
    found = []
    for (name,) in read("names"):
        try:
            library.resolve(name)
        except ImportError as error:
            found.append(f"{name}: {error}")
    assert not found, complain("names", found)


def test_the_configuration_survives_its_dictionary() -> None:
    run = load(
        training.words_of("--rampup-batch-size 2 2 40 --num-experts 4 --moe-aux-loss-coeff 0.1 0.2"), {}, files=False
    )
    assert RunConfig.from_dict(run.to_dict()) == run


def test_what_a_run_accepted_is_in_its_notes_and_what_it_was_given_in_given() -> None:
    run = load(training.words_of("--lazy-mpu-init True --lr 0.5"), {}, files=False)
    assert [note.needs_nothing for note in run.notes if note.needs_nothing] == [("--lazy-mpu-init",)]
    assert {"lr", "num_layers"} <= run.given and "min_lr" not in run.given
    assert all(isinstance(str(note), str) and note.text for note in run.notes)


def test_the_version_is_a_text() -> None:
    assert megalith.__version__[0].isdigit()


def test_launchers_that_are_understood() -> None:
    found = [
        f"{words}: was {recorded}, is {now}"
        for words, recorded in read("launchers")
        if (now := library.place(words)) != recorded
    ]
    assert not found, complain("launchers", found)


def test_environment_variables_that_are_known() -> None:
    known = library.variables()
    found = [name for (name,) in read("environment") if name not in known]
    assert not found, complain("environment", found)


def test_extras_commands_targets_and_files() -> None:
    there = set(library.packaging())
    found = [line for (line,) in read("packaging") if line not in there]
    assert not found, complain("packaging", found)
