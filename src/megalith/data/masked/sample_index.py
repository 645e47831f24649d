"""Sample index of masked datasets: runs of sentences of one document, closed at a target length.

Each row of the index is (first sentence, one after the last, target length in tokens). Some samples, by chance, have a
shorter target, so that the model sees short sequences too.

The generators are `std::mt19937`, which numpy's legacy generator seeds alike, and `std::mt19937_64`, not in numpy.

Source:  Megatron-LM helpers `build_mapping`; docs/reference/datasets.md#masked-datasets; Nishimura 2000, "Tables of
64-bit Mersenne Twisters", with the constants of the C++ standard.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

_SIZE, _HALF = 312, 156
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_MULTIPLIER = 6364136223846793005
_ALL = (1 << 64) - 1
LONGEST_SENTENCE = 512  # tokens; a document with a longer sentence among several is left out
_DRAWN_AT_ONCE = 1 << 16


class MersenneTwister64:
    """Stream of uniform 64-bit numbers (`std::mt19937_64`)."""

    def __init__(self, seed: int) -> None:
        words = [seed & _ALL]
        for number in range(1, _SIZE):
            words.append((_MULTIPLIER * (words[-1] ^ (words[-1] >> 62)) + number) & _ALL)
        self._state = np.array(words, np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """Draw the next `count` numbers. Call once: the rest of the last block is lost."""
        blocks = [self._block() for _ in range(-(-count // _SIZE))]
        return np.concatenate(blocks)[:count] if blocks else np.empty(0, np.uint64)

    def _block(self) -> NDArray[np.uint64]:
        """Renew the state, half by half as the second half needs the first one's new words; temper it."""
        state = self._state
        last = state[-1:].copy()
        state[:_HALF] = state[_HALF:] ^ _twist(state[:_HALF], state[1 : _HALF + 1])
        state[_HALF:-1] = state[: _HALF - 1] ^ _twist(state[_HALF:-1], state[_HALF + 1 :])
        state[-1:] = state[_HALF - 1 : _HALF] ^ _twist(last, state[:1])
        words = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        return words ^ (words >> np.uint64(43))


def _twist(upper: NDArray[np.uint64], lower: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (upper & _UPPER) | (lower & _LOWER)
    return (joined >> np.uint64(1)) ^ np.where(joined & np.uint64(1), _TWIST, np.uint64(0))


def shuffled_order(count: int, seed: int) -> NDArray[np.int64]:
    """Return the permutation of Fisher and Yates' shuffle from the end, [count]."""
    order = array("q", range(count))
    last = np.arange(count - 1, 0, -1, dtype=np.uint64)
    picks = MersenneTwister64(seed).draw(max(0, count - 1)) % (last + np.uint64(1))
    for place, pick in zip(range(count - 1, 0, -1), picks.tolist(), strict=True):
        order[place], order[pick] = order[pick], order[place]
    return np.frombuffer(order, np.int64) if count else np.empty(0, np.int64)


def build_sample_index(
    document_index: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    requested: int | None,
    longest: int,
    short_probability: float,
    seed: int,
    min_sentences: int,
) -> NDArray[np.uint32 | np.uint64]:
    """Build the shuffled index of a split, [samples, 3]; empty if no document serves.

    Args:
        document_index: index of the first sentence of each document, and the number of sentences; [D + 1].
        lengths: tokens of each sentence of the dataset.
        requested: minimum number of samples, reached by whole epochs; None for one epoch.
        longest: tokens of a sample without its special ones.
        short_probability: of a sample of another length, uniform from 2 on; 0 for none.
        seed: of the lengths; the order has the next one.
        min_sentences: of a document to be taken and of a sample.
    """
    documents = _usable_documents(document_index, lengths, min_sentences)
    targets = _target_lengths(longest, short_probability, seed)
    rows = array("Q")
    while documents and (requested is None or len(rows) < 3 * requested):
        for first, ends in documents:
            for row in _rows(first, ends, targets, min_sentences):
                rows.extend(row)
        if requested is None:
            break
    wide = len(lengths) > np.iinfo(np.uint32).max
    index = np.array(rows, np.uint64).astype(np.uint64 if wide else np.uint32).reshape(-1, 3)
    return cast("NDArray[np.uint32 | np.uint64]", index[shuffled_order(len(index), _next_seed(seed))])


def _usable_documents(
    document_index: NDArray[np.int64], lengths: NDArray[np.int32], min_sentences: int
) -> list[tuple[int, list[int]]]:
    """Return the documents that can be used: first sentence, and the tokens up to the end of each sentence."""
    found = []
    for first, stop in zip(document_index[:-1].tolist(), document_index[1:].tolist(), strict=True):
        sentences = lengths[first:stop]
        if len(sentences) < min_sentences or not len(sentences):
            continue
        if len(sentences) > 1 and int(sentences.max()) > LONGEST_SENTENCE:
            continue
        found.append((first, np.cumsum(sentences, dtype=np.int64).tolist()))
    return found


def _target_lengths(longest: int, short_probability: float, seed: int) -> Iterator[int]:
    """Yield the target length of each sample; one more is drawn, unused, after the last sample of a document."""
    ratio = int(1.0 / short_probability + 0.5) if short_probability > 0.0 else 0  # halves away from zero, as in C
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    while True:
        if not ratio:
            yield from [longest] * _DRAWN_AT_ONCE
            continue
        draws = generator.randint(0, 1 << 32, _DRAWN_AT_ONCE, dtype=np.uint32)  # all bits: the words of the generator
        short = 2 + draws % np.uint32(longest - 1)
        yield from np.where(draws % np.uint32(ratio) == 0, short, np.uint32(longest)).tolist()


def _next_seed(seed: int) -> int:
    """Return the next seed in Megatron's 32-bit C++ arithmetic: -2147483648 follows 2147483647."""
    return seed + 1 if seed != np.iinfo(np.int32).max else int(np.iinfo(np.int32).min)


def _rows(first: int, ends: list[int], targets: Iterator[int], min_sentences: int) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of a document, given its `first` sentence and the tokens up to the end of each sentence."""
    count, begin, before, target = len(ends), 0, 0, next(targets)
    while begin < count:
        # Close at the first sentence that fills the sample and leaves more than one; else take all that are left.
        last = max(bisect_left(ends, before + target, begin), begin + min_sentences - 1)
        if count - last - 1 <= 1:
            last = count - 1
        yield first + begin, first + last + 1, target
        begin, before, target = last + 1, ends[last], next(targets)
