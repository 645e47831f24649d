"""Which dataset of a blend gives sample n: Megatron's greedy order, as pure functions of numbers.

Sample n goes to the dataset d whose share is furthest behind, the first of equals:

    d(n) = argmax_d  w_d * max(n, 1) - c_d(n)         c_d(n): samples that d has given before n

Each choice depends on all before it, and the shares of three and more datasets have no closed form. But two runs of
the recursion that start from different counts (of the same sum) come together: where their choices differ, the one that
is ahead in a dataset takes less of it. So the samples are cut into blocks of equal length that are computed at once,
side by side, each from counts that are guessed to be w_d * n; then each block whose guess was not what the block before
it ended with is computed again from that, until all agree. The result is that of the recursion by construction, in the
same double-precision arithmetic; mostly the second round settles it.

Source:  Megatron-LM `helpers.cpp`, `build_blending_indices` and `build_exhaustive_blending_indices`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_DATASETS = 32766  # the numbers of the datasets are 16-bit
_SHORTEST_BLOCK = 512

Blending = tuple[NDArray[np.int16], NDArray[np.int64]]
"""The dataset of each sample, and the number of the sample within its dataset."""


def build_blending_index(weights: NDArray[np.float64], size: int) -> Blending:
    """The first `size` samples of a blend by weights that add up to 1; a dataset of weight 0 gives none."""
    return _numbered(_choose(weights, size, None), len(weights))


def build_exhaustive_blending_index(sizes: NDArray[np.int64]) -> Blending:
    """Every sample of every dataset once, in proportion to the sizes for as long as the datasets last."""
    total = int(sizes.sum())
    return _numbered(_choose(sizes / max(total, 1), total, sizes), len(sizes))


def _choose(weights: NDArray[np.float64], size: int, limits: NDArray[np.int64] | None) -> NDArray[np.int16]:
    """The dataset of each of `size` samples, no more of each than `limits` says."""
    length = max(_SHORTEST_BLOCK, math.isqrt(size))
    starts = np.arange(0, size, length, dtype=np.int64)
    chosen = np.empty((length, len(starts)), np.int16)
    counts = _guess(weights, starts, limits)
    ends = np.empty_like(counts)
    wrong = np.ones(len(starts), bool)
    while wrong.any():
        chosen[:, wrong], ends[:, wrong] = _run_blocks(weights, starts[wrong], counts[:, wrong], length, limits)
        wrong[0] = False
        wrong[1:] = (counts[:, 1:] != ends[:, :-1]).any(axis=0)
        counts[:, 1:] = ends[:, :-1]
    return chosen.T.reshape(-1)[:size]


def _guess(
    weights: NDArray[np.float64], starts: NDArray[np.int64], limits: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """Counts near w_d * n that add up to n, [datasets, starts]: the largest remainders are rounded up."""
    shares = weights[:, None] * starts
    counts = np.floor(shares)
    if limits is not None:
        counts = np.minimum(counts, limits[:, None])
    missing = starts - counts.sum(axis=0)
    order = np.argsort(counts - shares, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(len(weights))[:, None], axis=0)
    return np.asarray(counts + (rank < missing), np.float64)


def _run_blocks(
    weights: NDArray[np.float64],
    starts: NDArray[np.int64],
    counts: NDArray[np.float64],
    length: int,
    limits: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """The recursion over `length` samples of every block: choices [length, blocks], counts at the ends."""
    counts = counts.copy()
    chosen = np.empty((length, len(starts)), np.int16)
    blocks = np.arange(len(starts))
    candidates = [number for number, weight in enumerate(weights) if weight > 0]
    behind, largest = np.empty(len(starts)), np.empty(len(starts))
    for step in range(length):
        sample = np.maximum((starts + step).astype(np.float64), 1.0)
        row = chosen[step]
        for place, number in enumerate(candidates):
            error = largest if place == 0 else behind
            np.multiply(sample, weights[number], out=error)
            np.subtract(error, counts[number], out=error)
            if limits is not None:
                error[counts[number] >= limits[number]] = -math.inf
            if place == 0:
                row[:] = number
                continue
            ahead = behind > largest
            row[ahead] = number
            np.maximum(largest, behind, out=largest)
        counts[row, blocks] += 1.0
    return chosen, counts


def _numbered(dataset_index: NDArray[np.int16], num_datasets: int) -> Blending:
    """Count the samples of each dataset in the order in which they come."""
    order = np.argsort(dataset_index, kind="stable")
    counts = np.bincount(dataset_index, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    sample_index: NDArray[Any] = np.empty(len(dataset_index), np.int64)
    sample_index[order] = np.arange(len(dataset_index), dtype=np.int64) - firsts
    return dataset_index, sample_index
