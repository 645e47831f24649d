"""The class of each family of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megalith.config import ModelConfig
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.language_model import LanguageModel, Stage
from megalith.models.t5 import T5
from megalith.nn.attention import SequenceMixer
from megalith.nn.moe.balance import Peers
from megalith.nn.recompute import Recompute
from megalith.nn.region import Region


class ModelClass(Protocol):
    """What makes a model of a family, or one stage of it; arguments as of `GPT`."""

    title: str

    def __call__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        region: Region | None = None,
        mixer: SequenceMixer | None = None,
        peers: Peers | None = None,
        stage: Stage | None = None,
        recompute: Recompute | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LanguageModel: ...


MODELS: Mapping[str, ModelClass] = {"gpt": GPT, "bert": Bert, "t5": T5}
"""Name of a family, as `--model-family` has it -> its class."""


def model_class(config: ModelConfig) -> ModelClass:
    """The class of the family of a configuration."""
    return MODELS[config.model_family]
