"""Perplexity of text longer than the context, by windows that overlap, as Megatron's WIKITEXT103 task takes it.

With windows of L tokens that begin every s tokens, the first window scores all its L predictions and each later one
only its last s, which have at least L - s tokens of context:

    tokens    0 1 2 3 4 5 6 7 8          L = 4, s = 2
    window 0  . x x x x                  x scored, . context
    window 1      . . . x x
    window 2          . . . x x

So every token but the first is scored once, and the loss is their mean.
Source: docs/reference/evaluation.md#wikitext-103.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.evaluate.score import Ids, Sample, Scorer

_LARGEST_EXPONENT = 20.0  # Megatron's: a perplexity is at most e^20


@dataclass(frozen=True)
class Windows:
    """How a long text is cut.

    Attributes:
        length: predictions of one window, which reads as many tokens.
        stride: tokens between the beginnings of two windows; at most `length`, which means no overlap.
    """

    length: int
    stride: int

    def __post_init__(self) -> None:
        assert 1 <= self.stride <= self.length, f"stride {self.stride} of windows of {self.length}"

    def samples(self, ids: Ids) -> Iterator[Sample]:
        """The windows of a text that score anything; together they score every id but the first, once."""
        num_targets = len(ids) - 1
        scored, start = 0, 0
        while scored < num_targets:
            stop = min(start + self.length, num_targets)
            yield Sample(ids[start : stop + 1], stop - scored)
            scored = stop
            start += self.stride

    def count(self, num_ids: int) -> int:
        """The windows that Megatron counts: behind the last one that scores anything it has some that are all mask."""
        targets = max(num_ids - 1 - self.stride, 0)
        return math.ceil(targets / self.stride) + 1


@dataclass(frozen=True)
class TextLoss:
    """The loss of a text.

    Attributes:
        total: summed over the predicted tokens, in nats.
        num_tokens: that were predicted.
        num_words: by which the benchmark counts, less the first; None where there is no such count.
        num_bytes: of the text as UTF-8; None where the first token is not predicted, so that the text is not whole.
        num_documents: texts that were scored.
        skipped: texts that were not, being empty.
    """

    total: float
    num_tokens: int
    num_words: int | None = None
    num_bytes: int | None = None
    num_documents: int = 1
    skipped: int = 0

    @property
    def mean(self) -> float:
        """Loss per token, in nats; not a number of no tokens."""
        return self.total / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        return bounded_exp(self.mean)

    @property
    def token_ratio(self) -> float:
        """Tokens for each word."""
        return self.num_tokens / self.num_words if self.num_words else math.nan

    @property
    def adjusted_perplexity(self) -> float:
        """Perplexity per word of the benchmark, which does not depend on the tokenizer."""
        return bounded_exp(self.mean * self.token_ratio)

    @property
    def bits_per_byte(self) -> float:
        return self.total / math.log(2) / self.num_bytes if self.num_bytes else math.nan


def bounded_exp(value: float) -> float:
    """e^x, for x above 20 that of 20, as Megatron prints it."""
    return math.exp(value) if math.isnan(value) else math.exp(min(_LARGEST_EXPONENT, value))


def score_texts(
    scorer: Scorer, texts: Sequence[Ids], windows: Windows, on_batch: Callable[[int], None] = lambda number: None
) -> list[NDArray[np.float64]]:
    """The log-probability of every token of each text but its first, in order.

    Args:
        scorer: with the model.
        texts: the ids of each; those of fewer than two have none.
        windows: how long texts are cut.
        on_batch: told the number of each batch.
    """
    per_text = [list(windows.samples(ids)) for ids in texts]
    scores = iter(scorer([sample for samples in per_text for sample in samples], on_batch))
    empty = np.zeros(0)
    return [np.concatenate([empty, *(next(scores).logprobs for _ in samples)]) for samples in per_text]
