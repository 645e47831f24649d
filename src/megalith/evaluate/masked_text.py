"""From a dataset or a file of text to samples with hidden tokens, as BERT and T5 learn from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalith.assemble.family import masked_samples
from megalith.config import DataConfig, ModelConfig
from megalith.data.build import build_datasets
from megalith.data.indexed import IndexedWriter, idx_path, smallest_dtype
from megalith.data.masked.dataset import MaskedDataset
from megalith.data.masked.sample_index import LONGEST_SENTENCE
from megalith.data.sentence_marks import MarksSplitter
from megalith.data.sources import JSONL, format_of
from megalith.evaluate.tasks import read_documents
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.card import require_tokenizer_of_data

_SEED = 1234  # the same samples for every model of one tokenizer and length


def is_dataset(path: Path) -> bool:
    """Whether a path is the prefix of a .bin/.idx pair."""
    return idx_path(str(path)).is_file()


@dataclass(frozen=True)
class Cut:
    """How samples are cut and hidden, where it is not as in the training.

    Attributes:
        seq_length: tokens of a sample; those of the training, or the model's positions, if None.
        decoder_seq_length: tokens that the decoder of T5 reads; of the training, or half of a sample, if None.
    """

    seq_length: int | None = None
    decoder_seq_length: int | None = None


def open_samples(
    path: Path, model: ModelConfig, args: Mapping[str, Any], tokenizer: Tokenizer, cut: Cut, scratch: Path
) -> tuple[MaskedDataset, list[str]]:
    """The samples of a dataset or of a file of text: one pass over it, in an order of their own.

    Args:
        path: prefix of a dataset of `preprocess --split-sentences`, a jsonl with a text in each line, or a text whose
            documents are parted by empty lines.
        model: BERT or T5.
        args: Megatron's arguments of the training.
        tokenizer: of the model.
        cut: what the user asks for.
        scratch: an empty folder of this process, which the samples need as long as they are read.

    Returns:
        The samples, and what the user should hear.

    Raises:
        DataError: the file cannot be read, or was made with another tokenizer.
        ConfigError: the tokenizer cannot make such samples.
    """
    notes = []
    if is_dataset(path):
        prefix = str(path)
        note = require_tokenizer_of_data(prefix, tokenizer.card())
        notes += [] if note is None else [note]
    else:
        prefix = str(scratch / "text_sentence")
        _encode(path, tokenizer, prefix)
    length = cut.seq_length or int(args.get("seq_length") or model.max_position_embeddings)
    data = DataConfig(
        seq_length=length,
        decoder_seq_length=cut.decoder_seq_length or int(args.get("decoder_seq_length") or max(8, length // 2)),
        mask_prob=float(args.get("mask_prob") or DataConfig.mask_prob),
        short_seq_prob=float(args.get("short_seq_prob") or 0.0),
        test_data_path=(prefix,),
        data_cache_path=str(scratch),
    )
    built = build_datasets(data, masked_samples(data, model, tokenizer, _SEED), sizes=(0, 0, None))
    assert isinstance(built.test, MaskedDataset)
    return built.test, notes


def _encode(path: Path, tokenizer: Tokenizer, prefix: str) -> None:
    dtype = smallest_dtype(tokenizer.vocab_size)
    splitter = MarksSplitter()
    with IndexedWriter(prefix, dtype) as writer:
        for text in _documents(path):
            sentences = [part for sentence in splitter.split(text) for part in _parts(tokenizer.encode(sentence))]
            if sentences:
                ids = np.concatenate([np.asarray(sentence, dtype) for sentence in sentences])
                writer.add_document(ids, [len(sentence) for sentence in sentences])
        writer.finalize()


def _documents(path: Path) -> Iterator[str]:
    texts = read_documents(path)
    if format_of(path) == JSONL:
        yield from texts
        return
    for text in texts:
        yield from re.split(r"\n[ \t\r]*\n", text)


def _parts(ids: list[int]) -> Iterator[list[int]]:
    """A sentence in parts that are not too long: a document with a longer one would be left out."""
    for start in range(0, len(ids), LONGEST_SENTENCE):
        yield ids[start : start + LONGEST_SENTENCE]
