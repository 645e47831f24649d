"""Random accepted command lines, in miniature: their layouts equal one process in fp64."""

from __future__ import annotations

import pytest

from ..campaigns.configurations import drawn, proven

SEEDS = tuple(range(1_000_000, 1_000_010))  # not those of the campaign's record
EACH = 3


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_random_configurations_equal_one_process(seed: int) -> None:
    chosen = drawn(seed, EACH)
    assert len(chosen) > 1
    for configuration in chosen:
        found = proven(configuration)
        assert not found["differences"], (configuration, found["differences"])
        assert found["compared"] > 20
