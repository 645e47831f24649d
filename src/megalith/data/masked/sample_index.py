"""Which sentences make which sample: runs of sentences of one document, closed when they are long enough.

Each row of the index is (first sentence, one behind the last, longest length in tokens). Some samples, by chance, are
closed at a shorter length, so that the model sees short sequences too.

Its generators are `std::mt19937`, which numpy's legacy generator seeds alike, and `std::mt19937_64`, which numpy lacks.

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
    """A stream of uniform 64-bit numbers."""

    def __init__(self, seed: int) -> None:
        words = [seed & _ALL]
        for number in range(1, _SIZE):
            words.append((_MULTIPLIER * (words[-1] ^ (words[-1] >> 62)) + number) & _ALL)
        self._state = np.array(words, np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """The next `count` numbers; to be called once, as what is left of a block is forgotten."""
        blocks = [self._block() for _ in range(-(-count // _SIZE))]
        return np.concatenate(blocks)[:count] if blocks else np.empty(0, np.uint64)

    def _block(self) -> NDArray[np.uint64]:
        """Renew the state, half by half as the second half needs the first one's new words; temper it."""
        state = self._state
        last = state[-1:].copy()
        state[:_HALF] = state[_HALF:] ^ _mixed(state[:_HALF], state[1 : _HALF + 1])
        state[_HALF:-1] = state[: _HALF - 1] ^ _mixed(state[_HALF:-1], state[_HALF + 1 :])
        state[-1:] = state[_HALF - 1 : _HALF] ^ _mixed(last, state[:1])
        words = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        return words ^ (words >> np.uint64(43))


def _mixed(upper: NDArray[np.uint64], lower: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (upper & _UPPER) | (lower & _LOWER)
    return (joined >> np.uint64(1)) ^ np.where(joined & np.uint64(1), _TWIST, np.uint64(0))


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """The order that Fisher and Yates' shuffle from the end gives `count` things; [count]."""
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
    fewest_sentences: int,
) -> NDArray[np.uint32 | np.uint64]:
    """Build the shuffled index of a split, [samples, 3]; empty if no document serves.

    Args:
        document_index: number of the first sentence of each document, and of the one behind the last; [D + 1].
        lengths: tokens of each sentence of the dataset.
        requested: whole epochs until there are so many samples; None for one epoch.
        longest: tokens of a sample without its special ones.
        short_probability: of a sample of another length, uniform from 2 on; 0 for none.
        seed: of the lengths; the order has the next one.
        fewest_sentences: of a document to be taken and of a sample.
    """
    documents = _usable(document_index, lengths, fewest_sentences)
    targets = _targets(longest, short_probability, seed)
    rows = array("Q")
    while documents and (requested is None or len(rows) < 3 * requested):
        for first, ends in documents:
            for row in _samples(first, ends, targets, fewest_sentences):
                rows.extend(row)
        if requested is None:
            break
    wide = len(lengths) > np.iinfo(np.uint32).max
    index = np.array(rows, np.uint64).astype(np.uint64 if wide else np.uint32).reshape(-1, 3)
    return cast("NDArray[np.uint32 | np.uint64]", index[shuffled(len(index), _after(seed))])


def _usable(document_index: NDArray[np.int64], lengths: NDArray[np.int32], fewest: int) -> list[tuple[int, list[int]]]:
    """The documents that serve: first sentence, and the tokens up to the end of each sentence."""
    found = []
    for first, stop in zip(document_index[:-1].tolist(), document_index[1:].tolist(), strict=True):
        sentences = lengths[first:stop]
        if len(sentences) < fewest or not len(sentences):
            continue
        if len(sentences) > 1 and int(sentences.max()) > LONGEST_SENTENCE:
            continue
        found.append((first, np.cumsum(sentences, dtype=np.int64).tolist()))
    return found


def _targets(longest: int, short_probability: float, seed: int) -> Iterator[int]:
    """The length at which each sample is closed; one more is drawn, for nothing, behind the last of a document."""
    ratio = int(1.0 / short_probability + 0.5) if short_probability > 0.0 else 0  # halves away from zero, as in C
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    while True:
        if not ratio:
            yield from [longest] * _DRAWN_AT_ONCE
            continue
        draws = generator.randint(0, 1 << 32, _DRAWN_AT_ONCE, dtype=np.uint32)  # all bits: the words of the generator
        short = 2 + draws % np.uint32(longest - 1)
        yield from np.where(draws % np.uint32(ratio) == 0, short, np.uint32(longest)).tolist()


def _after(seed: int) -> int:
    """The next seed, as Megatron's C++ has it in 32 bits: -2147483648 follows 2147483647."""
    return seed + 1 if seed != np.iinfo(np.int32).max else int(np.iinfo(np.int32).min)


def _samples(first: int, ends: list[int], targets: Iterator[int], fewest: int) -> Iterator[tuple[int, int, int]]:
    """The samples of a document, given the number of its `first` sentence and the tokens up to the end of each."""
    count, begin, before, target = len(ends), 0, 0, next(targets)
    while begin < count:
        # The first sentence that fills the sample and leaves more than one behind it; else all that are left.
        last = max(bisect_left(ends, before + target, begin), begin + fewest - 1)
        if count - last - 1 <= 1:
            last = count - 1
        yield first + begin, first + last + 1, target
        begin, before, target = last + 1, ends[last], next(targets)
