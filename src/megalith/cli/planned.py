"""What an earlier `megalith plan` of these sizes predicted, beside what the run measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import median

import torch

from megalith.config import RunConfig
from megalith.device import capability_of, is_host
from megalith.plan.calibration import circumstances
from megalith.plan.devices import GIB
from megalith.plan.memory import RankMemory
from megalith.plan.plan import device_here, remembered, time_of
from megalith.plan.rates import with_measured
from megalith.plan.time import StepTime
from megalith.train.results import ExitReason, Hook, WindowReport


def planned(
    config: RunConfig,
    vocab_size: int,
    device: torch.device,
    memory: Callable[[], Mapping[str, int]],
    say: Callable[[str], None],
    event: Callable[..., None],
) -> Hook | None:
    """Return the hook that compares on the first rank; None if no plan has seen all parts of the run.

    Args:
        memory: bytes in use by name, of which `max_allocated_bytes` is compared: accelerators count it.
    """
    able, local = capability_of(device), config.launch.local_world_size or 1
    here = device_here(able.name, able.compute, able.memory)
    ranks = remembered(config, vocab_size, here)
    if not ranks:
        return None
    here = with_measured(here, local)
    known = is_host(device) or here.compute is not None and here.rates.asynchronous
    time = time_of(config, vocab_size, here, ranks, config.launch.world_size // local) if known else None
    return _Planned(ranks[0], time, memory, say, partial(event, "plan", **circumstances(here)), device)


class _Planned(Hook):
    """Compares at the end, by the median of the windows of the log behind the first."""

    def __init__(
        self,
        rank: RankMemory,
        time: StepTime | None,
        memory: Callable[[], Mapping[str, int]],
        say: Callable[[str], None],
        event: Callable[..., None],
        device: torch.device,
    ) -> None:
        self._rank, self._time, self._memory, self._say, self._event = rank, time, memory, say, event
        self._device = device
        self._seconds: list[float] = []

    def after_window(self, report: WindowReport) -> None:
        self._seconds.append(report.seconds_per_step)

    def after_training(self, iteration: int) -> None:
        self._compare(iteration)

    def on_exit(self, exit_reason: ExitReason) -> None:
        self._compare(exit_reason.iteration)

    def _compare(self, iteration: int) -> None:
        if not self._seconds:
            return
        measured = median(self._seconds[1:] or self._seconds)
        peak, found = self._memory().get("max_allocated_bytes"), list[str]()
        if self._time is not None:
            found.append(f"{self._time.step_seconds:.3g} beside {measured:.3g} s a step")
        if peak is not None:
            found.append(f"{self._rank.peak_bytes / GIB:.2f} beside {peak / GIB:.2f} GiB at the peak")
        if found:
            self._say(f"planned beside measured: {', '.join(found)}")
        self._event(
            iteration=iteration,
            planned_seconds=None if self._time is None else self._time.step_seconds,
            measured_seconds=measured,
            planned_peak_bytes=self._rank.peak_bytes,
            measured_peak_bytes=peak,
            measured_context_bytes=None if peak is None else _outside(self._device),
        )


def _outside(device: torch.device) -> int | None:
    """Return the bytes of a device outside of torch's allocator, of all programs; None if they are not known."""
    with suppress(RuntimeError, NotImplementedError):
        free, total = torch.accelerator.get_memory_info(device)
        return total - free - torch.accelerator.memory_reserved(device)
    return None
