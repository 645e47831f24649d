"""What the datasets of all families of models have in common, and how one of them is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from megalith.data.indexed import IndexedDataset
from megalith.data.splits import SPLIT_NAMES, Interval, SplitMatrix


@dataclass(frozen=True)
class Shares:
    """How a dataset is divided into training, validation and test.

    Attributes:
        text: as the user wrote it; None where a split takes all of it.
        matrix: the same as intervals, None for a split without a share.
    """

    text: str | None
    matrix: SplitMatrix | None

    def interval(self, split: int) -> Interval:
        """The share of a split, 0 train, 1 valid, 2 test, which is above zero."""
        interval = (0.0, 1.0) if self.matrix is None else self.matrix[split]
        assert interval is not None, "a split without a share is not built"
        return interval

    def said(self, split: int, whole: int, own: range) -> str:
        """The arithmetic of a share of `whole` documents, for an error message."""
        if self.matrix is None:
            return f"it holds {whole} documents"
        low, high = self.interval(split)
        return (
            f"--split {self.text} gives {SPLIT_NAMES[split]} documents round({low:.6g} * {whole}) = {own.start} to "
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

    def dataset(
        self,
        documents: IndexedDataset,
        *,
        path: str | None,
        split: int,
        requested: int | None,
        shares: Shares,
        cache_folder: Path | None,
        written_ns: int | None,
    ) -> SplitDataset:
        """One split of one dataset.

        Args:
            documents: all of them, of every split.
            path: prefix of the files as the user wrote it.
            split: 0 train, 1 valid, 2 test; its share is above zero.
            requested: samples that the run draws, None for one epoch.
            shares: of the splits.
            cache_folder: of the index cache, None to keep nothing.
            written_ns: when the documents were written, as `st_mtime_ns`.
        """
        ...
