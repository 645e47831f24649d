"""Several datasets as one: sample i comes from one of them, in an order that keeps to the weights.

What is where is decided by `blend_index`; its arrays are kept in the index cache if the run names a folder for it.

Source:  Megatron-LM `BlendedDataset`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.blend_index import MOST_DATASETS, build_blending_index, build_exhaustive_blending_index
from megalith.data.index_cache import Arrays, Recipe, load_or_build
from megalith.data.samples import SplitDataset
from megalith.errors import DataError

logger = logging.getLogger(__name__)

_ARRAYS = ("dataset_index", "dataset_sample_index")


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, rounded as Megatron rounds them: the hashed description of a blend shows them."""
    array = np.array(weights, np.float64)
    normalised: list[float] = (array / np.sum(array)).tolist()
    return normalised


class BlendedDataset:
    """Samples of several datasets of one split; they say in `dataset_id` (i64) which one they are of.

    Attributes:
        datasets: in the order of the blend.
        name: train, valid or test.
        requested: number of samples asked for; None for every sample of every dataset once.
        weights: of the datasets; where every sample is taken once, their sizes.
        identity: what its cache files depend on.
        cache_problem: why indices could not be saved, its own or those of a dataset.
    """

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
            datasets: of the same split, at least one.
            weights: how much of each; their sizes if `size` is None.
            size: number of samples; None for every sample of every dataset once.
            cache_folder: folder of the cache, None to keep nothing.
            written_ns: as of `Portion`, of the newest of them.
            cache_is_checked: as of `Portion`.

        Raises:
            DataError: a dataset has fewer samples than the blend takes of it.
        """
        if len(datasets) > MOST_DATASETS:
            raise DataError(f"a blend of {len(datasets)} datasets: at most {MOST_DATASETS} can be told apart")
        self.datasets, self.requested, self.name = tuple(datasets), size, datasets[0].name
        self.weights = list(weights) if size is None or not sum(weights) else normalise(weights)
        self.identity = {
            "class": "BlendedDataset",
            "datasets": [dataset.identity for dataset in datasets],
            "split": self.name,
            "weights": self.weights,
            "size": size,
        }
        recipe = Recipe(f"BlendedDataset-{self.name}", self.description, _ARRAYS, self._build)
        cached = load_or_build(cache_folder, recipe, written_ns, is_checked=cache_is_checked)
        self.dataset_index: NDArray[np.int16] = cached.arrays["dataset_index"]
        self.dataset_sample_index: NDArray[np.int64] = cached.arrays["dataset_sample_index"]
        problems = [cached.problem, *(dataset.cache_problem for dataset in datasets)]
        self.cache_problem = next(filter(None, problems), None)
        self._refuse_too_few()

    @cached_property
    def description(self) -> str:
        """The text whose md5 names the cache files."""
        return json.dumps(self.identity, indent=4)

    @property
    def built_for(self) -> str:
        """What was asked of it, and what that is made of."""
        asked = "every sample once" if self.requested is None else f"{self.requested} samples"
        return f"{asked} of a blend of {len(self.datasets)} datasets"

    @property
    def summary(self) -> str:
        """How much of it there is, and what it is made of: a line for each dataset."""
        parts = zip(self.datasets, self.counts.tolist(), self.weights, strict=True)
        of_each = [
            f"{count} of {dataset.prefix}, which has {dataset.summary}"
            + ("" if self.requested is None else f"; weight {weight:.6g}")
            for dataset, count, weight in parts
        ]
        return "\n        ".join([f"{len(self)} samples of {len(self.datasets)} datasets:", *of_each])

    @property
    def sources(self) -> tuple[str, ...]:
        """A name for each dataset: its prefix, with its place in the blend where another one has the same."""
        prefixes = [str(dataset.prefix) for dataset in self.datasets]
        return tuple(
            prefix if prefixes.count(prefix) == 1 else f"{prefix} ({number})"
            for number, prefix in enumerate(prefixes, start=1)
        )

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples taken of each dataset."""
        return np.bincount(self.dataset_index, minlength=len(self.datasets))

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Sample `item`: that of a `GPTDataset`, and its dataset."""
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
            f"{dataset.prefix} has {len(dataset)} samples, and the blend takes {count}"
            for dataset, count in zip(self.datasets, self.counts.tolist(), strict=True)
            if count > len(dataset)
        ]
        if problems:
            raise DataError(
                "\n  ".join(
                    [
                        f"the {self.name} blend takes more samples of a dataset than it was built with; give a larger "
                        "--mid-level-dataset-surplus:",
                        *problems,
                    ]
                )
            )
