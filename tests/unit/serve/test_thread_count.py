"""The number of threads is the one with which a step takes the least time, by a clock that is made up."""

from __future__ import annotations

import pytest
from torch import Tensor

from megalith.kernels.cpu.process import tune_num_threads
from megalith.serve.runner import Batch, decoding_step

from ...fake_runner import FakeRunner


class _Timed(FakeRunner):
    """A step takes as long as the number of threads says."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self.seconds, self.count, self.now, self.counts = seconds, 0, 0.0, list[int]()

    def set_count(self, count: int) -> None:
        self.count = count
        self.counts.append(count)

    def step(self) -> None:
        self.run(decoding_step(self))

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
    assert tune_num_threads(runner.step, max(seconds), runner.set_count, lambda: runner.now) == chosen
    assert runner.count == chosen and set(runner.counts) == set(seconds)


def test_a_text_stands_before_each_token_where_there_is_an_encoder() -> None:
    runner = FakeRunner()
    chunks = decoding_step(runner, encodes=True).chunks
    assert len(chunks) == 8 and all(chunk.encoder_length == 1 and chunk.start == runner.block_size for chunk in chunks)


def test_long_steps_have_all_threads_and_are_not_repeated() -> None:
    runner = _Timed({4: 0.5})
    assert tune_num_threads(runner.step, 4, runner.set_count, lambda: runner.now) == 4
    assert len(runner.batches) == 2
