"""How long this rank waits for others: on a CPU by the clock, on a GPU by events around the waits of its stream."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megalith.distributed.context import Axis


class WaitClock:
    """Observer of collectives that adds up the time spent in them.

    On a GPU a collective holds up only the stream that needs its result, and for as long as the slowest rank takes to
    come; that is what the events measure.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds, self._since = 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.waiting()

    def after(self, operation: str, axis: Axis) -> None:
        self.waited()

    def waiting(self, peer: int | None = None) -> None:
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._since = time.perf_counter()

    def waited(self) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._since

    def take(self) -> float:
        """Seconds waited since the last call; on a GPU this waits for what is under way."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
