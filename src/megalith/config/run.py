"""Complete configuration of a training run, and its serialized form."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from megalith.config.fields import Setting, settings_of, with_choices
from megalith.config.groups import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)
from megalith.config.values import BadValue, checked_value
from megalith.errors import ConfigError
from megalith.layout import Layout, Recompute, Stages, read_parts, split_as_given, split_layers
from megalith.registry import EMPTY, IMPORT_FLAG, TRUST_FLAG, Entry, Registered, Registry
from megalith.schedules.batch_size import BatchSizeSchedule, constant, ramped, read_steps, stepped
from megalith.schedules.pipeline import grouped

_COMMAND_FLAGS = frozenset(("--config", "--help", "--help-all", IMPORT_FLAG, TRUST_FLAG))


@dataclass(frozen=True)
class Note:
    """Note about a value that was interpreted, or has no effect."""

    text: str  # one line
    # flags that were accepted without effect, for the reason in `text`; empty for other notes
    needs_nothing: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.needs_nothing:
            return self.text
        verb = "needs" if len(self.needs_nothing) == 1 else "need"
        return f"{', '.join(self.needs_nothing)} {verb} nothing here: {self.text}"


@dataclass(frozen=True)
class RunConfig:
    """Every setting of a run, by group.

    `notes` are about values that were interpreted or have no effect (`render.note_lines` for the console), `given` are
    the settings given by flag, recipe or environment, and `registry` holds the objects that --import registered. These
    three are not part of the configuration and are neither compared nor saved.
    """

    model: ModelConfig
    train: TrainConfig
    schedule: ScheduleConfig
    data: DataConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    registry: Registry = field(default=EMPTY, compare=False, repr=False)

    @property
    def data_parallel_size(self) -> int:
        """Return the number of model replicas."""
        return self.layout.dp

    @property
    def fully_sharded(self) -> bool:
        """Return whether weights are sharded over replicas (FSDP2); False with a single replica."""
        return self.parallel.fully_shards and self.layout.dp * self.layout.cp > 1

    @property
    def layout(self) -> Layout:
        """Return the number of ranks of each kind of parallelism."""
        parallel = self.parallel
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        cp = parallel.context_parallel_size
        dp = self.launch.world_size // (tp * cp * pp)
        own = parallel.expert_tensor_parallel_size if self.model.mixture else None
        etp = None if own == tp else own
        return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=parallel.expert_model_parallel_size, etp=etp)

    @property
    def stages(self) -> Stages:
        """Return the layers by `[pipeline stage][virtual stage]`; LayoutError if they do not divide."""
        parallel = self.parallel
        if parallel.pipeline_model_parallel_layout is not None:
            parts, model = read_parts(parallel.pipeline_model_parallel_layout), self.model
            return split_as_given(model.num_layers, parallel.pipeline_model_parallel_size, parts, model.predictions)
        return split_layers(
            self.model.num_layers,
            parallel.pipeline_model_parallel_size,
            parallel.virtual_stages(self.model.num_layers),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            embedding_counts=parallel.account_for_embedding_in_pipeline_split,
            loss_counts=parallel.account_for_loss_in_pipeline_split,
        )

    @property
    def recompute(self) -> Recompute | None:
        """Return which layers, or parts of layers, are recomputed in the backward pass; None for none.

        "core_attn" is dropped where attention saves no probabilities.
        """
        train = self.train
        if train.recompute_granularity != "full":
            parts = set(train.recomputed_parts)
            if not self.model.saves_attention_probabilities:
                parts.discard("core_attn")
            return Recompute(parts=frozenset(parts)) if parts else None
        assert train.recompute_method is not None and train.recompute_num_layers is not None, "a rule"
        return Recompute(train.recompute_method, train.recompute_num_layers)

    @property
    def pipeline_schedule(self) -> str:
        """Return the name of the pipeline schedule, with "auto" resolved."""
        virtual = self.parallel.virtual_stages(self.model.num_layers) > 1
        chosen = self.parallel.pipeline_schedule
        name = ("interleaved" if virtual else "1f1b") if chosen == "auto" else chosen
        return grouped(name, self.parallel.microbatch_group_size_per_vp_stage) if name == "interleaved" else name

    @cached_property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Return the global batch sizes; a constant size if the settings are invalid, which rules report."""
        train, unit = self.train, self.train.micro_batch_size * max(1, self.data_parallel_size)
        steps = read_steps(train.step_batch_size_schedule or "")
        if steps is not None:
            with suppress(ValueError):
                return stepped(steps, self.data.seq_length, unit)
        final = train.global_batch_size or unit
        if train.ramp_reaches(final):
            start, increment, samples = train.rampup_batch_size
            return ramped(start, increment, samples, final, unit)
        return constant(final, unit)

    @property
    def global_batch_size(self) -> int:
        """Return the samples of one step, given or derived; the final size if it grows."""
        return self.batch_sizes.final

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches that one process accumulates in a step at the end of the run."""
        return self.global_batch_size // self.batch_sizes.unit

    @property
    def eval_micro_batch_size(self) -> int:
        """Return the samples of one forward pass in an evaluation."""
        return self.train.eval_micro_batch_size or self.train.micro_batch_size

    @property
    def eval_micro_batches(self) -> int:
        """Return the micro-batches of one process in one evaluation iteration."""
        return self.eval_batch_size // (self.eval_micro_batch_size * max(1, self.data_parallel_size))

    @property
    def eval_batch_size(self) -> int:
        """Return the samples of one evaluation iteration, rounded down to whole micro-batches on all replicas."""
        unit = self.eval_micro_batch_size * max(1, self.data_parallel_size)
        return (self.train.eval_global_batch_size or self.global_batch_size) // unit * unit

    @property
    def train_iters(self) -> int:
        """Return the number of steps, whether the length is given in iterations or samples."""
        if self.train.train_iters is not None:
            return self.train.train_iters
        return self.batch_sizes.iterations_of(self.train.train_samples or 0)

    @property
    def registered(self) -> tuple[Registered, ...]:
        """Return the registered objects that this run uses."""
        values = (getattr(getattr(self, s.group), s.name) for s in all_settings().values() if s.about.registers)
        return tuple(
            item
            for value in values
            for item in (value if isinstance(value, tuple) else (value,))
            if isinstance(item, Registered)
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the groups as JSON-serializable dictionaries, tuples as lists; `from_dict` is the inverse.

        The settings of registered objects follow, each under the object's name.
        """
        groups = {name: _values(name, getattr(self, name)) for name in group_types()}
        return groups | {str(one): _values(str(one), one.settings) for one in self.registered if one.settings}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Mapping[str, Any]], registry: Registry = EMPTY) -> RunConfig:
        """Rebuild what `to_dict` made, with defaults for what is absent; ConfigError names what is unknown or lacks."""
        own = {entry.name for entry in registry.entries if entry.settings is not None}
        unknown = [
            f"saved configuration: no group called '{name}'" for name in saved if name not in {*group_types(), *own}
        ]
        if unknown:
            raise ConfigError(unknown)
        known = own.intersection(saved)
        given = {name: value for section in known for name, value in saved[section].items()}
        groups = {name: group_from_dict(name, resolved(saved.get(name, {}), registry, given)) for name in group_types()}
        return cls(**groups, registry=registry)


@cache
def group_types() -> Mapping[str, type]:
    """Return group name -> group class, in the order of declaration."""
    hints = typing.get_type_hints(RunConfig)
    return {item.name: hints[item.name] for item in dataclasses.fields(RunConfig) if item.compare}


def all_settings(registry: Registry = EMPTY) -> Mapping[str, Setting]:
    """Return name -> setting over all groups and the registered objects with settings; names are unique.

    Raises:
        ConfigError: A registered object uses a name that is already in use.
    """
    return _settings_with(registry)


@cache
def _settings_with(registry: Registry) -> Mapping[str, Setting]:
    own = {setting.name: setting for name, group in group_types().items() for setting in settings_of(name, group)}
    if registry is EMPTY:
        return own
    problems = []
    for setting in list(own.values()):
        if names := registry.names(setting.about.registers):
            known = (*setting.about.choices, *setting.about.later)
            problems += [
                f"{setting.positive_flag} {name} is Megalith's own; register yours under another name"
                for name in names
                if name in known
            ]
            own[setting.name] = with_choices(setting, names)
    sections: dict[str, Entry] = {}
    for entry in registry.entries:
        if entry.settings is None:
            continue
        if entry.name in group_types() or sections.setdefault(entry.name, entry) is not entry:
            problems.append(f"the settings of {entry.name}: [{entry.name}] is taken; register it under another name")
            continue
        try:
            settings = settings_of(entry.name, entry.settings)
        except ConfigError as error:
            problems += error.violations
            continue
        for setting in settings:
            field_name = f"the field {setting.name} of {entry.settings.__name__}"
            same = next((other.group for other in own.values() if _conflict(other, setting)), None)
            if same or not _COMMAND_FLAGS.isdisjoint(setting.spellings):
                where = f"a flag of [{same}]" if same else "a flag of the command"
                problems.append(
                    f"{setting.positive_flag} of {entry.name} is {where} already; give {field_name} another name"
                )
                continue
            own[setting.name] = setting
            if complaint := _complaint_about_default(setting):
                problems.append(
                    f"{setting.positive_flag}: {field_name} has the default {setting.default!r}: {complaint}"
                )
    if problems:
        raise ConfigError(problems)
    return own


def _conflict(one: Setting, other: Setting) -> bool:
    """Return whether two settings share a name or a flag."""
    flags, others = ({*each.spellings, *each.off_spellings, *each.about.shorthands} for each in (one, other))
    return one.name == other.name or not flags.isdisjoint(others)


def _complaint_about_default(setting: Setting) -> str:
    try:
        value = setting.default if setting.required else checked_value(setting, setting.default)
    except BadValue as error:
        return str(error)
    return "not a tuple" if isinstance(value, tuple) and not isinstance(setting.default, tuple) else ""


def _values(section: str, group: Any) -> dict[str, Any]:
    kind: type = type(group)
    return {setting.name: plain(getattr(group, setting.name)) for setting in settings_of(section, kind)}


def plain(value: Any) -> Any:
    """Convert a value for JSON and Megatron: tuples to lists, registered objects to their names."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Registered) else value


def resolved(values: Mapping[str, Any], registry: Registry, own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace names of registered objects in the values of settings by the objects.

    Args:
        own: Settings of registered objects by name; missing ones take their defaults.
    """
    settings, found = all_settings(), dict(values)
    for name, value in values.items():
        kind = settings[name].about.registers if name in settings else ""
        if not kind or value is None:
            continue
        items = [
            _resolve(kind, item, registry, own) for item in (value if isinstance(value, tuple | list) else [value])
        ]
        found[name] = tuple(items) if isinstance(value, tuple | list) else items[0]
    return found


def _resolve(kind: str, name: Any, registry: Registry, own: Mapping[str, Any]) -> Any:
    entry = None if isinstance(name, Registered) or not isinstance(name, str) else registry.find(kind, name)
    if entry is None:
        return name
    if entry.settings is None:
        return Registered(entry)
    fields = settings_of(entry.name, entry.settings)
    given = {
        field.name: tuple(value) if field.many and value is not None else value
        for field in fields
        if field.name in own
        for value in (own[field.name],)
    }
    missing = {field.name: None for field in fields if field.required and field.name not in given}
    return Registered(entry, entry.settings(**given, **missing))


def group_from_dict(name: str, saved: Mapping[str, Any]) -> Any:
    """Rebuild a group from its saved dictionary, lists to tuples; ConfigError names unknown and missing settings."""
    settings = {setting.name: setting for setting in settings_of(name, group_types()[name])}
    problems = [f"saved configuration: group '{name}' has no setting '{key}'" for key in saved if key not in settings]
    problems += [
        f"saved configuration: group '{name}' lacks '{setting.name}'"
        for setting in settings.values()
        if setting.required and setting.name not in saved
    ]
    if problems:
        raise ConfigError(problems)
    values = {key: tuple(value) if settings[key].many and value is not None else value for key, value in saved.items()}
    return group_types()[name](**values)
