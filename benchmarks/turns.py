"""Contenders take their steps in turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

Step = Callable[[], object]


def seconds_in_turns(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
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


def _take_steps(build: Callable[[], Step], asked: Connection) -> None:
    """Build the contender and take a step whenever one is asked for, until None is."""
    step = build()
    while asked.recv() is not None:
        step()
        asked.send(True)


@contextmanager
def in_processes(builders: Mapping[str, Callable[[], Step]]) -> Iterator[dict[str, Step]]:
    """The steps of contenders that each have a process of their own, as users run them.

    In one process they share the allocator: what one frees is memory that the other need not have faulted in, and the
    other way round. The builders must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        steps: dict[str, Step] = {}
        for name, build in builders.items():
            here, there = context.Pipe()
            process = context.Process(target=_take_steps, args=(build, there), daemon=True)
            process.start()
            there.close()
            stack.callback(process.join)
            stack.callback(here.send, None)
            steps[name] = lambda here=here: (here.send(True), here.recv())  # type: ignore[misc]
        yield steps
