"""What the datasets of all families of models have in common, and how one of them is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from megalith.data.indexed import IndexedDataset
from megalith.data.splits import SPLIT_NAMES, Interval, SplitMatrix, interval_range, parse_split


@dataclass(frozen=True)
class Shares:
    """How a dataset is divided into training, validation and test.

    Attributes:
        text: as the user wrote it; None where a split takes all of it.
        matrix: the same as intervals, None for a split without a share.
    """

    text: str | None
    matrix: SplitMatrix | None

    @classmethod
    def parse(cls, text: str | None) -> Shares:
        """Those of a --split.

        Raises:  ConfigError as of `parse_split`.
        """
        return cls(text, None if text is None else parse_split(text))

    def interval(self, split: int) -> Interval:
        """The share of a split, 0 train, 1 valid, 2 test, which is above zero."""
        interval = (0.0, 1.0) if self.matrix is None else self.matrix[split]
        assert interval is not None, "a split without a share is not built"
        return interval


@dataclass(frozen=True)
class Portion:
    """One split of one dataset, and what a run draws from it.

    Attributes:
        split: 0 train, 1 valid, 2 test; its share is above zero.
        requested: samples that the run draws, None for one epoch.
        shares: of the splits.
        path: prefix of the files as the user wrote it, None for made-up data.
        cache_folder: of the index cache, None to keep nothing.
        written_ns: when the documents were written, as `st_mtime_ns`. None if they never change.
        cache_is_checked: another rank of this start has checked the index cache.
    """

    split: int
    requested: int | None
    shares: Shares
    path: str | None = None
    cache_folder: Path | None = None
    written_ns: int | None = None
    cache_is_checked: bool = False

    @property
    def name(self) -> str:
        """train, valid or test."""
        return SPLIT_NAMES[self.split]

    def documents(self, whole: int) -> range:
        """Which of `whole` documents it takes."""
        return interval_range(self.shares.interval(self.split), whole)

    def said(self, whole: int) -> str:
        """The arithmetic of its share of `whole` documents, for an error message."""
        if self.shares.matrix is None:
            return f"it holds {whole} documents"
        (low, high), own = self.shares.interval(self.split), self.documents(whole)
        return (
            f"--split {self.shares.text} gives {self.name} documents round({low:.6g} * {whole}) = {own.start} to "
            f"round({high:.6g} * {whole}) = {own.stop}, which is {len(own)} of {whole}"
        )


class SplitDataset(Protocol):
    """The samples of one split of one dataset: `loader.Samples`, and what a blend and the screen ask.

    Attributes:
        name: train, valid or test.
        prefix: of its files, None for made-up data.
        requested: number of samples asked for, None for one epoch.
        identity: what its cache files depend on.
        cache_problem: why the indices could not be saved, None if they were or need not be.
    """

    name: str
    prefix: str | None
    requested: int | None
    identity: dict[str, Any]
    cache_problem: str | None

    @property
    def built_for(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]: ...


class SampleRule(Protocol):
    """How the samples of a family of models are made of the sequences of a dataset."""

    @property
    def class_name(self) -> str:
        """Megatron's name of this kind of dataset; index caches have it in their names."""
        ...

    def dataset(self, documents: IndexedDataset, portion: Portion) -> SplitDataset:
        """The samples of a portion of `documents`, which are those of every split."""
        ...
