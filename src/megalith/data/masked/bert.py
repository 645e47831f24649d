"""BERT dataset: two runs of sentences, possibly swapped, with words masked.

    text          [CLS] a1 a2 [MASK] a4 [SEP] b1 [MASK] [SEP] [PAD] [PAD]
    types           0   0  0    0    0    0   1    1      1     0     0
    labels         -1  -1 -1   a3   -1   -1  -1   b2     -1    -1    -1
    loss_mask       0   0  0    1    0    0   0    1      0     0     0
    padding_mask    1   1  1    1    1    1   1    1      1     0     0

`is_random` says whether the two runs are swapped (sentence order prediction, ALBERT's task: arXiv:1909.11942). Without
that task there is one run of sentences.

Source:  Megatron-LM `BERTMaskedWordPieceDataset`, whose random draws are repeated in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from megalith.config import DataConfig, ModelConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.dataset import MaskedDataset, MaskedDatasetFactory, MaskedOptions, Masking, mask, pad_to
from megalith.data.samples import SplitSpec
from megalith.tokenizers import Tokenizer

_SPECIAL_TOKENS = 3  # [CLS] and two [SEP]


class BertDataset(MaskedDataset):
    """BERT samples, see the module; all entries are int64, [sequence_length] or scalar."""

    def __init__(self, documents: IndexedDataset, spec: SplitSpec, factory: BertDatasetFactory) -> None:
        self._order_head, special = factory.order_head, factory.tokenizer.special
        self._cls, self._sep, self._mask, self._pad = (special[role] for role in ("cls", "sep", "mask", "pad"))
        super().__init__(
            documents,
            spec,
            factory,
            longest=factory.options.sequence_length - _SPECIAL_TOKENS,
            min_sentences=2 if factory.order_head else 1,
            extra_identity={"classification_head": factory.order_head},
        )

    def _sample(self, sentences: list[NDArray[Any]], target: int, random: RandomState) -> dict[str, NDArray[Any]]:
        first, second, swapped = self._segments([sentence.tolist() for sentence in sentences], random)
        truncated = truncate_pair(first, second, target, random)
        tokens, types = [self._cls, *first, self._sep], [0] * (len(first) + 2)
        if second:
            tokens += [*second, self._sep]
            types += [1] * (len(second) + 1)
        masked = mask(
            tokens,
            target,
            random,
            self._options.masking,
            unmaskable=(self._cls, self._sep),
            continues=self._continues,
            replacement=self._replacement,
        )
        positions = [position for position, _ in masked.labels]
        length = self._options.sequence_length
        labels, loss_mask = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        labels[positions] = [label for _, label in masked.labels]
        loss_mask[positions] = 1
        text = pad_to(masked.tokens, length, self._pad)
        return {
            "text": text,
            "types": pad_to(types, length, 0),  # Megatron fills with the padding's id, which is 0 in BERT
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "padding_mask": (text != self._pad).astype(np.int64),  # a word randomly replaced by [PAD] counts as padding
            "loss_mask": loss_mask,
            "truncated": np.array(truncated, np.int64),
        }

    def _segments(self, sentences: list[list[int]], random: RandomState) -> tuple[list[int], list[int], bool]:
        """Return the sentences as two runs, and whether these are swapped."""
        pivot, swapped = len(sentences), False
        if self._order_head:
            pivot = 1 if len(sentences) < 3 else int(random.randint(1, len(sentences)))
            swapped = random.random_sample() < 0.5
        first, second = (list(chain.from_iterable(part)) for part in (sentences[:pivot], sentences[pivot:]))
        return (second, first, True) if swapped else (first, second, False)

    def _replacement(self, random: RandomState) -> int | None:
        """Draw the id that replaces a token: [MASK] with 80 %, a random token or the token itself with 10 % each."""
        if random.random_sample() < 0.8:
            return self._mask
        return int(random.randint(0, self._vocab_size)) if random.random_sample() >= 0.5 else None


def truncate_pair(first: list[int], second: list[int], target: int, random: RandomState) -> bool:
    """Remove tokens from either end of the longer run, in place, down to `target` in all; return whether any were."""
    over = len(first) + len(second) - target
    for _ in range(over):
        longer = first if len(first) > len(second) else second
        del longer[0 if random.random_sample() < 0.5 else -1]
    return over > 0


@dataclass(frozen=True)
class BertDatasetFactory(MaskedDatasetFactory):
    """Factory of BERT datasets; with `order_head` samples have two runs for sentence order prediction."""

    class_name = "BERTMaskedWordPieceDataset"
    order_head: bool

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, seed: int) -> BertDatasetFactory:
        """Build the factory with the settings of Megatron's pretrain_bert.py."""
        masking = Masking(data.mask_prob, longest_ngram=3)
        options = MaskedOptions(data.seq_length, seed, masking, data.short_seq_prob)
        return cls(options, tokenizer, model.bert_binary_head)

    def build(self, documents: IndexedDataset, spec: SplitSpec) -> BertDataset:
        return BertDataset(documents, spec, self)
