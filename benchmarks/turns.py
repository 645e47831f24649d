"""Contenders take their steps in turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def seconds_in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each contender in each round, behind two of each that do not count; the order changes."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    for number in range(rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            began = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - began)
    return times
