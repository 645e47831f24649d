"""Batch sizes against walks step by step, and their text form."""

from __future__ import annotations

import random

import pytest

from megalith.schedules.batch_size import BatchSizeSchedule, Stage, constant, ramped, read_steps, stepped


def _by_walking(sizes: BatchSizeSchedule, iterations: int, consumed: int) -> int:
    for _ in range(iterations):
        consumed += sizes.nominal_size(consumed)
    return consumed


def test_a_ramp_is_megatrons_formula_at_every_sample() -> None:
    draw = random.Random(1)
    for _ in range(200):
        start, increment, count, samples = (draw.randint(1, most) for most in (5, 4, 7, 90))
        final = start + increment * count
        sizes = ramped(start, increment, samples, final)
        for consumed in range(2 * samples):
            size = final if consumed > samples else start + int(consumed / (samples / count)) * increment
            assert sizes.nominal_size(consumed) == size, (start, increment, samples, consumed)


def test_samples_of_iterations_and_back() -> None:
    draw = random.Random(2)
    for _ in range(200):
        start, increment, count, samples = (draw.randint(2, most) for most in (5, 4, 7, 90))
        sizes = ramped(start, increment, samples, start + increment * count, unit=2)
        iterations, consumed = draw.randint(0, 60), draw.randint(0, 150)
        assert sizes.consumed_after(iterations, consumed) == _by_walking(sizes, iterations, consumed)
        whole = sizes.consumed_after(iterations)
        assert sizes.iterations_of(whole) == iterations
        assert sizes.iterations_of(whole + sizes.nominal_size(whole) - 1) == iterations, (
            "a step that does not fit is not begun"
        )


def test_a_long_run_is_counted_at_once() -> None:
    sizes = ramped(16, 16, 5_859_375, 1536)
    assert sizes.iterations_of(10**9) == pytest.approx(10**9 / 1536 + 11_000, rel=0.02)


def test_sizes_by_tokens_are_read() -> None:
    assert read_steps("0:768 250B:1536") == [(0, 768), (250 * 10**9, 1536)]
    assert read_steps("0:4,1.5K:8") == [(0, 4), (1500, 8)]
    assert read_steps("0:1K 2M:1.5k") == [(0, 1000), (2 * 10**6, 1500)]
    assert read_steps("0:4 9:8 3:16") == [(0, 4), (3, 16), (9, 8)], "in any order"
    for wrong in ("", "4", "0:4 1K:0", "0:4 x:8", "0:", ":4", "-1:4", "0:4 infK:8", "nan:4", "0:1K1"):
        assert read_steps(wrong) is None, wrong
    assert stepped([(0, 4), (100, 8)], seq_length=16).stages == (Stage(0, 4), Stage(6, 8))
    assert stepped([(4, 4), (8, 8)], seq_length=8).stages == (Stage(0, 4), Stage(1, 8))
    for wrong_steps in ([(16, 4)], [(0, 4), (15, 8)], [(0, 4), (0, 8)]):
        with pytest.raises(ValueError, match="tokens"):
            stepped(wrong_steps, seq_length=16)


def test_sizes_by_tokens_are_megatrons() -> None:
    """A threshold is tokens // sequence length there; after 437 samples 3500 tokens at length 8 are reached."""
    sizes = stepped(read_steps("0:8 1K:12 3500:16") or [], seq_length=8)
    assert [sizes.nominal_size(consumed) for consumed in (0, 124, 125, 436, 437)] == [8, 8, 12, 12, 16]


def test_what_replicas_cannot_share_is_rounded_down() -> None:
    sizes = constant(30, unit=8)
    assert (sizes.nominal_size(0), sizes.num_micro_batches(0) * sizes.unit, sizes.num_micro_batches(0)) == (30, 24, 3)
