"""Settings of runs: which make two runs other experiments, and which make their losses measure something else.

The settings are those of config.json, name -> value: absent ones have their defaults, and derived ones, such as the
global batch size, their values.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.config.changes import HARMLESS, effect_of, value_text
from megalith.config.run import RunConfig, all_settings, plain
from megalith.errors import ConfigError, DataError

Values = Mapping[str, Any]
_SAMPLING = (
    *("seq_length", "eval_interval", "eval_iters", "start_eval_at_iter", "full_validation"),
    "eval_global_batch_size",
)
# Harmless when a run continues, not when it begins or when its loss is compared.
_COUNTED = (
    *("init_method_std", "use_cpu_initialization", "make_vocab_size_divisible_by", "vocab_file", "merge_file"),
    *("pretrained_checkpoint", *_SAMPLING),
)
_NOT_COUNTED = (
    *("seed", "rank", "local_rank", "local_world_size", "master_addr", "master_port", "launcher", "nproc"),
    *("max_restarts", "num_dataset_builder_threads"),
)
_TOKENIZER = tuple(name for name, setting in all_settings().items() if setting.group == "tokenizer")
_OBJECTIVE = ("model_family", "loss", "label_smoothing", "eod_mask_loss")
_DATA = ("data_path", "data_args_path", "per_split_data_args_path", "split", "mock_data", "data_source")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run folder; DataError if its config.json cannot be read."""
    file = folder / "config.json"
    try:
        return settings_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DataError(f"{file}: not a configuration ({error}); give the folder of a run of megalith train") from error


def settings_of(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a configuration by group, as `RunConfig.to_dict` writes it."""
    found = {name: value for section in config.values() for name, value in section.items()}
    defaults = {name: plain(setting.default) for name, setting in all_settings().items() if not setting.required}
    return defaults | found | _derived(config)


def _derived(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of settings that follow from others; none for a configuration with registered objects."""
    try:
        run = RunConfig.from_dict(config)
    except (ConfigError, TypeError):
        return {}
    return {
        "global_batch_size": run.global_batch_size,
        "eval_global_batch_size": run.eval_batch_size,
        "train_iters": run.train_iters,
        "ffn_hidden_size": run.model.ffn_size,
        "kv_channels": run.model.head_size,
    }


def counts(name: str, values: Values) -> bool:
    """Return whether runs with other values of a setting are other experiments, not other seeds of one."""
    setting = all_settings().get(name)
    if setting is None:  # of a registered object
        return True
    if name == "load":  # else the run continues the one that `--load` names
        return bool(values.get("finetune"))
    return name in _COUNTED or (name not in _NOT_COUNTED and effect_of(setting) != HARMLESS)


def differing(configurations: Sequence[Values]) -> dict[str, tuple[str, ...]]:
    """Return flag -> values as text of the settings that count and differ."""
    first = configurations[0]
    return {
        _flag(name): tuple(value_text(values.get(name)) for values in configurations)
        for name in dict.fromkeys(name for values in configurations for name in values)
        if any(identity(values.get(name)) != identity(first.get(name)) for values in configurations)
        and any(counts(name, values) for values in configurations)
    }


def incomparable(base: Values, other: Values, *, validation: bool) -> str:
    """Return why losses of two runs, on validation or on training data, do not measure the same, "" if they do."""
    if flags := _unequal(base, other, _TOKENIZER):
        instead = "compare bits per byte: megalith evaluate RUN --task text --data FILE"
        return f"other tokenizers ({flags}), on which a loss per token depends; {instead}"
    if flags := _unequal(base, other, _OBJECTIVE):
        return f"other training objectives ({flags}); compare runs of one"
    own = "valid_data_path" if validation else "train_data_path"
    if flags := _unequal(base, other, (own,) if base.get(own) and other.get(own) else (own, *_DATA)):
        return f"other {'validation' if validation else 'training'} data ({flags}); evaluate both on the same"
    return ""


def measured_otherwise(base: Values, other: Values) -> str:
    """Return the flags by which validation losses are of other samples or lengths, "" for none."""
    return _unequal(base, other, _SAMPLING)


def _unequal(base: Values, other: Values, names: Iterable[str]) -> str:
    return ", ".join(_flag(name) for name in names if not _same(base.get(name), other.get(name)))


def identity(value: Any) -> str:
    """Return a text that is equal for equal values, and for two names of one file or dataset."""
    if isinstance(value, list | tuple):
        return repr([identity(item) for item in value])
    if isinstance(value, str) and any(Path(value + ending).is_file() for ending in ("", ".bin")):
        return repr(str(Path(value).resolve()))
    return repr(value)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, or paths of files with equal contents."""
    if identity(one) == identity(other) or not (isinstance(one, str) and isinstance(other, str)):
        return identity(one) == identity(other)
    return Path(one).is_file() and Path(other).is_file() and filecmp.cmp(one, other, shallow=False)


def _flag(name: str) -> str:
    setting = all_settings().get(name)
    return setting.positive_flag if setting else name
