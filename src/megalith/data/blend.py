"""Blends of datasets: Megatron's greedy choice of a dataset for each sample.

Sample n goes to the dataset whose share lags most, the first of equals:

    d(n) = argmax_d  w_d * max(n, 1) - c_d(n)         c_d(n): samples taken from d before n

Each choice depends on all earlier ones, and with three or more datasets the shares have no closed form. But two runs
of the recursion that start from different counts (of equal sum) converge: where their choices differ, the run that is
ahead in a dataset takes less of it. The samples are therefore cut into blocks of equal length. All blocks are computed
at once, each from the guess that its starting counts are w_d * n. A block whose guess differs from the counts at the
end of the block before it is computed again, until all blocks agree; usually the second round is the last. The result
is that of the recursion by construction, in the same double-precision arithmetic. The index cache stores it.

Source:  Megatron-LM `BlendedDataset`; `helpers.cpp`, `build_blending_indices`, `build_exhaustive_blending_indices`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.index_cache import Arrays, IndexSpec, load_or_build
from megalith.data.samples import SplitDataset
from megalith.errors import DataError

MOST_DATASETS = 32766  # dataset numbers are stored as i16
_SHORTEST_BLOCK = 512

Blending = tuple[NDArray[np.int16], NDArray[np.int64]]
"""The dataset of each sample, and the number of the sample within its dataset."""
logger = logging.getLogger(__name__)

_ARRAYS = ("dataset_index", "dataset_sample_index")


def build_blending_index(weights: NDArray[np.float64], size: int) -> Blending:
    """Return the blend of `size` samples for weights that sum to 1; a dataset of weight 0 is never chosen."""
    return _number_samples(_choose_datasets(weights, size, None), len(weights))


def build_exhaustive_blending_index(sizes: NDArray[np.int64]) -> Blending:
    """Return the blend that takes every sample of every dataset once, interleaved in proportion to the sizes."""
    total = int(sizes.sum())
    return _number_samples(_choose_datasets(sizes / max(total, 1), total, sizes), len(sizes))


def _choose_datasets(weights: NDArray[np.float64], size: int, limits: NDArray[np.int64] | None) -> NDArray[np.int16]:
    """Return the dataset number of each of `size` samples [size]; `limits` bounds the samples of each dataset."""
    length = max(_SHORTEST_BLOCK, math.isqrt(size))
    starts = np.arange(0, size, length, dtype=np.int64)
    chosen = np.empty((length, len(starts)), np.int16)
    counts = _guess_counts(weights, starts, limits)
    ends = np.empty_like(counts)
    wrong = np.ones(len(starts), bool)
    while wrong.any():
        chosen[:, wrong], ends[:, wrong] = _run_blocks(weights, starts[wrong], counts[:, wrong], length, limits)
        wrong[0] = False
        wrong[1:] = (counts[:, 1:] != ends[:, :-1]).any(axis=0)
        counts[:, 1:] = ends[:, :-1]
    return chosen.T.reshape(-1)[:size]


def _guess_counts(
    weights: NDArray[np.float64], starts: NDArray[np.int64], limits: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """Estimate the counts before each start: near w_d * n, summing to n; [datasets, starts]."""
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
    """Run the recursion over `length` samples of every block; return choices [length, blocks] and final counts."""
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


def _number_samples(dataset_index: NDArray[np.int16], num_datasets: int) -> Blending:
    """Number the samples of each dataset in the order in which the blend takes them."""
    order = np.argsort(dataset_index, kind="stable")
    counts = np.bincount(dataset_index, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    sample_index: NDArray[Any] = np.empty(len(dataset_index), np.int64)
    sample_index[order] = np.arange(len(dataset_index), dtype=np.int64) - firsts
    return dataset_index, sample_index


def normalise(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1, rounded as Megatron rounds them: the hashed description of a blend holds them."""
    array = np.array(weights, np.float64)
    normalised: list[float] = (array / np.sum(array)).tolist()
    return normalised


class BlendedDataset:
    """Blend of several datasets of one split; `dataset_id` (i64) of a sample is the number of its dataset."""

    def __init__(
        self,
        datasets: Sequence[SplitDataset],
        weights: Sequence[float],
        size: int | None,
        *,
        cache_folder: Path | None,
        written_ns: int | None = None,
        cache_is_checked: bool = False,
    ) -> None:
        """Load the index arrays from the cache, or build them and save them there.

        Args:
            weights: how much of each; their sizes if `size` is None.
            size: number of samples; None for every sample of every dataset once.

        Raises:  DataError if a dataset has fewer samples than the blend takes of it.
        """
        if len(datasets) > MOST_DATASETS:
            raise DataError(f"a blend has at most {MOST_DATASETS} datasets, not {len(datasets)}; merge some of them")
        self.datasets, self.requested, self.name = tuple(datasets), size, datasets[0].name
        self.weights = list(weights) if size is None or not sum(weights) else normalise(weights)
        self.identity = {
            "class": "BlendedDataset",
            "datasets": [dataset.identity for dataset in datasets],
            "split": self.name,
            "weights": self.weights,
            "size": size,
        }
        spec = IndexSpec(f"BlendedDataset-{self.name}", self.description, _ARRAYS, self._build)
        cached = load_or_build(cache_folder, spec, written_ns, is_checked=cache_is_checked)
        self.dataset_index: NDArray[np.int16] = cached.arrays["dataset_index"]
        self.dataset_sample_index: NDArray[np.int64] = cached.arrays["dataset_sample_index"]
        problems = [cached.problem, *(dataset.cache_problem for dataset in datasets)]
        self.cache_problem = next(filter(None, problems), None)
        self._refuse_too_few()

    @cached_property
    def description(self) -> str:
        """Return the JSON text whose md5 names the cache files."""
        return json.dumps(self.identity, indent=4)

    @property
    def request_text(self) -> str:
        """Describe the requested samples and the datasets they come from, for messages."""
        requested = "every sample once" if self.requested is None else f"{self.requested} samples"
        return f"{requested} of a blend of {len(self.datasets)} datasets"

    @property
    def summary(self) -> str:
        """Describe the size of the blend and, on one line each, of its datasets."""
        parts = zip(self.datasets, self.counts.tolist(), self.weights, strict=True)
        of_each = [
            f"{count} of {dataset.prefix}, which has {dataset.summary}"
            + ("" if self.requested is None else f"; weight {weight:.6g}")
            for dataset, count, weight in parts
        ]
        return "\n        ".join([f"{len(self)} samples of {len(self.datasets)} datasets:", *of_each])

    @property
    def sources(self) -> tuple[str, ...]:
        """Return a unique name for each dataset: its prefix, with its place in the blend if the prefix repeats."""
        prefixes = [str(dataset.prefix) for dataset in self.datasets]
        return tuple(
            prefix if prefixes.count(prefix) == 1 else f"{prefix} ({number})"
            for number, prefix in enumerate(prefixes, start=1)
        )

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of samples taken from each dataset; [datasets]."""
        return np.bincount(self.dataset_index, minlength=len(self.datasets))

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Return sample `item`: the sample of the chosen dataset with the dataset's number as `dataset_id`."""
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        number = self.dataset_index[item]
        sample = self.datasets[number][int(self.dataset_sample_index[item])]
        return {"dataset_id": np.asarray(number, np.int64), **sample}

    def _build(self) -> Arrays:
        if self.requested is None:
            sizes = np.array(self.weights, np.int64)
            return dict(zip(_ARRAYS, build_exhaustive_blending_index(sizes), strict=True))
        weights = np.array(self.weights, np.float64)
        return dict(zip(_ARRAYS, build_blending_index(weights, self.requested), strict=True))

    def _refuse_too_few(self) -> None:
        problems = [
            f"{dataset.prefix} has {len(dataset)} samples, the blend takes {count}"
            for dataset, count in zip(self.datasets, self.counts.tolist(), strict=True)
            if count > len(dataset)
        ]
        if problems:
            raise DataError(
                "\n  ".join(
                    [
                        f"the {self.name} blend takes more samples of a dataset than were built; give a larger "
                        "--mid-level-dataset-surplus:",
                        *problems,
                    ]
                )
            )
