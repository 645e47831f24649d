"""The families of models as a run meets them: what each is built of besides the class of its model.

A family is one file of assembly (`models/`), its samples (`data/`), one name map and its rows in the parity matrix.
Who builds a run asks the family and names none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalith.config import DataConfig, ModelConfig, RunConfig
from megalith.data.build import Datasets, build_datasets, build_gpt_datasets
from megalith.data.masked.bert import BertSamples
from megalith.data.masked.dataset import MaskedOptions, Masking
from megalith.data.masked.t5 import T5Samples
from megalith.data.samples import SampleRule, Sizes
from megalith.models.families import MODELS
from megalith.tokenizers import Tokenizer

DatasetsBuilder = Callable[[RunConfig, Tokenizer, Sizes, bool], Datasets]
"""(run, tokenizer, samples drawn from each split, index cache checked by another rank) -> its datasets."""


@dataclass(frozen=True)
class Family:
    """A family of models by its `--model-family`: its title on the screen, and what makes its datasets."""

    name: str
    title: str
    build_datasets: DatasetsBuilder


def _gpt_datasets(run: RunConfig, tokenizer: Tokenizer, sizes: Sizes, cache_is_checked: bool) -> Datasets:
    seed = run.train.seed
    return build_gpt_datasets(run.data, tokenizer, sizes=sizes, seed=seed, cache_is_checked=cache_is_checked)


def masked_samples(data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, seed: int) -> SampleRule:
    """How the samples of BERT and T5 are made, as Megatron's pretrain_bert.py and pretrain_t5.py have it.

    Raises:
        ConfigError: the tokenizer has not what they need.
    """
    if model.model_family == "bert":
        masking = Masking(data.mask_prob, _LONGEST_NGRAM)
        options = MaskedOptions(data.seq_length, seed, masking, data.short_seq_prob)
        return BertSamples(options, tokenizer, model.bert_binary_head)
    assert data.decoder_seq_length is not None, "a rule of the configuration"
    masking = Masking(data.mask_prob, _LONGEST_SPAN, geometric=True)
    options = MaskedOptions(data.seq_length, seed, masking, data.short_seq_prob)
    return T5Samples(options, tokenizer, data.decoder_seq_length)


_LONGEST_NGRAM, _LONGEST_SPAN = 3, 10  # words that BERT and T5 guess together at most


def _masked_datasets(run: RunConfig, tokenizer: Tokenizer, sizes: Sizes, cache_is_checked: bool) -> Datasets:
    rule = masked_samples(run.data, run.model, tokenizer, run.train.seed)
    return build_datasets(run.data, rule, sizes=sizes, cache_is_checked=cache_is_checked)


_DATASETS: Mapping[str, DatasetsBuilder] = {"gpt": _gpt_datasets, "bert": _masked_datasets, "t5": _masked_datasets}

FAMILIES: Mapping[str, Family] = {name: Family(name, model.title, _DATASETS[name]) for name, model in MODELS.items()}


def family_of(config: ModelConfig) -> Family:
    """The family of a model."""
    return FAMILIES[config.model_family]
