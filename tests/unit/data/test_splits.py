"""Shares of a dataset, and the samples that a run draws from each."""

from __future__ import annotations

import pytest

from megalith.data.samples import interval_range, parse_split, target_sizes
from megalith.errors import ConfigError


def test_shares_become_intervals() -> None:
    assert parse_split("949,50,1") == [(0, 0.949), (0.949, 0.999), (0.999, 1.0)]
    assert parse_split("100,0,0") == [(0, 1.0), None, None]
    assert parse_split("9 / 1") == [(0, 0.9), (0.9, 1.0), None]
    assert parse_split("0,1,0") == [None, (0.0, 1.0), None]
    assert parse_split("98.5,1,0.5") == parse_split("985,10,5")


@pytest.mark.parametrize("split", ["", "0,0,0", "1,1,1,1", "a,b", "1.2.3", "."])
def test_shares_that_make_no_split_are_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


def test_halves_round_to_even() -> None:
    assert interval_range((0.5, 1.0), 5) == range(2, 5)
    assert interval_range((0.5, 1.0), 7) == range(4, 7)


def test_target_sizes() -> None:
    # 1000 iterations of 16, evaluations of 5 batches every 50.
    assert target_sizes(train_iters=1000, eval_interval=50, eval_iters=5, global_batch_size=16) == (16000, 1680, 80)
    assert target_sizes(train_iters=1000, eval_interval=1, eval_iters=5, global_batch_size=16)[1] == 80080
    sizes = target_sizes(train_iters=9, train_samples=100, eval_interval=5, eval_iters=2, global_batch_size=12)
    assert sizes == (100, 48, 24)
