"""The number of threads is the one with which a step takes the least time, by a clock that is made up."""

from __future__ import annotations

import pytest
from torch import Tensor

from megalith.serve.runner import Batch, FakeRunner
from megalith.serve.thread_count import fastest_count


class _Timed(FakeRunner):
    """A step takes as long as the number of threads says."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self.seconds, self.count, self.now, self.counts = seconds, 0, 0.0, list[int]()

    def set_count(self, count: int) -> None:
        self.count = count
        self.counts.append(count)

    def run(self, batch: Batch) -> Tensor:
        self.now += self.seconds[self.count]
        return super().run(batch)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({8: 0.01, 4: 0.008, 2: 0.005, 1: 0.006}, 2),
        ({2: 0.010, 1: 0.0095}, 2),  # not clearly faster
        ({2: 0.010, 1: 0.006}, 1),
        ({6: 0.010, 3: 0.006, 1: 0.020}, 3),
        ({1: 0.01}, 1),
    ],
    ids=str,
)
def test_fewer_threads_where_they_are_clearly_faster(seconds: dict[int, float], chosen: int) -> None:
    runner = _Timed(seconds)
    assert fastest_count(runner, max(seconds), runner.set_count, lambda: runner.now) == chosen
    assert runner.count == chosen and set(runner.counts) == set(seconds)


def test_a_text_stands_before_each_token_where_there_is_an_encoder() -> None:
    runner = _Timed({2: 0.5})
    runner.run = lambda batch: runner.batches.append(batch)  # type: ignore[assignment, method-assign, return-value]
    fastest_count(runner, 2, runner.set_count, lambda: runner.now, encodes=True)
    size = runner.block_size
    assert all(piece.source == 1 and piece.start == size for batch in runner.batches for piece in batch.pieces)


def test_long_steps_have_all_threads_and_are_not_repeated() -> None:
    runner = _Timed({4: 0.5})
    assert fastest_count(runner, 4, runner.set_count, lambda: runner.now) == 4
    assert len(runner.batches) == 2
