"""Construction of a checked `RunConfig` from defaults, recipe and flags, in rising precedence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.config.command_line import read_command_line
from megalith.config.environment import read_launch, tasks_without_srun
from megalith.config.families import FAMILIES
from megalith.config.fields import Setting
from megalith.config.from_args import DROPOUT, LORA_SETTINGS, MODEL_SETTINGS, TOKENIZER_FILES, settings_from
from megalith.config.reading import Reading, read_recipe
from megalith.config.rules import FILE_RULES, NOTICES, RULES
from megalith.config.rules.rule import Draft, Rule, UnusableError, unreadable
from megalith.config.run import Note, RunConfig, all_settings, group_types, resolved
from megalith.config.values import BadValue, checked_value, closest, out_of_range, value_from_words
from megalith.errors import ConfigError
from megalith.registry import EMPTY, IMPORT_FLAG, KINDS, TRUST_FLAG, Registry, collect

ArgsReader = Callable[[str, int | None], Mapping[str, Any] | None]
"""Reads the saved args of the checkpoint that a folder, or an iteration of it, holds; None if it holds none."""


def load(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    files: bool = True,
    saved_args: ArgsReader | None = None,
    registry: Registry | None = None,
    rules: Sequence[Rule] = (),
) -> RunConfig:
    """Return the configuration of a command line.

    Args:
        argv: the arguments after the name of the command.
        environ: the launcher's variables (torchrun, srun or mpirun); the process environment by default.
        files: whether data and tokenizer files must exist.
        saved_args: reader for `--use-checkpoint-args`; without it that flag has no effect.
        registry: registered objects; by default the modules that `argv` names are imported.
        rules: further rules, whose violations are listed with the others.

    Returns:
        The configuration; its `notes` are about flags without effect, one line each.

    Raises:
        ConfigError: lists every violation, with flag, value and remedy.
    """
    registry = imported(argv) if registry is None else registry
    flags = read_command_line(argv, registry)
    recipe = read_recipe(Path(flags.recipe), registry) if flags.recipe else Reading()
    _refuse_untrusted(flags.recipe, recipe.imports, registry)
    environ = os.environ if environ is None else environ
    launch = _read_environment(environ)
    nproc = flags.values.get("nproc", recipe.values.get("nproc"))
    if nproc is not None and nproc > 0 and "rank" not in launch.values:
        launch.values["world_size"] = launch.values["local_world_size"] = nproc
    elif not launch.problems and (tasks := tasks_without_srun(environ)) > 1:
        launch.notes.append(
            f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains alone; `srun` before the command "
            "starts all tasks, --nproc N starts N processes on this node"
        )
    readings: tuple[Reading, ...] = (launch, recipe, flags)
    sources_given = {name: value for reading in readings for name, value in reading.values.items()}
    if saved_args is not None:
        readings += (_read_checkpoint({**recipe.values, **flags.values}, saved_args, registry),)
    given = sources_given | readings[-1].values
    faulty = set().union(*(reading.faulty for reading in readings)) - _overridden(flags)
    problems = [problem for reading in readings for problem in reading.problems]
    run, more_problems = _build(given, faulty, (*(FILE_RULES if files else ()), *rules), registry)
    problems += more_problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return RunConfig(
        **_groups_of(run), notes=_notes(readings, run, sources_given), given=frozenset(given), registry=registry
    )


def imported(argv: Sequence[str], *, follows_recipe: bool = False) -> Registry:
    """Import the modules that --import and --hook of a command line name; return what they register.

    Args:
        follows_recipe: whether modules of the recipe are imported too if --trust-recipe is given.

    Raises:
        ConfigError: a module is missing or fails to import.
    """
    flags = read_command_line(argv)
    names = [*flags.imports, *flags.hooks]
    if follows_recipe and flags.trusts_recipe and flags.recipe:
        names += read_recipe(Path(flags.recipe)).imports
    return collect(names) if names else EMPTY


def _refuse_untrusted(recipe: str, imports: Sequence[str], registry: Registry) -> None:
    """Raise ConfigError for modules that a recipe imports and that the user has not allowed."""
    known = {one.name for one in registry.imports}
    if unknown := [name for name in imports if name not in known]:
        raise ConfigError(
            f"{recipe}: [run] import = {', '.join(unknown)} would run code of that name; if you trust it, give "
            f"{IMPORT_FLAG} {' '.join(unknown)} ({TRUST_FLAG} does for the commands that follow recipes)"
        )


def _read_checkpoint(given: Mapping[str, Any], saved_args: ArgsReader, registry: Registry) -> Reading:
    """Return the settings that `--use-checkpoint-args` takes from the checkpoint of `--load`; empty without it."""
    reading = Reading()
    folders = [folder for name in ("load", "pretrained_checkpoint") if (folder := given.get(name))]
    layout = bool(given.get("use_mp_args_from_checkpoint_args"))
    if not (given.get("use_checkpoint_args") or layout):
        return reading
    if not folders:
        reading.problems.append("--use-checkpoint-args needs --load, the folder of the checkpoint")
        return reading
    args = next((args for folder in folders if (args := saved_args(folder, given.get("ckpt_step")))), None)
    if args is None and given.get("num_layers") is None:
        reading.problems.append(
            f"--use-checkpoint-args: {' and '.join(folders)} {'hold' if folders[1:] else 'holds'} no checkpoint to "
            "take the model from; correct --pretrained-checkpoint or --load, or give the flags of a new model"
        )
        reading.faulty |= {*MODEL_SETTINGS, *TOKENIZER_FILES, "tokenizer_type"}
        return reading
    if args is None:
        reading.notes.append(f"--use-checkpoint-args: {folders[0]} holds no checkpoint yet: the flags count")
        return reading
    reading.values = settings_from(args, registry, layout=layout)
    if not given.get("use_tokenizer_model_from_checkpoint_args", True):
        for name in TOKENIZER_FILES:
            reading.values.pop(name, None)
        if "tokenizer_type" in given:
            reading.values.pop("tokenizer_type", None)
    reading.notes += _keep_given(reading.values, given)
    for name, value in reading.values.items():
        notes = f" (the command line says {given[name]})" if given.get(name, value) != value else ""
        reading.notes.append(f"Setting {name} to {value} from checkpoint{notes}")
    return reading


def _keep_given(taken: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Remove tokenizer, router dtype, dropout and LoRA that the user has given from a checkpoint's; return notes.

    Adapters of another rank or scale are refused when the checkpoint is read.
    """
    names = ("tokenizer_type", "tokenizer_model", "moe_router_dtype", *DROPOUT, *LORA_SETTINGS)
    kept = [name for name in names if name in given and given[name] != taken.get(name, given[name])]
    if "tokenizer_type" in kept or {"vocab_file", "merge_file"} & given.keys():  # files of two tokenizers do not mix
        for name in TOKENIZER_FILES:
            taken.pop(name, None)
    notes = [
        f"{all_settings()[name].flag} {given[name]}: kept; the checkpoint has {taken[name]}"
        for name in kept
        if name in taken
    ]
    for name in kept:
        taken.pop(name, None)
    return notes


def from_values(
    values: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    files: bool = True,
    registry: Registry = EMPTY,
) -> RunConfig:
    """Return the configuration of a flat mapping, setting name -> value, checked like a command line.

    Args:
        values: missing settings take their defaults. A list setting takes a list, a tuple or one value.
        environ: a launcher's variables, such as `os.environ`; one process if None.
        registry: what users have registered.

    Raises:
        ConfigError: lists every violation: unknown names, wrong types, values out of range, broken rules.
    """
    launch = _read_environment(environ or {})
    mapping = _read_mapping(values, registry)
    given = launch.values | mapping.values
    faulty = (launch.faulty - set(mapping.values)) | mapping.faulty
    run, problems = _build(given, faulty, FILE_RULES if files else (), registry)
    if problems := [*launch.problems, *mapping.problems, *problems]:
        raise ConfigError(problems)
    notes = _notes((mapping,), run, given)
    return RunConfig(**_groups_of(run), notes=notes, given=frozenset(given), registry=registry)


def _read_mapping(values: Mapping[str, Any], registry: Registry) -> Reading:
    """Read settings by name. Errors are collected in `problems` of the result instead of raised."""
    reading = Reading()
    for name, value in values.items():
        setting = all_settings(registry).get(name)
        if setting is None:
            near = closest(name.lstrip("-").replace("-", "_"), all_settings())
            hint = f"did you mean {near}?" if near else "see `megalith config --flags` for all of them"
            reading.problems.append(f"no setting is called {name}; {hint}")
            reading.faulty |= {near} if near else set()  # say no more of what was probably meant
            continue
        reading.take(setting, value, name, name)
    return reading


def check_groups(*groups: object) -> None:
    """Raise ConfigError if groups contain an invalid value or break a rule.

    `load` and `from_values` return checked groups; this checks groups that a program constructs or changes, wherever a
    model, an optimizer, a schedule or a dataset is built from them.

    Raises:
        ConfigError: lists every violation.
    """
    here: dict[str, Any] = {
        name: group for name, kind in group_types().items() for group in groups if isinstance(group, kind)
    }
    settings = [setting for setting in all_settings().values() if setting.group in here]
    values = {setting.name: getattr(here[setting.group], setting.name) for setting in settings}
    problems: list[str] = []
    unusable: set[str] = set()
    for setting in settings:
        if complaint := _illegal(setting, values[setting.name]):
            problems.append(f"{setting.name} = {values[setting.name]!r}: {complaint}")
            unusable.add(setting.name)
    absent: Any = _Absent()
    readable = {name: unreadable(group, unusable) for name, group in here.items()}
    run = RunConfig(**{name: readable.get(name, absent) for name in group_types()})
    draft = Draft(run, frozenset(setting.name for setting in settings if values[setting.name] != setting.default))
    problems += [message for rule in RULES if (message := rule.broken(draft))]
    if problems:
        raise ConfigError(problems)


def check_run(run: RunConfig) -> None:
    """Raise ConfigError if a configuration that was constructed or changed by a program breaks a rule."""
    check_groups(*_groups_of(run).values())


def _illegal(setting: Setting, value: Any) -> str:
    """Return why the value of a group's field is invalid; "" if it is valid."""
    if setting.many and value is not None and not isinstance(value, list | tuple):
        return "not a tuple"
    try:
        checked_value(setting, value)
    except BadValue as error:
        return str(error)
    return out_of_range(setting, value)


class _Absent:
    """Placeholder for a missing group."""

    def __getattr__(self, name: str) -> Any:
        raise UnusableError(name)


def _build(
    given: Mapping[str, Any], faulty: set[str], rules: Sequence[Rule], registry: Registry
) -> tuple[RunConfig, list[str]]:
    """Return the configuration, with None for missing values, and all errors in it."""
    problems: list[str] = []
    unusable = set(faulty)
    family = FAMILIES.get(str(given.get("model_family")))
    defaults = dict(family.defaults if family else {})
    if given.get("sft") and (family is None or family.objective == "causal"):
        defaults["calculate_per_token_loss"] = True
    values: dict[str, Any] = {}
    for setting in _chosen_settings(all_settings(registry), registry, given, problems):
        value = given.get(setting.name, defaults.get(setting.name, setting.default))
        values[setting.name] = value
        if setting.name in faulty:
            continue
        if setting.required and value is None:
            problems.append(f"{setting.flag} is required ({setting.about.help})")
            unusable.add(setting.name)
        elif complaint := out_of_range(setting, value):
            variable = setting.about.from_environment
            source = f"environment variable {variable}=" if setting.about.flagless else f"{setting.positive_flag} "
            shown = " ".join(map(str, value)) if setting.many else value
            problems.append(f"{source}{shown}: {complaint}")
            unusable.add(setting.name)
    values = resolved(values, registry, values)
    run = RunConfig(
        **{
            name: group(**{s.name: values[s.name] for s in all_settings().values() if s.group == name})
            for name, group in group_types().items()
        }
    )
    readable = {name: unreadable(group, unusable) for name, group in _groups_of(run).items()}
    draft = Draft(RunConfig(**readable) if unusable else run, frozenset(given))
    problems += [message for rule in (*RULES, *rules) if (message := rule.broken(draft))]
    return run, problems


def _chosen_settings(
    settings: Mapping[str, Setting], registry: Registry, given: Mapping[str, Any], problems: list[str]
) -> Iterator[Setting]:
    """Yield the settings of groups and chosen registered objects; settings given for other objects are errors."""
    chosen = {
        name
        for setting in all_settings().values()
        if setting.about.registers and (value := given.get(setting.name))
        for name in ([value] if isinstance(value, str) else value)
    }
    flags = {entry.name: KINDS[entry.kind] for entry in registry.entries}
    for setting in settings.values():
        if setting.group in group_types() or setting.group in chosen:
            yield setting
        elif setting.name in given:
            problems.append(
                f"{setting.positive_flag} {given[setting.name]}: it is a setting of {setting.group}, which is not "
                f"chosen; add {flags[setting.group]} {setting.group}, or leave it out"
            )


def _groups_of(run: RunConfig) -> dict[str, Any]:
    return {name: getattr(run, name) for name in group_types()}


def _overridden(flags: Reading) -> set[str]:
    """Return settings with a valid value from flags: a faulty value elsewhere is reported but does not hide others."""
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


def _notes(readings: Sequence[Reading], run: RunConfig, sources_given: Mapping[str, Any]) -> tuple[Note, ...]:
    draft = Draft(
        run, frozenset(sources_given)
    )  # without what a checkpoint adds, most of which its model has no use for
    notes = [Note(text) for reading in readings for text in reading.notes]
    notes += [Note(message) for notice in NOTICES if (message := notice.broken(draft))]
    notes += [Note(why, tuple(words)) for reading in readings for why, words in reading.nothing.items()]
    return tuple(notes)
