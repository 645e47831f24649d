"""The number of threads is the one with which a step takes the least time, by a clock that is made up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from megalith.cli.serve import _tune_threads
from megalith.kernels.cpu.process import ThreadsUnderLoad, tune_num_threads
from megalith.serve.engine import Engine
from megalith.serve.request import Request, Sampling
from megalith.serve.runner import Batch, decoding_step

from ...fake_runner import FakeRunner
from .models import Letters


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


class _Machine:
    """Two cores, of which other programs take `taken`; a token takes as long as it did where this was measured."""

    def __init__(self, count: int = 2) -> None:
        self.taken, self.count, self.now, self.cpu = 0, count, 0.0, 0.0
        self.threads = ThreadsUnderLoad(count, 2, self.set_count, lambda: self.now, lambda: self.cpu)

    def set_count(self, count: int) -> None:
        self.count = count

    def decode(self, steps: int = 1, tokens: int = 1) -> float:
        """Return the mean seconds of these steps."""
        began = self.now
        for _ in range(steps):
            with self.threads.step(tokens):
                starved = self.count + self.taken > 2
                seconds = 0.54 if starved and self.count > 1 else {1: 0.011, 2: 0.008}[self.count]
                self.now += seconds * tokens
                self.cpu += seconds * tokens * self.count * (0.48 if starved else 0.95)
        return (self.now - began) / steps


def test_a_busy_program_leaves_one_thread_until_it_ends() -> None:
    machine = _Machine()
    assert machine.decode(100) == pytest.approx(0.008)
    machine.taken = 1
    machine.decode(3)  # in which it shows
    assert machine.count == 1
    assert machine.decode(50_000) < 0.0125, "attempts with all threads cost much"
    machine.taken = 0
    machine.decode(64 * 100)
    assert machine.count == 2
    assert machine.decode(1000) == pytest.approx(0.008)


def test_all_threads_are_tried_again_where_a_busy_program_was_there_at_the_start() -> None:
    machine = _Machine(count=1)
    machine.taken = 1
    assert machine.decode(1000) < 0.015
    machine.taken = 0
    machine.decode(64 * 100)
    assert machine.count == 2


def test_threads_that_sleep_while_others_compute_are_kept_where_fewer_are_no_faster() -> None:
    seconds, clock, cpu, counts = {8: 0.004, 4: 0.005}, [0.0], [0.0], list[int]()
    threads = ThreadsUnderLoad(8, 8, counts.append, lambda: clock[0], lambda: cpu[0])
    total = 0
    for _ in range(10_000):
        with threads.step(1):
            clock[0] += seconds[threads.count]
            cpu[0] += seconds[threads.count] * threads.count / 2
            total += threads.count
    assert threads.count == 8 and total / 10_000 > 7.9 and set(counts) == {4, 8}


def test_steps_of_other_numbers_of_tokens_are_not_compared() -> None:
    machine = _Machine()
    machine.taken = 1
    machine.decode(3)
    assert machine.count == 1  # on trial
    machine.decode(1, tokens=300)
    assert machine.count == 2, "one step of many tokens, which takes longer, is no reason to keep one thread"
    for tokens in range(1, 50):
        machine.decode(1, tokens=tokens)
    assert machine.count == 2


def test_a_server_watches_the_load_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    engine, tokens = Engine(runner, Letters()), list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    _tune_threads(runner, engine)  # type: ignore[arg-type]
    assert isinstance(getattr(engine.around_step, "__self__", None), ThreadsUnderLoad)

    def around_step(number: int) -> AbstractContextManager[None]:
        tokens.append(number)
        return nullcontext()

    engine.around_step = around_step
    list(engine.run(Request((3, 1, 4, 1, 5), 3, Sampling(temperature=0.0), stop_ids=())))
    assert tokens == [5, 1, 1]
