"""Configuration as text: recipe, differences from defaults, and reference of all flags."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config.command_line import RECIPE_FLAG
from megalith.config.fields import Setting
from megalith.config.known import known_flags
from megalith.config.run import RunConfig, all_settings, group_types
from megalith.config.values import legal_range
from megalith.registry import EMPTY, IMPORT_FLAG, TRUST_FLAG, Registry

_WIDTH = 100
_COLUMN = 38
_COMMAND_LINES = [
    f"  {RECIPE_FLAG + ' FILE.toml':{_COLUMN - 2}}recipe to start from; flags override it",
    f"  {IMPORT_FLAG + ' MODULE ...':{_COLUMN - 2}}Python modules that register objects of your own",
    f"  {TRUST_FLAG:{_COLUMN - 2}}import the modules that the recipe names, too",
]
COMMON_SETTINGS = {
    "Model": """
        num_layers hidden_size num_attention_heads max_position_embeddings position_embedding_type normalization swiglu
        """,
    "Data": "data_path mock_data seq_length tokenizer_type tokenizer_model vocab_file merge_file",
    "Training": "micro_batch_size global_batch_size train_iters eval_interval seed",
    "Optimizer and learning rate": "optimizer lr min_lr lr_decay_style lr_warmup_iters weight_decay",
    "Precision": "bf16 fp16",
    "Parallelism": """
        nproc tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size use_distributed_optimizer
        use_torch_fsdp2
        """,
    "Checkpoints": "save save_interval load",
    "Logging": "log_interval trackers tensorboard_dir wandb_project",
}
"""Heading -> settings that most runs give: what `megalith train --help` shows, in this order."""

_GENERATED = "<!-- Generated: `megalith config --flags --markdown > docs/flags.md`; a test keeps it current. -->"


@dataclass(frozen=True)
class Difference:
    """Setting that differs from its default."""

    name: str
    value: Any
    default: Any


def differences(run: RunConfig) -> list[Difference]:
    """Return the settings of a run that are required or differ from their defaults, in the order of declaration."""
    values = [(setting, _value(run, setting)) for setting in all_settings().values() if setting.group != "launch"]
    return [
        Difference(setting.name, value, setting.default)
        for setting, value in values
        if setting.required or value != setting.default
    ]


def note_lines(run: RunConfig) -> list[str]:
    """Return the notes for the console: one line each, and one for all flags without effect."""
    lines = [str(note) for note in run.notes if not note.needs_nothing]
    idle = list(dict.fromkeys(flag for note in run.notes for flag in note.needs_nothing))
    if idle:
        lines.append(f"accepted, nothing needed here (reasons in docs/flags.md): {' '.join(idle)}")
    return lines


def recipe_text(run: RunConfig) -> str:
    """Return the complete configuration as a recipe; `# default` marks differences, comments mark unset values.

    The text read by `--config` gives the same configuration.
    """
    imports = tuple(one.name for one in run.registry.imports)
    sections = [f"[run]\nimport = {_toml(imports)}"] if imports else []
    for group in group_types():
        if group == "launch":
            continue
        lines = [_recipe_line(setting, _value(run, setting)) for setting in _settings(group)]
        sections.append("\n".join([f"[{group}]", *lines]))
    known = all_settings(run.registry)
    for one in run.registered:
        own = [setting for setting in known.values() if setting.group == one and one.settings is not None]
        lines = [_recipe_line(setting, getattr(one.settings, setting.name)) for setting in own]
        sections += ["\n".join([f"[{one}]", *lines])] if own else []
    return "\n\n".join(sections) + "\n"


def given_recipe(values: Mapping[str, Any]) -> str:
    """Return only the given values as a recipe."""
    sections = []
    for group in group_types():
        given = [setting for setting in _settings(group) if setting.name in values and group != "launch"]
        if given:
            lines = [f"{setting.name} = {_toml(values[setting.name])}" for setting in given]
            sections.append("\n".join([f"[{group}]", *lines]))
    return "\n\n".join(sections) + "\n"


def common_flags_text() -> str:
    """Return the help text of the most common flags."""
    settings = all_settings()
    lines = list(_COMMAND_LINES)
    for heading, names in COMMON_SETTINGS.items():
        lines += ["", heading, *(line for name in names.split() for line in _terminal_lines(settings[name]))]
    lines += ["", "--help-all shows all flags."]
    return "\n".join(lines) + "\n"


def flags_text(registry: Registry = EMPTY) -> str:
    """Return the help text of all flags that have an effect, including those of registered objects."""
    lines = list(_COMMAND_LINES)
    parts = [part for group, kind in group_types().items() for part in _parts(group, kind, registry)]
    for entry in registry.entries:
        own = [one for one in all_settings(registry).values() if one.group == entry.name]
        parts.append((f"Settings of {entry.kind} {entry.name}", own))
    for heading, settings in parts:
        flagged = [line for setting in settings if setting.spellings for line in _terminal_lines(setting)]
        lines += ["", heading, *flagged] if flagged else []
    lines += ["", "Every other flag of Megatron is accepted or refused with a reason: docs/flags.md."]
    return "\n".join(lines) + "\n"


def flags_markdown() -> str:
    """Return the reference page of flags, docs/flags.md."""
    return "\n".join([*_page_head(), *_page_settings(), *_page_others()]) + "\n"


def _page_head() -> Iterator[str]:
    yield from ("# Flags", "", _GENERATED, "")
    yield from textwrap.wrap(
        "Command lines of Megatron-LM run unchanged. Each flag has one of three statuses: it works (the tables by "
        "group), it is accepted and needs nothing here (with the reason), or it is refused (with the reason). A flag "
        "that is none of these is an error that names the nearest one.",
        width=120,
    )
    yield ""
    yield from textwrap.wrap(
        "The settings of a group stand in a recipe under the name of the group, as in `[model]` and "
        f"`num_layers = 12`; `{RECIPE_FLAG} FILE.toml` reads one. Defaults come first, then the recipe, then flags. "
        "`megalith config` with the flags of a run prints its complete recipe. Every boolean has a `--no-` form.",
        width=120,
    )


def _page_settings() -> Iterator[str]:
    for group, kind in group_types().items():
        for number, (heading, settings) in enumerate(_parts(group, kind)):
            yield from ("", f"### {heading}" if number else f"## [{group}] {heading}", "")
            yield from ("| flag | value | default | meaning |", "|---|---|---|---|")
            yield from map(_page_row, settings)


def _page_row(setting: Setting) -> str:
    names = [f"`{flag}`" for flag in [*_documented_spellings(setting), *_shorthands(setting)]]
    if setting.about.from_environment:
        names.append(f"environment variable `{setting.about.from_environment}`")
    meaning = _meaning(setting)
    if setting.about.later:
        verb = "comes" if len(setting.about.later) == 1 else "come"
        meaning += f" ({', '.join(setting.about.later)} {verb} with {setting.about.later_with})"
    if setting.about.nothing:
        meaning += f". Needs nothing here: {setting.about.nothing}"
    if setting.about.ours:
        meaning += " (not a flag of Megatron)"
    default = "required" if setting.required else _plain(setting.default)
    return f"| {', '.join(names)} | {_value_kind(setting)} | {default} | {meaning} |".replace("  ", " ")


def _page_others() -> Iterator[str]:
    accepted: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for flag in known_flags().values():
        values = f" with {', '.join(f'`{value}`' for value in flag.accepted)}" if flag.accepted else ""
        if flag.why:
            accepted.setdefault(flag.why, []).append(f"`{flag.flag}`{values}")
        if flag.refusal:
            refused.setdefault(flag.refusal, []).append(f"`{flag.flag}`{' with another value' if values else ''}")
    yield from ("", "## Accepted, nothing needed", "")
    yield from (f"- {', '.join(flags)}: {why}." for why, flags in accepted.items())
    yield from ("", "## Refused in this version", "", "With Megatron's default value these are accepted.", "")
    yield from (f"- {', '.join(flags)}: {reason}." for reason, flags in refused.items())


def _terminal_lines(setting: Setting) -> list[str]:
    spellings = ", ".join(_documented_spellings(setting))
    placeholder = "" if setting.kind is bool else f" {_placeholder(setting)}"
    left = ", ".join([f"  {spellings}{placeholder}", *_shorthands(setting)])
    details = "" if setting.kind is bool or setting.default in (None, (), "") else f" ({_plain(setting.default)})"
    details = " (required)" if setting.required else details
    right = textwrap.wrap(_meaning(setting) + details, _WIDTH - _COLUMN)
    if len(left) >= _COLUMN:
        return [*_broken_at_choices(left), *(" " * _COLUMN + line for line in right)]
    return [f"{left:{_COLUMN}}{right[0]}", *(" " * _COLUMN + line for line in right[1:])]


def documented(setting: Setting) -> tuple[str, str, tuple[str, ...]]:
    """Return what --help shows of a setting beside its flags: placeholder of the value, meaning and choices."""
    return "" if setting.kind is bool else _placeholder(setting), _meaning(setting), setting.about.choices


def _broken_at_choices(left: str) -> list[str]:
    """Return a flag and its choices, wrapped between choices."""
    lines = [""]
    for part in left.split("|"):
        if lines[-1] and len(lines[-1]) + len(part) >= _WIDTH:
            lines.append(" " * 8)
        lines[-1] += part + "|"
    return [line.removesuffix("|") if line is lines[-1] else line for line in lines]


def _meaning(setting: Setting) -> str:
    """Return the help of a setting, worded for its documented flag."""
    switches_off = setting.kind is bool and setting.default is True
    return f"switch off: {setting.about.help}" if switches_off else setting.about.help


def _documented_spellings(setting: Setting) -> list[str]:
    if setting.kind is bool and setting.default is True:
        return [setting.flag]
    return list(setting.spellings)


def _shorthands(setting: Setting) -> list[str]:
    return [f"{flag} (= {value})" for flag, value in setting.about.shorthands.items()]


def _placeholder(setting: Setting) -> str:
    if setting.about.choices:
        return "|".join(setting.about.choices)
    placeholder = {int: "N", float: "X"}.get(setting.kind, "TEXT")
    return f"{placeholder} ..." if setting.many else placeholder


def _value_kind(setting: Setting) -> str:
    if setting.kind is bool:
        return ""
    if setting.about.choices:
        return ", ".join(setting.about.choices)
    if setting.kind is str:
        return "text ..." if setting.many else "text"
    number = setting.about.unit or ("whole number" if setting.kind is int else "number")
    return f"{number}, {legal_range(setting)}" if legal_range(setting) else number


def _recipe_line(setting: Setting, value: Any) -> str:
    if value is None:
        return f"# {setting.name} is not set"
    line = f"{setting.name} = {_toml(value)}"
    if setting.required or value == setting.default:
        return line
    return f"{line}  # default {_plain(setting.default)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _plain(value: Any) -> str:
    """Return a default as text."""
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _settings(group: str) -> list[Setting]:
    return [setting for setting in all_settings().values() if setting.group == group]


def _parts(group: str, kind: type, registry: Registry = EMPTY) -> Iterator[tuple[str, list[Setting]]]:
    """Yield heading and settings of a group: first its own, then those of each base class."""
    settings = all_settings(registry)
    for part in kind.__mro__:
        own = [settings[name] for name in inspect.get_annotations(part) if name in settings]
        if own:
            yield (part.__doc__ or group).splitlines()[0], own


def _value(run: RunConfig, setting: Setting) -> Any:
    return getattr(getattr(run, setting.group), setting.name)
