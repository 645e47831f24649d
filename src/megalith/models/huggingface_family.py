"""A family of Hugging Face: models that share a class of transformers, their config.json and their tensors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megalith.config import ModelConfig
from megalith.models.huggingface_tensors import TheirTensor


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_NO_PART_OF_THE_MODEL = words(
    """
    _name_or_path _commit_hash _from_model_config _attn_implementation_autoset architectures model_type dtype
    torch_dtype transformers_version auto_map tokenizer_class task_specific_params finetuning_task id2label label2id
    problem_type use_cache output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop n_ctx pretraining_tp gradient_checkpointing
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    reorder_and_upcast_attn use_bfloat16 torchscript pruned_heads chunk_size_feed_forward is_encoder_decoder is_decoder
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens remove_invalid_values
    prefix unsloth_version unsloth_fixed transformers.js_config predict_special_tokens output_past _num_labels n_special
    is_llama_config initializer_factor
    """
)


class Reading:
    """Strict reader of a config.json: checks values, and records which keys were read and all problems."""

    def __init__(self, config: Mapping[str, Any], absent: Mapping[str, Any]) -> None:
        self._config, self._absent = config, absent
        self._seen = set(_NO_PART_OF_THE_MODEL)
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as it is; the family's default or `default` if the key is absent."""
        self._seen.add(key)
        return self._config.get(key, self._absent.get(key, default))

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1; `default` replaces an absent key and null."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        said = "is missing" if value is None else f"is {value!r}"
        self.problems.append(f"{key} {said}; it must be a whole number of at least 1")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.problems.append(f"{key} is {value!r}; it must be a number above 0")
        return 1.0

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; null is false."""
        value = self.get(key, default)
        if value not in (True, False, None):
            self.problems.append(f"{key} is {value!r}; it must be true or false")
        return bool(value)

    def probability(self, key: str, default: float) -> float:
        """Return a number in [0, 1) that concerns training only; any other value is the default."""
        value = self.get(key, default)
        fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        return float(value) if fine else default

    def only(self, key: str, value: Any, default: Any) -> None:
        """Record a problem unless a key has the only value that this version supports."""
        found = self.get(key, default)
        if found != value:
            self.problems.append(f"{key} is {found!r}; this version has {value!r} only")

    def unknown(self) -> list[str]:
        """List keys with a value that were not read."""
        asks = [key for key, value in self._config.items() if key not in self._seen and value not in NOTHING]
        return [f"{key} ({short(self._config[key])}) is not known" for key in asks]


NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that ask for nothing."""


def short(value: Any) -> str:
    """Return a value as messages show it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Family(ABC):
    """Models that share a class of transformers.

    Attributes:
        absent: what a key that is not in config.json means (the defaults of the class).
        others: classes of the same weights, with fewer heads.
        model_family: the --model-family that computes them.
    """

    model_type: str
    architecture: str
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()
    model_family: ClassVar[str] = "gpt"

    @abstractmethod
    def read(self, reading: Reading) -> ModelConfig:
        """Read the architecture."""

    @abstractmethod
    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        """Return the settings that a model of the family must have, and further conditions -> whether they hold."""

    @abstractmethod
    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        """Return the keys of config.json that describe the model and its tokens; arguments as of `config_of_model`."""

    @abstractmethod
    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        """Yield all tensors in the order of the `state_dict`; `vocab_size` counts the rows of the embedding."""

    @staticmethod
    def unlike_gpt2(model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        """Return `unlike` of families with GPT-2's layers."""
        wanted: dict[str, Any] = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}
        return wanted | {"gated": False, "add_bias_linear": True, "qk_norm": ""}, {
            "one key and value head for each query head": model.query_groups == model.num_attention_heads,
            "heads that make up the hidden size": model.head_size * model.num_attention_heads == model.hidden_size,
        }

    def settled(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Complete the architecture by the names of the tensors in the files, where config.json does not tell."""
        return model

    def rows(self, vocab_size: int) -> int:
        """Return the rows of our embedding for those in the files."""
        return vocab_size
