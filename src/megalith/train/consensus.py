"""Decisions that all ranks take alike: loss totals, stop requests, the time limit, the stage of a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.train.signals import STOP_SIGNALS, StopSignals

if TYPE_CHECKING:
    from megalith.train.checkpoint_saver import BackgroundSaver


class NeverStop:
    """Stands in for `StopSignals` in a run that no signal stops."""

    requested: str | None = None


@dataclass(eq=False)
class RankConsensus:
    """What the ranks have agreed on in the last `totals`: requests to stop, the time limit, the state of a save.

    One small all-reduce after each step carries everything, so that no rank leaves a loop that another one is still in.
    A single process needs no all-reduce and decides at once.

    Attributes:
        stop: Signals that this process has received.
        counts: Whether the sums of this rank count; several ranks compute the same losses, and one of them counts.
        writers: The asynchronous saves, if there are any.
        is_late: Whether time is up by the clock of this process.
        out_of_time: Time is up by the clock of any rank.
        busy: A rank is still writing a checkpoint.
        failed: A rank could not write its part of one.
    """

    stop: StopSignals | NeverStop
    context: ParallelContext
    counts: bool = True
    writers: BackgroundSaver | None = None
    is_late: Callable[[], bool] = lambda: False
    out_of_time: bool = field(default=False, init=False)
    busy: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)
    _requested: str | None = field(default=None, init=False)

    @property
    def alone(self) -> bool:
        """True if the run has one process."""
        return self.context.world.size == 1

    @property
    def requested(self) -> str | None:
        """Signal that any rank has received; of several the first in the order of `STOP_SIGNALS`."""
        return self.stop.requested if self.alone else self._requested

    def totals(self, sums: Tensor) -> Tensor:
        """Sum `sums` [n] over the ranks that count, in double precision, and renew what is agreed."""
        busy = self.writers is not None and self.writers.busy
        failed = self.writers is not None and self.writers.failed
        late = self.is_late()
        if self.alone:
            self.out_of_time, self.busy, self.failed = late, busy, failed
            return sums
        own = sums.double() if self.counts else torch.zeros_like(sums, dtype=torch.float64)
        requests = [float(self.stop.requested == number.name) for number in STOP_SIGNALS]
        states = [float(late), float(busy), float(failed)]
        flags = torch.tensor([*requests, *states], dtype=torch.float64, device=sums.device)
        total = comm.all_reduce(torch.cat([own, flags]), self.context.world)
        *asked, late, busy, failed = (count > 0 for count in total[len(sums) :].tolist())
        names = [number.name for number, there in zip(STOP_SIGNALS, asked, strict=True) if there]
        self._requested = names[0] if names else None
        self.out_of_time, self.busy, self.failed = late, busy, failed
        return total[: len(sums)].to(sums.dtype)
