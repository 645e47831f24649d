"""From the words of a command line to a checked `RunConfig`: defaults < recipe < flags, and all violations at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.config.checkpoint_args import settings_from
from megalith.config.command_line import read_command_line
from megalith.config.environment import read_launch, tasks_without_srun
from megalith.config.file_rules import FILE_RULES
from megalith.config.reading import Reading
from megalith.config.recipe import read_recipe
from megalith.config.rule import Draft
from megalith.config.rules import NOTICES, RULES
from megalith.config.run import Note, RunConfig, all_settings, group_types
from megalith.config.values import BadValue, out_of_range, value_from_words
from megalith.errors import ConfigError

ArgsReader = Callable[[str, int | None], Mapping[str, Any] | None]
"""Reads the saved args of the checkpoint that a folder, or an iteration of it, holds; None if it holds none."""


FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"tokenizer_type": "BertWordPieceLowerCase"},
    "t5": {"tokenizer_type": "BertWordPieceLowerCase"},
}
"""What a family of models takes for a setting that is not given, as Megatron's entry scripts do."""


def load(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    files: bool = True,
    saved_args: ArgsReader | None = None,
) -> RunConfig:
    """The configuration that a command line asks for.

    Args:
        argv: the words after the name of the command.
        environ: where the launcher's RANK, WORLD_SIZE and LOCAL_RANK are, or those of srun or mpirun; the process
            environment unless given.
        files: whether data and tokenizer files must exist.
        saved_args: what `--use-checkpoint-args` reads with; without it that flag only counts as given.

    Returns:
        The configuration; its `notes` say what was accepted and has no effect, one line each.

    Raises:
        ConfigError: with every violation found, each naming the flag, the value and a remedy.
    """
    flags = read_command_line(argv)
    recipe = read_recipe(Path(flags.recipe)) if flags.recipe else Reading()
    environ = os.environ if environ is None else environ
    launch = _read_environment(environ)
    nproc = flags.values.get("nproc", recipe.values.get("nproc"))
    if nproc is not None and "rank" not in launch.values:
        launch.values["world_size"] = launch.values["local_world_size"] = nproc
    elif not launch.problems and (tasks := tasks_without_srun(environ)) > 1:
        launch.notes.append(
            f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains alone; `srun` before the command "
            "starts all tasks, --nproc N starts N processes on this node"
        )
    readings: tuple[Reading, ...] = (launch, recipe, flags)
    asked = {name: value for reading in readings for name, value in reading.values.items()}
    if saved_args is not None:
        readings += (_read_checkpoint({**recipe.values, **flags.values}, saved_args),)
    given = asked | readings[-1].values
    faulty = set().union(*(reading.faulty for reading in readings)) - _overridden(flags)
    problems = [problem for reading in readings for problem in reading.problems]
    run, more_problems = _build(given, faulty, files=files)
    problems += more_problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return RunConfig(**_groups_of(run), notes=_notes(readings, run, asked), given=frozenset(given))


def _read_checkpoint(given: Mapping[str, Any], saved_args: ArgsReader) -> Reading:
    """What `--use-checkpoint-args` takes from the checkpoint of `--load`; nothing without that flag."""
    reading, folder = Reading(), given.get("load") or given.get("pretrained_checkpoint")
    layout = bool(given.get("use_mp_args_from_checkpoint_args"))
    if not (given.get("use_checkpoint_args") or layout):
        return reading
    if folder is None:
        reading.problems.append("--use-checkpoint-args needs --load, the folder of the checkpoint")
        return reading
    args = saved_args(folder, given.get("ckpt_step"))
    if args is None:
        reading.notes.append(f"--use-checkpoint-args: {folder} holds no checkpoint yet: the flags count")
        return reading
    reading.values = settings_from(args, layout=layout)
    if not given.get("use_tokenizer_model_from_checkpoint_args", True):
        reading.values.pop("tokenizer_model", None)
        if "tokenizer_type" in given:
            reading.values.pop("tokenizer_type", None)
    for name, value in reading.values.items():
        said = f" (the command line says {given[name]})" if given.get(name, value) != value else ""
        reading.notes.append(f"Setting {name} to {value} from checkpoint{said}")
    return reading


def from_values(
    values: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, files: bool = True
) -> RunConfig:
    """A checked configuration from a flat mapping, setting name -> value, for use as a library.

    Args:
        values: what is not here takes its default.
        environ: where a launcher's variables are, such as `os.environ`; one process if None.
        files: whether data and tokenizer files must exist.

    Raises:
        ConfigError: with every violation found, and every name that is not a setting.
    """
    launch = _read_environment(environ or {})
    problems = [*launch.problems, *(f"no setting is called {name}" for name in values if name not in all_settings())]
    known = launch.values | {
        name: tuple(value) if all_settings()[name].many else value
        for name, value in values.items()
        if name in all_settings()
    }
    run, more_problems = _build(known, launch.faulty, files=files)
    if problems + more_problems:
        raise ConfigError(problems + more_problems)
    return run


def _build(given: Mapping[str, Any], faulty: set[str], *, files: bool) -> tuple[RunConfig, list[str]]:
    """The configuration with None for what is missing, and what is wrong with it."""
    problems = []
    unusable = set(faulty)
    defaults = FAMILY_DEFAULTS.get(str(given.get("model_family")), {})
    values = {}
    for setting in all_settings().values():
        value = given.get(setting.name, defaults.get(setting.name, setting.default))
        values[setting.name] = value
        if setting.name in faulty:
            continue
        if setting.required and value is None:
            problems.append(f"{setting.flag} is required ({setting.about.help})")
            unusable.add(setting.name)
        elif complaint := out_of_range(setting, value):
            problems.append(f"{setting.positive_flag} {value}: {complaint}")
            unusable.add(setting.name)
    run = RunConfig(
        **{
            name: group(**{s.name: values[s.name] for s in all_settings().values() if s.group == name})
            for name, group in group_types().items()
        }
    )
    draft = Draft(run, frozenset(given))
    rules = (*RULES, *FILE_RULES) if files else RULES
    problems += [message for rule in rules if (message := rule.broken(draft, unusable))]
    return run, problems


def _groups_of(run: RunConfig) -> dict[str, Any]:
    return {name: getattr(run, name) for name in group_types()}


def _overridden(flags: Reading) -> set[str]:
    """Settings that the flags give well, so that a faulty value elsewhere is only reported, not missed."""
    return set(flags.values) - flags.faulty


def _read_environment(environ: Mapping[str, str]) -> Reading:
    reading = Reading()
    try:
        environ = read_launch(environ)
    except ConfigError as error:
        reading.problems += error.violations
        reading.faulty |= {setting.name for setting in all_settings().values() if setting.about.from_environment}
        return reading
    for setting in all_settings().values():
        variable = setting.about.from_environment
        if not variable or variable not in environ:
            continue
        try:
            reading.values[setting.name] = value_from_words(setting, [environ[variable]])
        except BadValue as error:
            reading.problems.append(f"environment variable {variable}={environ[variable]}: {error}")
            reading.faulty.add(setting.name)
    return reading


def _notes(readings: Sequence[Reading], run: RunConfig, asked: Mapping[str, Any]) -> tuple[Note, ...]:
    draft = Draft(run, frozenset(asked))  # without what a checkpoint adds, most of which its model has no use for
    notes = [Note(text) for reading in readings for text in reading.notes]
    notes += [Note(message) for notice in NOTICES if (message := notice.broken(draft, set()))]
    notes += [Note(why, tuple(words)) for reading in readings for why, words in reading.nothing.items()]
    return tuple(notes)
