"""The class of each family of models."""

from __future__ import annotations

from collections.abc import Mapping

from megalith.config import ModelConfig
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.language_model import LanguageModel
from megalith.models.t5 import T5

MODELS: Mapping[str, type[LanguageModel]] = {"gpt": GPT, "bert": Bert, "t5": T5}
"""Name of a family, as `--model-family` has it -> its class."""


def model_class(config: ModelConfig) -> type[LanguageModel]:
    """The class of the family of a configuration."""
    return MODELS[config.model_family]
