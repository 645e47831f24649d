"""BERT's samples: two runs of sentences, in their order or not, with words hidden.

    text          [CLS] a1 a2 [MASK] a4 [SEP] b1 [MASK] [SEP] [PAD] [PAD]
    types           0   0  0    0    0    0   1    1      1     0     0
    labels         -1  -1 -1   a3   -1   -1  -1   b2     -1    -1    -1
    loss_mask       0   0  0    1    0    0   0    1      0     0     0
    padding_mask    1   1  1    1    1    1   1    1      1     0     0

`is_random` says whether the two have changed places (the order of sentences, ALBERT's task: arXiv:1909.11942). Without
it there is one run of sentences.

Source:  Megatron-LM `BERTMaskedWordPieceDataset`, whose draws come in this order.
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
from megalith.data.masked.dataset import MaskedDataset, MaskedOptions, MaskedSamples, Masking, filled, mask
from megalith.data.samples import Portion
from megalith.tokenizers import Tokenizer

_SPECIAL_TOKENS = 3  # [CLS] and two [SEP]


class BertDataset(MaskedDataset):
    """Samples of BERT, see above; all entries are int64, [sequence_length] or single."""

    def __init__(self, documents: IndexedDataset, portion: Portion, rule: BertSamples) -> None:
        self._order_head, special = rule.order_head, rule.tokenizer.special
        self._cls, self._sep, self._mask, self._pad = (special[role] for role in ("cls", "sep", "mask", "pad"))
        super().__init__(
            documents,
            portion,
            rule,
            longest=rule.options.sequence_length - _SPECIAL_TOKENS,
            fewest_sentences=2 if rule.order_head else 1,
            further={"classification_head": rule.order_head},
        )

    def _sample(self, sentences: list[NDArray[Any]], target: int, random: RandomState) -> dict[str, NDArray[Any]]:
        first, second, swapped = self._segments([sentence.tolist() for sentence in sentences], random)
        truncated = trim(first, second, target, random)
        tokens, types = [self._cls, *first, self._sep], [0] * (len(first) + 2)
        if second:
            tokens += [*second, self._sep]
            types += [1] * (len(second) + 1)
        masked = mask(
            tokens,
            target,
            random,
            self._options.masking,
            borders=(self._cls, self._sep),
            continues=self._continues,
            replacement=self._replacement,
        )
        positions = [position for position, _ in masked.labels]
        length = self._options.sequence_length
        labels, loss_mask = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        labels[positions] = [label for _, label in masked.labels]
        loss_mask[positions] = 1
        text = filled(masked.tokens, length, self._pad)
        return {
            "text": text,
            "types": filled(types, length, 0),  # Megatron fills with the padding's id, which is 0 in BERT
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "padding_mask": (text != self._pad).astype(np.int64),  # a word replaced by padding counts as such
            "loss_mask": loss_mask,
            "truncated": np.array(truncated, np.int64),
        }

    def _segments(self, sentences: list[list[int]], random: RandomState) -> tuple[list[int], list[int], bool]:
        """The sentences as two runs, and whether these have changed places."""
        pivot, swapped = len(sentences), False
        if self._order_head:
            pivot = 1 if len(sentences) < 3 else int(random.randint(1, len(sentences)))
            swapped = random.random_sample() < 0.5
        first, second = (list(chain.from_iterable(part)) for part in (sentences[:pivot], sentences[pivot:]))
        return (second, first, True) if swapped else (first, second, False)

    def _replacement(self, random: RandomState) -> int | None:
        """[MASK] in 8 of 10 cases, any token in one, the token itself in one."""
        if random.random_sample() < 0.8:
            return self._mask
        return int(random.randint(0, self._vocab_size)) if random.random_sample() >= 0.5 else None


def trim(first: list[int], second: list[int], target: int, random: RandomState) -> bool:
    """Take tokens from either end of the longer one, in place, until both have `target` together; whether any went."""
    over = len(first) + len(second) - target
    for _ in range(over):
        longer = first if len(first) > len(second) else second
        del longer[0 if random.random_sample() < 0.5 else -1]
    return over > 0


@dataclass(frozen=True)
class BertSamples(MaskedSamples):
    """The rule of BERT; with `order_head` the order of two runs of sentences is to be told."""

    class_name = "BERTMaskedWordPieceDataset"
    order_head: bool

    @classmethod
    def of(cls, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, seed: int) -> BertSamples:
        """As Megatron's pretrain_bert.py has it."""
        masking = Masking(data.mask_prob, longest_ngram=3)
        options = MaskedOptions(data.seq_length, seed, masking, data.short_seq_prob)
        return cls(options, tokenizer, model.bert_binary_head)

    def dataset(self, documents: IndexedDataset, portion: Portion) -> BertDataset:
        return BertDataset(documents, portion, self)
