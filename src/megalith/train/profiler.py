"""Profiles of some iterations, and the history of the memory of a GPU: files for torch's viewers, or marks for nsys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalith.config.groups import LogConfig
from megalith.device import cuda_runtime, is_cuda, is_host
from megalith.kernels.torch_private import dump_memory_history, record_memory_history
from megalith.train.results import ExitReason, Hook, StepResult

_ROWS = 40  # of the table


class TorchProfiler:
    """torch's own: a trace for chrome://tracing or perfetto, and a table of the costliest operations beside it."""

    def __init__(self, path: Path, device: torch.device, *, shapes: bool, stacks: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU] if is_host(device) else None  # None: all there are
        self._path, self._order = path, "self_cpu_time_total" if is_host(device) else "self_device_time_total"
        self._profile = torch.profiler.profile(activities=activities, record_shapes=shapes, with_stack=stacks)

    def begin(self) -> None:
        """Start profiling."""
        self._profile.start()

    def end(self) -> str:
        """Write both files; return a message for the user, or an empty text."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        table = self._profile.key_averages().table(sort_by=self._order, row_limit=_ROWS)
        text = self._path.with_suffix(".txt")
        text.write_text(table, encoding="utf-8")
        return f"profile written to {self._path} (for perfetto.dev) and, as a table, to {text}"


class NsysMarks:
    """Marks for `nsys profile --capture-range=cudaProfilerApi`: which iterations, and the operations in them."""

    def __init__(self, *, shapes: bool) -> None:
        self._nvtx: Any = torch.autograd.profiler.emit_nvtx(record_shapes=shapes)

    def begin(self) -> None:
        """Start profiling."""
        cuda_runtime().cudaProfilerStart()
        self._nvtx.__enter__()

    def end(self) -> str:
        """Stop profiling."""
        self._nvtx.__exit__(None, None, None)
        cuda_runtime().cudaProfilerStop()
        return ""


def build_profiler(log: LogConfig, device: torch.device, rank: int, folder: Path) -> TorchProfiler | NsysMarks:
    """Build the profiler that the flags ask for: marks for nsys, or torch's (also without a GPU)."""
    if is_cuda(device) and not log.use_pytorch_profiler:
        return NsysMarks(shapes=log.pytorch_profiler_collect_shapes)
    path = folder / f"profile-rank{rank}-iterations-{log.profile_step_start + 1}-{log.profile_step_end}.json"
    return TorchProfiler(
        path,
        device,
        shapes=log.pytorch_profiler_collect_shapes,
        stacks=log.pytorch_profiler_collect_callstack,
    )


class Profile(Hook):
    """Profiles the iterations after `start` up to `end`, in a run that starts after `iteration`."""

    def __init__(
        self, profiler: TorchProfiler | NsysMarks, start: int, end: int, iteration: int, say: Callable[[str], None]
    ) -> None:
        self._profiler, self._start, self._end, self._say = profiler, start, end, say
        self._running = False
        if iteration == start:
            self._begin()
        elif iteration > start:
            say(f"no profile: the run starts at iteration {iteration}, after --profile-step-start {start}")

    def after_step(self, result: StepResult) -> None:
        if result.iteration == self._start:
            self._begin()
        elif result.iteration == self._end:
            self._finish()

    def after_training(self, iteration: int) -> None:
        self._finish()

    def on_exit(self, exit_reason: ExitReason) -> None:
        self._finish()

    def _begin(self) -> None:
        self._running = True
        self._profiler.begin()

    def _finish(self) -> None:
        if not self._running:
            return
        self._running = False
        if said := self._profiler.end():
            self._say(said)


class MemoryHistory(Hook):
    """Records the allocations of this GPU, and writes them to `path` after success or failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        record_memory_history()

    def close(self) -> None:
        dump_memory_history(str(self._path))
