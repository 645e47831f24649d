"""The class of each family of models, and the models that users have registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megalith.config import ModelConfig
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.language_model import LanguageModel
from megalith.models.plain import build_registered
from megalith.models.t5 import T5

MODELS: Mapping[str, type[LanguageModel]] = {"gpt": GPT, "bert": Bert, "t5": T5}
"""Name of a family, as `--model-family` has it -> its class."""


def model_class(config: ModelConfig) -> Callable[..., LanguageModel]:
    """What constructs the model of a configuration; arguments as of `LanguageModel`."""
    return MODELS[config.model_family] if config.model is None else build_registered
