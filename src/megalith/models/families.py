"""The class of each family of models, its Hugging Face formats, and the models that users have registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megalith.config import ModelConfig
from megalith.models import huggingface_bert, huggingface_deepseek, huggingface_gpt2, huggingface_llama, huggingface_t5
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.language_model import LanguageModel
from megalith.models.plain import build_registered
from megalith.models.t5 import T5

MODELS: Mapping[str, type[LanguageModel]] = {"gpt": GPT, "bert": Bert, "t5": T5}
"""Name of a family, as `--model-family` has it -> its class."""

_FORMATS = (huggingface_gpt2, huggingface_llama, huggingface_deepseek, huggingface_bert, huggingface_t5)
HUGGING_FACE = {family.model_type: family for module in _FORMATS for family in module.FAMILIES}
"""`model_type` of a config.json -> its family in Hugging Face's format, in the order in which exports try them."""


def model_class(config: ModelConfig) -> Callable[..., LanguageModel]:
    """Return the constructor of a configuration's model; arguments as of `LanguageModel`."""
    return MODELS[config.model_family] if config.model is None else build_registered
