"""Choosing the words to hide: n-grams of whole words until the wanted share of the tokens is hidden.

    tokens                    [CLS] un ##want ##ed gu ##est [SEP]
    candidates, whole words         (1 2 3)        (4 5)
    candidates, pieces              (1) (2) (3)    (4) (5)

The draws come in Megatron's order, so that its samples are repeated number by number. Under `permutation` Megatron
draws which tokens move from a generator that nobody has seeded; here these draws are the sample's own too, so that a
sample is the same whenever it is read. What then moves where is as Megatron has it.

Source:  Megatron-LM `MaskedWordPieceDataset._create_masked_lm_predictions`; Devlin et al. 2018, arXiv:1810.04805;
spans of geometric lengths from Joshi et al. 2020, arXiv:1907.10529, section 3.1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import RandomState

_GEOMETRIC = 0.2  # SpanBERT's


@dataclass(frozen=True)
class Masking:
    """How words are chosen.

    Attributes:
        probability: share of the tokens that is hidden.
        longest_ngram: words that are hidden together at most; n of them with a weight of 1 / n.
        whole_words: pieces of a word are hidden together.
        permutation: as many tokens again change places, and are to be found too.
        longer_ngrams: the weights the other way round.
        geometric: lengths from a geometric distribution instead.
    """

    probability: float
    longest_ngram: int
    whole_words: bool = True
    permutation: bool = False
    longer_ngrams: bool = False
    geometric: bool = False

    @cached_property
    def cumulated(self) -> list[float]:
        """Probability of n-grams of up to 1, 2, ... words."""
        weights = 1.0 / (np.arange(self.longest_ngram, dtype=np.int64) + 1)
        weights = weights / weights.sum(keepdims=True)
        if self.longer_ngrams:
            weights = weights[::-1]
        sums = (weights / weights.sum(keepdims=True)).cumsum()
        bounds: list[float] = (sums / sums[-1]).tolist()
        return bounds

    def draw_by_weight(self, random: RandomState) -> int:
        """How many words to take together, by the weights."""
        return bisect_right(self.cumulated, random.random_sample()) + 1

    def draw(self, random: RandomState) -> int:
        """How many words to take together."""
        if self.geometric:
            return min(int(random.geometric(_GEOMETRIC)), self.longest_ngram)
        return self.draw_by_weight(random)


@dataclass(frozen=True)
class Masked:
    """A sequence with words hidden.

    Attributes:
        tokens: what is left to see.
        labels: position -> what stood there, of the positions to be told; in the order of positions.
        spans: the positions that were hidden together and the tokens that stood there, in the order of positions.
    """

    tokens: list[int]
    labels: list[tuple[int, int]]
    spans: list[tuple[list[int], list[int]]]


def mask(
    tokens: Sequence[int],
    target: int,
    random: RandomState,
    masking: Masking,
    *,
    borders: Collection[int],
    continues: Sequence[bool],
    replacement: Callable[[RandomState], int | None],
) -> Masked:
    """Hide words.

    Args:
        tokens: of the sample, special ones included.
        target: tokens that the sample was meant to have, which bounds how many are hidden.
        random: where draws come from.
        masking: how words are chosen.
        borders: ids that are never hidden.
        continues: of each id, whether it goes on the word before it.
        replacement: draws what stands in the place of a token; None for the token itself.
    """
    candidates = _candidates(tokens, masking, borders, continues)
    wanted = min(masking.probability * target, max(1, round(len(tokens) * masking.probability)))
    order = list(range(len(candidates)))
    random.shuffle(order)
    left, labels, hidden = list(tokens), list[tuple[int, int]](), set[int]()
    spans: list[tuple[list[int], list[int]]] = []
    for candidate in order:
        if len(labels) >= wanted:
            break
        ngram = _fitting(candidates, candidate, masking.draw(random), wanted - len(labels))
        if ngram is None or not hidden.isdisjoint(ngram):
            continue
        for position in ngram:
            hidden.add(position)
            new = replacement(random)
            left[position] = tokens[position] if new is None else new
            labels.append((position, tokens[position]))
        spans.append((ngram, [tokens[position] for position in ngram]))
    random.shuffle(order)
    if masking.permutation:
        labels += _permute(left, candidates, order, hidden, wanted, random, masking)
    return Masked(left, sorted(labels, key=lambda label: label[0]), sorted(spans, key=lambda span: span[0][0]))


def _candidates(
    tokens: Sequence[int], masking: Masking, borders: Collection[int], continues: Sequence[bool]
) -> list[list[int]]:
    """The positions of each word, or of each piece."""
    found: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in borders:
            continue
        if continues[token] and masking.whole_words and found:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def _fitting(candidates: list[list[int]], first: int, words: int, room: float) -> list[int] | None:
    """The positions of the longest n-gram of up to `words` words from `first` on with at most `room` of them."""
    for count in range(words, 0, -1):
        positions = [position for word in candidates[first : first + count] for position in word]
        if len(positions) <= room:
            return positions
    return None


def _permute(
    left: list[int],
    candidates: list[list[int]],
    order: list[int],
    hidden: set[int],
    wanted: float,
    random: RandomState,
    masking: Masking,
) -> Iterator[tuple[int, int]]:
    """Let tokens that are not hidden change places in `left`; yields what stood where.

    The n-grams are drawn from a copy of `random`, whose next draws are those of the new places.
    """
    moved: set[int] = set()
    copy = RandomState()
    copy.set_state(random.get_state())
    for candidate in order:
        if len(moved) >= wanted:
            break
        ngram = _fitting(candidates, candidate, masking.draw_by_weight(copy), wanted - len(moved))
        if ngram is not None and hidden.isdisjoint(ngram) and moved.isdisjoint(ngram):
            moved.update(ngram)
    places = sorted(moved)
    sources = list(places)
    random.shuffle(sources)
    before = list(left)
    for place, source in zip(places, sources, strict=True):
        left[place] = before[source]
        yield place, before[place]
