"""Evaluation of masked tokens (BERT, T5), on one process or on ranks that share the model.

Samples are made from a dataset or a text file as in training, with fixed random draws, and each is evaluated once. The
ranks of a replica run their batches through the pipeline interpreter; replicas take batches in turn. The whole
vocabulary table takes part in the softmax, as it does in the training loss.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.assemble.data import masked_dataset_factory
from megalith.config import DataConfig, ModelConfig
from megalith.data.build import build_datasets
from megalith.data.indexed import IndexedWriter, idx_path, smallest_dtype
from megalith.data.masked.dataset import MaskedDataset
from megalith.data.masked.sample_index import LONGEST_SENTENCE
from megalith.data.samples import MapDataset
from megalith.data.sentences import PunctuationSplitter
from megalith.data.sources import JSONL, format_of
from megalith.evaluate.score import BatchScorer, BatchWork, RunningScore, prediction_sums, score_targets
from megalith.evaluate.text import bounded_exp, read_documents
from megalith.models.language_model import DenoisingModel, Inputs
from megalith.nn.precision import at_least_fp32
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.fingerprint import require_tokenizer_of_data

_SEED = 1234  # the same samples for every model of one tokenizer and length


@dataclass(frozen=True)
class Predictions:
    """Number, correct ones and summed loss of predictions."""

    total: int = 0
    correct: int = 0
    loss: float = 0.0  # summed over all of them, in nats

    def __add__(self, other: Predictions) -> Predictions:
        return Predictions(self.total + other.total, self.correct + other.correct, self.loss + other.loss)

    @property
    def share(self) -> float:
        """Return the share of correct predictions; NaN if there are none."""
        return self.correct / self.total if self.total else math.nan

    @property
    def mean(self) -> float:
        """Return the mean loss in nats; NaN if there are no predictions."""
        return self.loss / self.total if self.total else math.nan

    @property
    def perplexity(self) -> float:
        return bounded_exp(self.mean)

    def numbers(self) -> dict[str, float]:
        return {
            **{"total": self.total, "correct": self.correct, "share": self.share},
            **{"mean": self.mean, "perplexity": self.perplexity},
        }


@dataclass(frozen=True)
class MaskedResult:
    """Accuracy and loss of masked tokens and, if the model has the head, of the order of sentences."""

    samples: int
    tokens: Predictions
    orders: Predictions | None = None  # of swapped sentence pairs; None where the model has no head for it
    swapped: int = 0  # of these how many have

    @property
    def majority_share(self) -> float:
        """Return the share of orders that always giving the more frequent answer gets right; NaN without orders."""
        if self.orders is None or not self.orders.total:
            return math.nan
        return max(self.swapped, self.orders.total - self.swapped) / self.orders.total

    def numbers(self) -> dict[str, object]:
        orders = None if self.orders is None else {**self.orders.numbers(), "swapped": self.swapped}
        return {"samples": self.samples, "tokens": self.tokens.numbers(), "orders": orders}


class MaskedScorer(BatchScorer[DenoisingModel]):
    """Scorer of the masked tokens of samples."""

    def __call__(
        self, samples: MapDataset, count: int | None = None, on_batch: Callable[[int], None] = lambda number: None
    ) -> MaskedResult:
        """Evaluate the first `count` samples, all if None; `on_batch` receives the number of each batch before it."""
        count = len(samples) if count is None else min(count, len(samples))
        digest = hashlib.blake2b(str(count).encode(), digest_size=16)
        for item in sorted({0, count // 2, count - 1}) if count else ():
            for name, values in samples[item].items():
                digest.update(name.encode() + values.tobytes())
        self.require_equal(digest.hexdigest())
        running = RunningScore()
        works = self.run(count, lambda batches, first: _Work(self.model, samples, batches, on_batch, first, running))
        own = sum((work.tally for _, work in works), _Tally())
        found = sum(self.gather(own, _Tally()), _Tally())
        orders = found.orders if "sop loss" in self.model.loss_names else None
        return MaskedResult(count, found.tokens, orders, found.swapped)


@dataclass(frozen=True)
class _Tally:
    """Sums over the samples of a replica."""

    tokens: Predictions = field(default=Predictions())
    orders: Predictions = field(default=Predictions())
    swapped: int = 0

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(self.tokens + other.tokens, self.orders + other.orders, self.swapped + other.swapped)


class _Work(BatchWork):
    def __init__(
        self,
        model: DenoisingModel,
        samples: MapDataset,
        batches: Sequence[range],
        on_batch: Callable[[int], None],
        first: int,
        running: RunningScore,
    ) -> None:
        super().__init__(on_batch, first)
        self._model, self._samples, self._batches, self._running = model, samples, batches, running
        self._held: dict[int, Inputs] = {}
        self._results: list[Tensor] = []

    def _inputs(self, micro_batch: int) -> Inputs:
        if micro_batch not in self._held:
            rows = [self._samples[item] for item in self._batches[micro_batch]]
            batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
            inputs = self._model.prepare(batch)
            here = {name: tensor.to(self._model.device) for name, tensor in inputs.tensors.items()}
            self._held[micro_batch] = Inputs(here)
        return self._held[micro_batch]

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        return self._model.activation_shape(self._inputs(micro_batch))

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        inputs = self._inputs(micro_batch)
        num_samples = len(self._batches[micro_batch])
        if not self._model.stage.is_last:
            self._running.add(num_samples, None)
            return self._model.forward_stage(inputs, hidden)
        found = _evaluate(self._model, inputs, hidden)
        self._results.append(found)
        self._running.add(num_samples, lambda: found[:3])
        return found.new_zeros(())

    def release(self, micro_batch: int) -> None:
        del self._held[micro_batch]

    @property
    def tally(self) -> _Tally:
        """Return the sums over all batches; zeros on a stage without predictions."""
        if not self._results:
            return _Tally()
        words, right, loss, orders, in_order, order_loss, swapped = torch.stack(self._results).sum(dim=0).tolist()
        return _Tally(
            Predictions(round(words), round(right), loss),
            Predictions(round(orders), round(in_order), order_loss),
            round(swapped),
        )


def _evaluate(model: DenoisingModel, inputs: Inputs, hidden_SBD: Tensor | None) -> Tensor:
    """Return the numbers of `_Tally` for a micro-batch, [7] in fp64."""
    states_TD, logits_B2 = model.states_of_hidden_tokens(inputs, hidden_SBD)
    wanted_T = inputs.tensors["labels"].t()[inputs.tensors["loss_mask"].t() > 0]
    shared = (model.region, model.vocab_size, model.output_bias)
    tokens = prediction_sums(*score_targets(states_TD, model.output_weight, wanted_T, *shared))
    if logits_B2 is None:
        return torch.cat((tokens, tokens.new_zeros(4)))
    wanted_B = inputs.tensors["is_random"]
    logprobs_B2 = torch.log_softmax(logits_B2.to(at_least_fp32(logits_B2.dtype)), dim=-1)
    of_wanted_B = logprobs_B2.gather(1, wanted_B[:, None]).squeeze(1)
    orders = prediction_sums(of_wanted_B, logprobs_B2.argmax(dim=-1) == wanted_B)
    return torch.cat((tokens, orders, wanted_B.sum()[None].double()))


def is_dataset(path: Path) -> bool:
    """Return whether a path is the prefix of a .bin/.idx pair."""
    return idx_path(str(path)).is_file()


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of samples that differ from those of the training."""

    seq_length: int | None = None  # tokens of a sample; those of the training, or the model's positions, if None
    decoder_seq_length: int | None = None  # of T5; that of the training, or half of a sample, if None


def open_samples(
    path: Path, model: ModelConfig, args: Mapping[str, Any], tokenizer: Tokenizer, given: SampleLengths, scratch: Path
) -> tuple[MaskedDataset, list[str]]:
    """Open the samples of a dataset or a text file, one pass over it; return them with notes for the user.

    The shares of hidden tokens and of short samples are the defaults, not those of the training: an export has none.

    Args:
        path: prefix of a dataset of `preprocess --split-sentences`, a jsonl with a text in each line, or a text whose
            documents are separated by empty lines.
        scratch: an empty folder of this process, which the samples need as long as they are read.
    """
    notes = []
    if is_dataset(path):
        prefix = str(path)
        note = require_tokenizer_of_data(prefix, tokenizer.fingerprint())
        notes += [] if note is None else [note]
    else:
        prefix = str(scratch / "text_sentence")
        _encode(path, tokenizer, prefix)
    length = given.seq_length or int(args.get("seq_length") or model.max_position_embeddings)
    data = DataConfig(
        seq_length=length,
        decoder_seq_length=given.decoder_seq_length or int(args.get("decoder_seq_length") or max(8, length // 2)),
        test_data_path=(prefix,),
        data_cache_path=str(scratch),
    )
    built = build_datasets(data, masked_dataset_factory(data, model, tokenizer, _SEED), sizes=(0, 0, None))
    assert isinstance(built.test, MaskedDataset)
    return built.test, notes


def _encode(path: Path, tokenizer: Tokenizer, prefix: str) -> None:
    dtype = smallest_dtype(tokenizer.vocab_size)
    splitter = PunctuationSplitter()
    with IndexedWriter(prefix, dtype) as writer:
        for text in _documents(path):
            sentences = [part for sentence in splitter.split(text) for part in _split_long(tokenizer.encode(sentence))]
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


def _split_long(ids: list[int]) -> Iterator[list[int]]:
    """Split a sentence into parts that are not too long: a document with a longer one would be skipped."""
    for start in range(0, len(ids), LONGEST_SENTENCE):
        yield ids[start : start + LONGEST_SENTENCE]
