"""Micro-batches: order, resume, ranks, workers, and the end of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megalith.data.loader import BatchLoader, SequentialSampler
from megalith.errors import DataError


class Numbers:
    """Stands for a GPTDataset: sample i consists of the number i."""

    name, requested, request_text = "train", 20, "20 samples (1 epochs)"

    def __len__(self) -> int:
        return 22

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        if item == 13:
            raise DataError("sample 13 is damaged")
        tokens = np.full(3, item, np.int64)
        return {"tokens": tokens, "loss_mask": np.ones(3, np.float32)}


def loader(micro_batch_size: int, consumed: int = 0, **options: int) -> BatchLoader:
    return BatchLoader(Numbers(), micro_batch_size, consumed, **options)  # type: ignore[arg-type]


def taken(source: BatchLoader, count: int) -> list[list[int]]:
    return [next(source)["tokens"][:, 0].tolist() for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_order_and_types_are_those_of_the_samples(num_workers: int) -> None:
    source = loader(2, num_workers=num_workers)
    batch = next(source)
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((2, 3), torch.int64)
    assert batch["loss_mask"].dtype == torch.float32
    assert taken(source, 5) == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    source.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_continues_after_what_it_consumed(num_workers: int) -> None:
    resumed = loader(3, 6, num_workers=num_workers)
    assert taken(resumed, 2) == [[6, 7, 8], [9, 10, 11]]
    resumed.close()


def test_ranks_share_each_block() -> None:
    ranks = [loader(2, 14, rank=rank, num_ranks=2) for rank in (0, 1)]
    assert [taken(source, 2) for source in ranks] == [[[14, 15], [18, 19]], [[16, 17], [20, 21]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_data_is_explained(num_workers: int) -> None:
    source = loader(5, 15, num_workers=num_workers)
    taken(source, 1)
    for _ in range(2):
        with pytest.raises(DataError, match="train.* 20 .* 22 .* 5"):
            next(source)
    source.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_comes_with_its_batch(num_workers: int) -> None:
    source = loader(2, 8, num_workers=num_workers)
    assert taken(source, 2) == [[8, 9], [10, 11]]
    with pytest.raises(DataError, match="sample 13"):
        next(source)
    source.close()


def test_more_consumed_than_there_is_gives_nothing() -> None:
    for consumed, left in ((12, []), (10, []), (7, [range(7, 9)])):
        assert list(SequentialSampler(10, 2).micro_batches(consumed, 0, 1)) == left
