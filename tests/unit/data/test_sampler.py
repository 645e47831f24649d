"""Orders of samples: how they go on after a resume, and that all ranks together see what they should."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from megalith.data.loader import BatchLoader, BatchSampler, CyclicSampler, FullValidationSampler, SequentialSampler
from megalith.errors import DataError

from .test_loader import Numbers


def taken(sampler: BatchSampler, count: int, consumed: int = 0, num_ranks: int = 1) -> list[list[list[int | None]]]:
    """The next `count` micro-batches of every rank, block by block."""
    ranks = [islice(sampler.micro_batches(consumed, rank, num_ranks), count) for rank in range(num_ranks)]
    return [[list(batch) for batch in block] for block in zip(*ranks, strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_cyclic_epochs_go_on_after_each_other_on_all_ranks(num_ranks: int) -> None:
    sampler, per_epoch = CyclicSampler(50, 3), 50 // (3 * num_ranks)
    blocks = taken(sampler, 3 * per_epoch + 1, num_ranks=num_ranks)
    for epoch in range(3):
        seen = np.concatenate(blocks[epoch * per_epoch : (epoch + 1) * per_epoch]).ravel()
        assert len(set(seen)) == len(seen) == per_epoch * 3 * num_ranks
    first, second = (np.concatenate(blocks[n * per_epoch : (n + 1) * per_epoch]).ravel().tolist() for n in (0, 1))
    assert first != second
    for done in range(0, 3 * per_epoch):
        assert taken(sampler, 1, done * 3 * num_ranks, num_ranks) == blocks[done : done + 1]


def test_cyclic_cannot_go_on_in_the_middle_of_a_block() -> None:
    with pytest.raises(DataError, match=" 6 .* 4"):
        taken(CyclicSampler(50, 4), 1, consumed=6)
    assert taken(CyclicSampler(3, 4), 5) == []


@pytest.mark.parametrize(("total", "num_ranks"), [(22, 1), (22, 2), (24, 2), (1, 4)])
def test_a_whole_pass_has_each_sample_once_and_ends_with_a_full_batch(total: int, num_ranks: int) -> None:
    sampler = FullValidationSampler(total, micro_batch_size=2, num_micro_batches=3)
    iterations = sampler.iterations(num_ranks)
    assert iterations == -(-total // (6 * num_ranks))
    blocks = taken(sampler, 2 * 3 * iterations, consumed=99, num_ranks=num_ranks)
    half = len(blocks) // 2
    assert blocks[:half] == blocks[half:]
    flat = [number for block in blocks[:half] for batch in block for number in batch]
    assert len(flat) == iterations * 6 * num_ranks
    assert [number for number in flat if number is not None] == list(range(total))


def test_what_fills_up_a_batch_has_no_loss() -> None:
    loader = BatchLoader(Numbers(), 4, 0, sampler=FullValidationSampler(5, 4, 1))
    batches = [next(loader) for _ in range(3)]
    assert [batch["tokens"][:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 0, 0, 0], [0, 1, 2, 3]]
    assert batches[1]["loss_mask"].sum(1).tolist() == [3, 0, 0, 0]


@pytest.mark.parametrize("sampler", [SequentialSampler(22, 2), CyclicSampler(12, 2), FullValidationSampler(11, 2, 2)])
def test_readers_do_not_change_the_order(sampler: BatchSampler) -> None:
    loaders = [BatchLoader(Numbers(), 2, 0, num_workers=workers, sampler=sampler) for workers in (0, 1, 3)]
    orders = [[next(loader)["tokens"][:, 0].tolist() for _ in range(6)] for loader in loaders]
    assert orders[0] == orders[1] == orders[2]
    for loader in loaders:
        loader.close()
