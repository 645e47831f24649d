"""Decisions that are equal on all ranks: sums over ranks, stop requests, the time limit, the stage of a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.kernels.transfer import HostCopy, to_device
from megalith.train.signals import STOP_SIGNALS, StopSignals

if TYPE_CHECKING:
    from megalith.train.checkpoint_saver import AsyncSaver


class NeverStop:
    """Stands in for `StopSignals` in a run that no signal stops."""

    requested: str | None = None


@dataclass(eq=False)
class RankConsensus:
    """What the ranks have agreed on in the last `sum_over_ranks`: stop requests, the time limit, the save.

    One small all-reduce after each step carries everything, so that no rank leaves a loop that another one is still in.
    The decisions are on the host as soon as anything is that was computed after them. A single process needs no
    all-reduce and decides at once.

    Attributes:
        stop: Signals that this process has received.
        contributes: Whether the sums include this rank; of the ranks that compute the same losses, one contributes.
        async_saver: Its state is shared; None without asynchronous saves.
        is_out_of_time: Whether time is up by the clock of this process.
    """

    stop: StopSignals | NeverStop
    context: ParallelContext
    contributes: bool = True
    async_saver: AsyncSaver | None = None
    is_out_of_time: Callable[[], bool] = lambda: False
    _decisions: HostCopy | list[float] = field(default_factory=lambda: [0.0] * 3, init=False)

    @property
    def is_single_rank(self) -> bool:
        """True if the run has one process."""
        return self.context.world.size == 1

    @property
    def requested(self) -> str | None:
        """Signal that any rank has received; of several the first in the order of `STOP_SIGNALS`."""
        if self.is_single_rank:
            return self.stop.requested
        pairs = zip(STOP_SIGNALS, self._decided[:-3], strict=False)  # none before the first sum
        return next((number.name for number, count in pairs if count > 0), None)

    @property
    def out_of_time(self) -> bool:
        """True if time is up by the clock of any rank."""
        return self._decided[-3] > 0

    @property
    def save_in_progress(self) -> bool:
        """True if a rank is still writing a checkpoint."""
        return self._decided[-2] > 0

    @property
    def save_failed(self) -> bool:
        """True if a rank could not write its part of a checkpoint."""
        return self._decided[-1] > 0

    @property
    def _decided(self) -> list[float]:
        """Return how many ranks received each stop signal, are out of time, are writing a save, and failed in one."""
        if isinstance(self._decisions, HostCopy):
            self._decisions = self._decisions.tolist()
        return self._decisions

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sum `sums` [n] over the ranks that contribute, in double precision, and update the shared decisions."""
        busy = self.async_saver is not None and self.async_saver.busy
        failed = self.async_saver is not None and self.async_saver.failed
        states = [float(flag) for flag in (self.is_out_of_time(), busy, failed)]
        if self.is_single_rank:
            self._decisions = states
            return sums
        requests = [float(self.stop.requested == number.name) for number in STOP_SIGNALS]
        own = sums.double() if self.contributes else torch.zeros_like(sums, dtype=torch.float64)
        flags = to_device(torch.tensor([*requests, *states], dtype=torch.float64), sums.device)
        total = comm.all_reduce(torch.cat([own, flags]), self.context.world)
        self._decisions = HostCopy(total[len(sums) :])
        return total[: len(sums)].to(sums.dtype)
