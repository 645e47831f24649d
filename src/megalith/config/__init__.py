"""Configuration of a run: declared once, read from flags and recipes, checked as a whole. Does not import torch."""

import importlib
from typing import TYPE_CHECKING, Any

from megalith.config.tokenizer import TokenizerConfig

if TYPE_CHECKING:
    from megalith.config.build import check_groups, check_run, from_values, load
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
        TrainConfig,
    )
    from megalith.config.run import Note, RunConfig, all_settings, group_from_dict, group_types
    from megalith.config.saved_args import megatron_args

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LaunchConfig",
    "LogConfig",
    "ModelConfig",
    "Note",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainConfig",
    "all_settings",
    "check_groups",
    "check_run",
    "from_values",
    "group_from_dict",
    "group_types",
    "load",
    "megatron_args",
]


def __getattr__(name: str) -> Any:
    """Import all other settings when one of these names is first used: preprocessing needs those of tokenizers only."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("groups", "run", "build", "saved_args"):
        found = importlib.import_module(f"{__name__}.{module}")
        if name in vars(found):
            return getattr(found, name)
    raise AssertionError(f"{name} is declared in __all__ only")
