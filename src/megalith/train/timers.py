"""Where the time goes: named stretches of it, on this rank and over all of them, in the form that Megatron prints.

A timer of a level above that of the run costs nothing and says nothing. On a GPU a stretch above level 0 waits for the
device at both ends, so that it counts what was computed in it; no rank ever waits for another one because of a timer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.train.results import Times


class Timers:
    """The stretches of time of this rank, added up by name until they are taken.

    Args:
        level: those of a higher level are not measured (`--timing-log-level`).
        device: where the run computes.
    """

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

    def take(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """The seconds of these names (of all that there are, if None), which start anew; unknown ones are left out."""
        wanted = list(self._seconds) if names is None else names
        return {name: self._seconds.pop(name) for name in wanted if name in self._seconds}

    def _settle(self, level: int) -> None:
        if level and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def over_ranks(own: Mapping[str, float], context: ParallelContext, *, steps: int = 1) -> Times:
    """What each rank has taken, for each name that any of them has; all ranks call this together.

    Args:
        own: seconds by name, of this rank.
        context: all ranks.
        steps: the times are divided by this.
    """
    everywhere = comm.all_gather_objects(dict(own), context.world)
    names = list(dict.fromkeys(name for times in everywhere for name in times))
    return {name: [times.get(name, 0.0) / steps for times in everywhere] for name in names}
