"""Dataset interfaces of all model families: splits, their sizes, and factories."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from megalith.data.index_cache import CachedIndex, IndexSpec, load_or_build
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer

SPLIT_NAMES = ("train", "valid", "test")

Interval = tuple[float, float]
SplitMatrix = list[Interval | None]
Sizes = tuple[int | None, int | None, int | None]


def parse_split(split: str) -> SplitMatrix:
    """Return shares such as "949,50,1" as intervals of [0, 1], None for a share of zero.

    Numbers may be separated by anything; missing ones are 0.

    Raises:  ConfigError if there are no numbers or more than three, or they are all 0.
    Source:  Megatron-LM `parse_and_normalize_split`, `convert_split_vector_to_split_matrix`.
    """
    numbers = re.findall(r"[.0-9]+", split)
    try:
        shares = [float(number) for number in numbers]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or sum(shares) == 0:
        raise ConfigError(f"--split {split!r} is not one to three numbers with a sum above 0, such as 949,50,1")
    shares += [0.0] * (len(SPLIT_NAMES) - len(shares))
    total = sum(shares)
    # Running sums of the normalised shares from the integer 0: the hashed description of an index shows them.
    bounds: list[float] = [0]
    for share in shares:
        bounds.append(bounds[-1] + share / total)
    return [(low, high) if high > low else None for low, high in zip(bounds, bounds[1:], strict=False)]


def interval_range(interval: Interval, count: int) -> range:
    """Return the elements of 0 to `count` - 1 in an interval; halves round to even, as in Megatron."""
    low, high = interval
    return range(round(low * count), round(high * count))


def target_sizes(
    *,
    train_iters: int,
    train_samples: int | None = None,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    eval_batch_size: int | None = None,
) -> tuple[int, int, int]:
    """Compute the samples that a run draws for training, validation and test.

    Args:
        train_iters: iterations of the whole run, also where `train_samples` limits it.
        train_samples: samples of the whole run; by default `train_iters` full batches.
        eval_interval: iterations between evaluations; one more follows the last iteration.

    Source:  Megatron-LM `get_train_valid_test_num_samples`.
    """
    train = train_iters * global_batch_size if train_samples is None else train_samples
    per_evaluation = eval_iters * (eval_batch_size or global_batch_size)
    return train, (train_iters // eval_interval + 1) * per_evaluation, per_evaluation


@dataclass(frozen=True)
class SplitRatios:
    """Division of a dataset into training, validation and test.

    Attributes:
        text: as the user wrote it; None where a split takes all of it.
        matrix: the same as intervals, None for a split without a share.
    """

    text: str | None
    matrix: SplitMatrix | None

    @classmethod
    def parse(cls, text: str | None) -> SplitRatios:
        """Parse a --split; None gives each split all documents. Raises ConfigError as `parse_split` does."""
        return cls(text, None if text is None else parse_split(text))

    def interval(self, split: int) -> Interval:
        """Return the interval of a split (0 train, 1 valid, 2 test), whose share must be above zero."""
        interval = (0.0, 1.0) if self.matrix is None else self.matrix[split]
        assert interval is not None, "a split without a share is not built"
        return interval


@dataclass(frozen=True)
class SplitSpec:
    """Split of one dataset, and the samples that a run draws from it.

    Attributes:
        split: 0 train, 1 valid, 2 test; its share is above zero.
        requested: samples that the run draws, None for one epoch.
        path: prefix of the files as the user wrote it, None for mock data.
        cache_folder: folder of the index cache, None to keep nothing.
        written_ns: when the documents were written, as `st_mtime_ns`; None if they never change.
        cache_is_checked: whether another rank of this start has checked the index cache.
    """

    split: int
    requested: int | None
    ratios: SplitRatios
    path: str | None = None
    cache_folder: Path | None = None
    written_ns: int | None = None
    cache_is_checked: bool = False

    @property
    def name(self) -> str:
        """Return train, valid or test."""
        return SPLIT_NAMES[self.split]

    def documents(self, num_documents: int) -> range:
        """Return the documents of this split, as a range of 0 to `num_documents` - 1."""
        return interval_range(self.ratios.interval(self.split), num_documents)

    def identity(self, class_name: str, seed: int, sequence_length: int, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return all that the samples depend on, under Megatron's names and in the order in which it hashes them."""
        return {
            "class": class_name,
            "dataset_path": self.path,
            "num_samples": self.requested,
            "index_split": self.name,
            "random_seed": seed,
            "sequence_length": sequence_length,
            "split": self.ratios.text,
            "split_matrix": self.ratios.matrix,
            "tokenizer": tokenizer.identity(),
        }

    def load_or_build(self, spec: IndexSpec) -> CachedIndex:
        """Load the index arrays from the cache, or build and save them."""
        return load_or_build(self.cache_folder, spec, self.written_ns, is_checked=self.cache_is_checked)

    def unreadable(self, sample: int, error: Exception) -> DataError:
        """Return the error for a sample of the index that cannot be read from the documents."""
        return DataError(
            f"sample {sample} of the {self.name} split cannot be read from {self.path} ({error}): the files changed "
            "during the run or are damaged; start again, and if the error remains preprocess the text again"
        )

    def outside_vocabulary(self, tokens: NDArray[Any], vocab_size: int) -> DataError:
        """Return the error for tokens of which at least one lies outside the vocabulary."""
        low, high = int(tokens.min()), int(tokens.max())
        return DataError(
            f"{self.path} holds token {low if low < 0 else high}, outside the vocabulary of {vocab_size}: it was made "
            "with another tokenizer; give that tokenizer, or preprocess the text again"
        )

    @property
    def or_none(self) -> str:
        """Return the remedy of requesting no samples, as the end of a message; "" for training."""
        return "" if self.name == "train" else ", or request no samples (--eval-iters 0)"

    def describe_documents(self, num_documents: int) -> str:
        """Describe how the documents of this split follow from `num_documents`, for an error message."""
        if self.ratios.matrix is None:
            return f"it holds {num_documents} documents"
        (low, high), taken = self.ratios.interval(self.split), self.documents(num_documents)
        return (
            f"--split {self.ratios.text} gives {self.name} documents round({low:.6g} * {num_documents}) = "
            f"{taken.start} to round({high:.6g} * {num_documents}) = {taken.stop}, which is {len(taken)} of "
            f"{num_documents}"
        )


class MapDataset(Protocol):
    """Map-style dataset of one split (train, valid or test); `requested` is None for one epoch."""

    name: str
    requested: int | None

    @property
    def request_text(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]: ...


class SplitDataset(MapDataset, Protocol):
    """Samples of one split of one dataset, as blends and the console use it.

    Attributes:
        prefix: prefix of its files, None for mock data.
        identity: all that its cache files depend on.
        cache_problem: why the indices could not be saved, None if they were or need not be.
        summary: its size, in one line.
    """

    prefix: str | None
    identity: dict[str, Any]
    cache_problem: str | None

    @property
    def summary(self) -> str: ...


class DatasetFactory(Protocol):
    """Factory of the datasets of one model family, from the sequences of an indexed dataset."""

    @property
    def class_name(self) -> str:
        """Return Megatron's class name of the datasets, which the names of index caches contain."""
        ...

    def build(self, documents: IndexedDataset, spec: SplitSpec) -> SplitDataset:
        """Build the dataset of one split; `documents` holds the sequences of all splits."""
        ...
