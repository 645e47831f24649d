"""`--log-straggler`: which rank the others wait for, and what that costs.

In a step of a parallel run every rank takes the same wall time; a slow one is told by waiting less than the others.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.train.hooks import Hook
from megalith.train.results import Evaluation, SavedCheckpoint, ScheduledSave, StepResult, Times, WindowReport

_WORTH_SAYING = 0.05  # of a step


class Clock(Protocol):
    """Tells how long this rank has waited for others since it was last asked."""

    def take(self) -> float: ...


@dataclass(frozen=True)
class Work:
    """What a rank did in an interval, per step.

    Attributes:
        busy: seconds not spent waiting for others.
        seconds: of the whole step.
    """

    rank: int
    host: str
    busy: float
    seconds: float


class StragglerReport(Hook):
    """Gathers at the end of each interval but the first how busy each rank was. All ranks of the axis have this hook.

    Args:
        axis: all ranks.
        clock: of this rank.
        say: takes the report; what others than the first rank say is dropped there.
        named: how many of the slowest and of the fastest ranks are named.
    """

    def __init__(self, axis: Axis, clock: Clock, say: Callable[[str], None], named: int) -> None:
        self._axis, self._clock, self._say, self._named = axis, clock, say, named
        self._busy = self._seconds = 0.0
        self._steps = 0
        self._warm = False

    def after_step(self, result: StepResult) -> None:
        self._busy += max(0.0, result.seconds - self._clock.take())
        self._seconds += result.seconds
        self._steps += 1

    def after_timing(self, iteration: int, times: Times) -> None:
        self._clock.take()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self._clock.take()

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        self._clock.take()

    def after_save(self, saved: SavedCheckpoint) -> None:
        self._clock.take()

    def after_window(self, report: WindowReport) -> None:
        steps = max(1, self._steps)
        own = Work(self._axis.index, socket.gethostname(), self._busy / steps, self._seconds / steps)
        self._busy = self._seconds = 0.0
        self._steps = 0
        if self._warm:
            self._say(report_line(comm.all_gather_objects(own, self._axis), self._named))
        self._warm = True


def report_line(works: Sequence[Work], named: int) -> str:
    """One line: who is slow and what a step loses by it."""
    ordered = sorted(works, key=lambda work: work.busy, reverse=True)
    slowest, step = ordered[0], max(work.seconds for work in works)
    cost = slowest.busy - statistics.median_low(work.busy for work in works)
    fastest = ", ".join(_named(work) for work in ordered[: -named - 1 : -1])
    if cost < _WORTH_SAYING * step:
        return f" no slow rank: {1e3 * ordered[-1].busy:.1f} to {1e3 * slowest.busy:.1f} ms of work in a step"
    slow = ", ".join(_named(work) for work in ordered[:named])
    return (
        f" slow rank: {slow} of work in a step, fastest {fastest}; the others wait {1e3 * cost:.1f} ms of each step "
        f"({cost / step:.0%})"
    )


def _named(work: Work) -> str:
    return f"rank {work.rank} ({work.host}) {1e3 * work.busy:.1f} ms"
