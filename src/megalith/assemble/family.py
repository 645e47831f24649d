"""The families of models as a run meets them: what each is built of besides the class of its model.

A family is one file of assembly (`models/`), its samples (`data/`), one name map and its rows in the parity matrix.
Who builds a run asks the family and names none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalith.config import ModelConfig, RunConfig
from megalith.data.build import Datasets, build_datasets, build_gpt_datasets
from megalith.data.masked.bert import BertSamples
from megalith.data.masked.dataset import MaskedOptions
from megalith.data.masked.ngrams import Masking
from megalith.data.masked.t5 import T5Samples
from megalith.data.splits import Sizes
from megalith.models.families import MODELS
from megalith.tokenizers import Tokenizer

DatasetsBuilder = Callable[[RunConfig, Tokenizer, Sizes], Datasets]
"""(run, tokenizer, samples that it draws of each split) -> the datasets of its splits."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as `--model-family` has it.
        title: on the screen.
        build_datasets: makes its datasets.
    """

    name: str
    title: str
    build_datasets: DatasetsBuilder


def _gpt_datasets(run: RunConfig, tokenizer: Tokenizer, sizes: Sizes) -> Datasets:
    return build_gpt_datasets(run.data, tokenizer, sizes=sizes, seed=run.train.seed)


def _t5_datasets(run: RunConfig, tokenizer: Tokenizer, sizes: Sizes) -> Datasets:
    assert run.data.decoder_seq_length is not None, "a rule of the configuration"
    masking = Masking(run.data.mask_prob, _LONGEST_SPAN, geometric=True)
    options = MaskedOptions(run.data.seq_length, run.train.seed, masking, run.data.short_seq_prob)
    return build_datasets(run.data, T5Samples(options, tokenizer, run.data.decoder_seq_length), sizes=sizes)


_LONGEST_SPAN = 10  # words that T5 guesses together at most, as Megatron's pretrain_t5.py has it


def _bert_datasets(run: RunConfig, tokenizer: Tokenizer, sizes: Sizes) -> Datasets:
    # Up to three words at once, whole ones: what pretrain_bert.py of Megatron asks for.
    masking = Masking(run.data.mask_prob, longest_ngram=3)
    options = MaskedOptions(run.data.seq_length, run.train.seed, masking, run.data.short_seq_prob)
    return build_datasets(run.data, BertSamples(options, tokenizer, run.model.bert_binary_head), sizes=sizes)


_DATASETS: Mapping[str, DatasetsBuilder] = {"gpt": _gpt_datasets, "bert": _bert_datasets, "t5": _t5_datasets}

FAMILIES: Mapping[str, Family] = {name: Family(name, model.title, _DATASETS[name]) for name, model in MODELS.items()}


def family_of(config: ModelConfig) -> Family:
    """The family of a model."""
    return FAMILIES[config.model_family]
