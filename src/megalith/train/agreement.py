"""What all ranks must decide alike: the loss of a step, requests to stop, the time limit.

One small sum over all ranks after each step carries everything, so that no rank leaves a loop that another one is
still in. One process agrees with itself, at once and without a sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.train.signals import STOP_SIGNALS


class StopRequest(Protocol):
    """Whether someone outside asks the run to stop, and who: the name of a signal."""

    @property
    def requested(self) -> str | None: ...


class NeverStop:
    """No one asks."""

    requested: str | None = None


class Writers(Protocol):
    """What writes a checkpoint beside the training: whether it is at work, and whether it could not do it."""

    @property
    def busy(self) -> bool: ...

    @property
    def failed(self) -> bool: ...


class Agreement:
    """The requests and sums of all ranks, as of the last `totals`.

    Args:
        stop: the requests that reach this process.
        context: all ranks.
        counts: whether the sums of this rank count; they are the same on several ranks, and one of them speaks.
        writers: of this rank.

    Attributes:
        out_of_time: the clock of a rank says that time is up.
        busy: a rank is still at work for a checkpoint.
        failed: a rank could not do its part of one.
    """

    def __init__(
        self, stop: StopRequest, context: ParallelContext, *, counts: bool = True, writers: Writers | None = None
    ) -> None:
        self._stop, self._context, self._counts, self._writers = stop, context, counts, writers
        self._requested: str | None = None
        self.out_of_time = self.busy = self.failed = False

    @property
    def alone(self) -> bool:
        """One process, which needs to ask no one."""
        return self._context.world.size == 1

    @property
    def requested(self) -> str | None:
        """The signal that any rank has got; of several the first in the order of `STOP_SIGNALS`."""
        return self._stop.requested if self.alone else self._requested

    def totals(self, sums: Tensor, *, out_of_time: bool = False) -> Tensor:
        """Sum `sums` [n] over the ranks that count, in double precision; renews what is agreed.

        Args:
            sums: of this rank, on the device of the run.
            out_of_time: whether this rank's clock says that time is up.
        """
        busy = self._writers is not None and self._writers.busy
        failed = self._writers is not None and self._writers.failed
        if self.alone:
            self.out_of_time, self.busy, self.failed = out_of_time, busy, failed
            return sums
        own = sums.double() if self._counts else torch.zeros_like(sums, dtype=torch.float64)
        requests = [float(self._stop.requested == number.name) for number in STOP_SIGNALS]
        states = [float(out_of_time), float(busy), float(failed)]
        flags = torch.tensor([*requests, *states], dtype=torch.float64, device=sums.device)
        total = comm.all_reduce(torch.cat([own, flags]), self._context.world)
        *asked, late, busy, failed = (count > 0 for count in total[len(sums) :].tolist())
        names = [number.name for number, there in zip(STOP_SIGNALS, asked, strict=True) if there]
        self._requested = names[0] if names else None
        self.out_of_time, self.busy, self.failed = late, busy, failed
        return total[: len(sums)].to(sums.dtype)
