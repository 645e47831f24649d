"""The 64-bit Mersenne Twister of the C++ library (`std::mt19937_64`), which numpy has not: Megatron shuffles with it.

Source: Nishimura 2000, "Tables of 64-bit Mersenne Twisters"; the constants are those of the C++ standard.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_SIZE, _HALF = 312, 156
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_MULTIPLIER = 6364136223846793005
_ALL = (1 << 64) - 1


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
