"""The report of slow ranks: who, and what a step loses."""

from __future__ import annotations

import pytest

from megalith.train.timers import Work, report_line


def works(*busy: float, step: float) -> list[Work]:
    return [Work(rank, f"h{rank}", seconds, step) for rank, seconds in enumerate(busy)]


@pytest.mark.parametrize(
    ("ranks", "named", "line"),
    [
        (
            works(0.05, 0.25, 0.05, step=0.26),
            1,
            " slow rank: rank 1 (h1) 250.0 ms of work in a step, fastest rank 2 (h2) 50.0 ms; the others wait 200.0 ms "
            "of each step (77%)",
        ),
        (
            works(0.05, 0.25, 0.06, 0.2, step=0.26),
            2,
            " slow rank: rank 1 (h1) 250.0 ms, rank 3 (h3) 200.0 ms of work in a step, fastest rank 0 (h0) 50.0 ms, "
            "rank 2 (h2) 60.0 ms; the others wait 190.0 ms of each step (73%)",
        ),
        (works(0.2, 0.201, step=0.21), 1, " no slow rank: 200.0 to 201.0 ms of work in a step"),
    ],
)
def test_the_report(ranks: list[Work], named: int, line: str) -> None:
    assert report_line(ranks, named) == line
