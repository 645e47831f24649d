"""The settings of a run in small frozen groups; each component receives its own group, not the tree.

Field names are Megatron's own names. Derived numbers are properties, computed and never written back. The groups check
nothing when they are constructed: `rules` does, over all of them at once.
"""

from megalith.config.groups.data import DataConfig
from megalith.config.groups.lora import LoraSettings
from megalith.config.groups.model import ModelConfig
from megalith.config.groups.output import CheckpointConfig, LogConfig
from megalith.config.groups.parallel import LaunchConfig, ParallelConfig
from megalith.config.groups.training import OptimizerConfig, PrecisionConfig, ScheduleConfig, TrainConfig
from megalith.config.tokenizer import TokenizerConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LaunchConfig",
    "LogConfig",
    "LoraSettings",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainConfig",
]
