"""Timers by name, on this rank and gathered from all ranks, in the form that Megatron prints.

A timer of a level above that of the run costs nothing and reports nothing. On a GPU a timer above level 0 synchronises
the device at both ends, so that it measures the computation; no rank waits for another one because of a timer.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.distributed import comm
from megalith.distributed.context import Axis, Observer, ParallelContext
from megalith.train.results import Evaluation, Hook, SavedCheckpoint, ScheduledSave, StepResult, Times, WindowReport


class Timers:
    """Seconds by name on this rank, up to a level (`--timing-log-level`), summed until `take`."""

    def __init__(self, level: int = 0, device: torch.device | str = "cpu") -> None:
        self.level, self._device = level, torch.device(device)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str, level: int = 0) -> Iterator[None]:
        """Add the time of the block to that of `name`; a block that fails counts nothing."""
        if level > self.level:
            yield
            return
        self._settle(level)
        self._seconds.setdefault(name, 0.0)  # in the order in which things begin
        began = time.perf_counter()
        yield
        self._settle(level)
        self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _settle(self, level: int) -> None:
        if level and not is_host(self._device):
            torch.accelerator.synchronize(self._device)


def gather_times(own: Mapping[str, float], context: ParallelContext, *, steps: int = 1) -> Times:
    """Gather the seconds of each rank, divided by `steps`, for each name on any rank; all ranks call it together."""
    everywhere = comm.all_gather_objects(dict(own), context.world)
    names = list(dict.fromkeys(name for times in everywhere for name in times))
    return {name: [times.get(name, 0.0) / steps for times in everywhere] for name in names}


_WORTH_SAYING = 0.05  # of a step


@dataclass(frozen=True)
class Work:
    """The time that a rank computed in an interval, per step."""

    rank: int
    host: str
    busy: float  # seconds not spent waiting for others
    seconds: float  # of the whole step


class StragglerReport(Hook):
    """`--log-straggler`: which rank the others wait for, and what that costs.

    In a step of a parallel run every rank takes the same wall time; a slow rank waits less than the others. The busy
    time of each rank is gathered at the end of each interval except the first; all ranks need this hook. The `named`
    slowest and fastest ranks are printed.
    """

    def __init__(self, axis: Axis, clock: WaitClock, say: Callable[[str], None], named: int) -> None:
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
    """Return a line that names the slow ranks and what a step loses by them."""
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


class WaitClock(Observer):
    """Sums the time spent waiting in collectives.

    On a GPU a collective holds up only the stream that needs its result, and for as long as the slowest rank takes to
    come; that is what the events measure.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds, self._since = 0.0, 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.waiting()

    def after(self, operation: str, axis: Axis) -> None:
        self.waited()

    def waiting(self, peer: int | None = None) -> None:
        if not is_host(self._device):
            pair = (torch.Event(self._device, enable_timing=True), torch.Event(self._device, enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._since = time.perf_counter()

    def waited(self) -> None:
        if not is_host(self._device):
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._since

    def take(self) -> float:
        """Return the seconds waited since the last call; on a GPU this waits for transfers under way."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
