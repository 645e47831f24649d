"""Configuration of a run: declared once, read from flags and recipes, checked as a whole. Does not import torch."""

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
from megalith.config.load import check_groups, check_run, from_values, load
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
