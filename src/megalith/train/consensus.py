"""Decisions that are equal on all ranks: sums over ranks, stop requests, the time limit, the stage of a save."""

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
    from megalith.train.checkpoint_saver import AsyncSaver


class NeverStop:
    """Stands in for `StopSignals` in a run that no signal stops."""

    requested: str | None = None


@dataclass(eq=False)
class RankConsensus:
    """What the ranks have agreed on in the last `sum_over_ranks`: stop requests, the time limit, the save.

    One small all-reduce after each step carries everything, so that no rank leaves a loop that another one is still in.
    A single process needs no all-reduce and decides at once.

    Attributes:
        stop: Signals that this process has received.
        contributes: Whether the sums include this rank; of the ranks that compute the same losses, one contributes.
        async_saver: Its state is shared; None without asynchronous saves.
        is_out_of_time: Whether time is up by the clock of this process.
        out_of_time: Time is up by the clock of any rank.
        save_in_progress: A rank is still writing a checkpoint.
        save_failed: A rank could not write its part of one.
    """

    stop: StopSignals | NeverStop
    context: ParallelContext
    contributes: bool = True
    async_saver: AsyncSaver | None = None
    is_out_of_time: Callable[[], bool] = lambda: False
    out_of_time: bool = field(default=False, init=False)
    save_in_progress: bool = field(default=False, init=False)
    save_failed: bool = field(default=False, init=False)
    _requested: str | None = field(default=None, init=False)

    @property
    def is_single_rank(self) -> bool:
        """True if the run has one process."""
        return self.context.world.size == 1

    @property
    def requested(self) -> str | None:
        """Signal that any rank has received; of several the first in the order of `STOP_SIGNALS`."""
        return self.stop.requested if self.is_single_rank else self._requested

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sum `sums` [n] over the ranks that contribute, in double precision, and update the shared decisions."""
        busy = self.async_saver is not None and self.async_saver.busy
        failed = self.async_saver is not None and self.async_saver.failed
        late = self.is_out_of_time()
        if self.is_single_rank:
            self.out_of_time, self.save_in_progress, self.save_failed = late, busy, failed
            return sums
        own = sums.double() if self.contributes else torch.zeros_like(sums, dtype=torch.float64)
        requests = [float(self.stop.requested == number.name) for number in STOP_SIGNALS]
        states = [float(late), float(busy), float(failed)]
        flags = torch.tensor([*requests, *states], dtype=torch.float64, device=sums.device)
        total = comm.all_reduce(torch.cat([own, flags]), self.context.world)
        *asked, late, busy, failed = (count > 0 for count in total[len(sums) :].tolist())
        names = [number.name for number, there in zip(STOP_SIGNALS, asked, strict=True) if there]
        self._requested = names[0] if names else None
        self.out_of_time, self.save_in_progress, self.save_failed = late, busy, failed
        return total[: len(sums)].to(sums.dtype)
