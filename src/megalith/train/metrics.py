"""metrics.jsonl: every step, evaluation and event of a run, one JSON object a line, always on.

Each line is passed to the system as it is written, so that it survives a crash of this process, though not always a
power cut. A crash can truncate the last line; the writer then starts a new line, and the reader skips truncated ones.
After a resume from an earlier checkpoint iterations repeat: an event marks the resume, and the reader drops the
abandoned steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from megalith.device import is_host
from megalith.train.results import (
    BadStep,
    Evaluation,
    ExitReason,
    GradientNoise,
    Hook,
    Samples,
    SavedCheckpoint,
    ScheduledSave,
    StepResult,
    WindowReport,
)
from megalith.train.streams import warn


class MetricsWriter(Hook):
    """Appends to `path`. A disk that fails costs the metrics, with one warning, not the training."""

    def __init__(self, path: Path, memory: Callable[[], Mapping[str, int]] = dict) -> None:
        self._memory, self._path = memory, path
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_in_the_middle_of_a_line(path)
        self._file: TextIO | None = path.open("a", buffering=1, encoding="utf-8")
        if torn:
            self._file.write("\n")

    def event(self, event: str, /, **values: Any) -> None:
        """Write one line: the event, the time in seconds since 1970, the values (numbers not finite become null)."""
        if self._file is None:
            return
        record = {
            "event": event,
            "time": round(time.time(), 3),
            **{name: _plain(value) for name, value in values.items()},
        }
        try:
            self._begin_again_if_deleted(self._file)
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            self.close()
            warn(f"WARNING: no more metrics are written to metrics.jsonl: {error}")

    def _begin_again_if_deleted(self, file: TextIO) -> None:
        """Reopen the file if someone has deleted it: writes to a deleted file are lost."""
        if os.fstat(file.fileno()).st_nlink:
            return
        file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        warn(f"WARNING: {self._path} was deleted while it was written to; the metrics continue in a new file")

    def after_step(self, result: StepResult) -> None:
        values = asdict(result)
        values["bad"] = values.pop("anomaly")  # the key of metrics.jsonl
        often_empty = ("source_tokens", "auxiliary_losses", "further_losses", "expert_load")
        self.event("step", **_without_empty(values, *often_empty))

    def after_window(self, report: WindowReport) -> None:
        self.event(
            "throughput",
            iteration=report.iteration,
            tokens_per_second=report.tokens_per_second,
            teraflops=report.teraflops,
            mfu_datasheet=report.mfu_datasheet,
            mfu_measured=report.mfu_measured,
            **self._memory(),
        )

    def after_noise(self, noise: GradientNoise) -> None:
        self.event("gradient noise", **asdict(noise))

    def on_bad_step(self, bad: BadStep) -> None:
        values = asdict(bad)
        values["again"] = values.pop("recomputed")  # the key of metrics.jsonl
        self.event("bad step", **values)

    def on_batch_size_change(self, before: int, after: int) -> None:
        self.event("batch size", before=before, after=after)

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self.event("evaluation", **_without_empty(asdict(evaluation), "further_losses"))

    def after_sampling(self, sampled: Samples) -> None:
        self.event("samples", **asdict(sampled))

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        self.event("scheduled save", **asdict(scheduled))

    def after_save(self, saved: SavedCheckpoint) -> None:
        self.event("save", **asdict(saved))

    def on_exit(self, exit_reason: ExitReason) -> None:
        self.event("exit", **asdict(exit_reason))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when the line was written
                file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all complete records that are still valid, in order, without torn lines and steps that were repeated."""
    records: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                continue
            if record["event"] == "start":
                records = []
            elif record["event"] == "resume":
                records = [kept for kept in records if kept.get("iteration", 0) <= record["iteration"]]
            records.append(record)
    return records


def _ends_in_the_middle_of_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _without_empty(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the values without those of these names that are empty."""
    return {name: value for name, value in values.items() if value or name not in names}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_PAGE = resource.getpagesize()


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return bytes by name: current and peak resident size of the process, and torch's memory on an accelerator."""
    # Linux counts in KiB, macOS in bytes.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures = {"max_resident_bytes": largest}
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        figures["resident_bytes"] = int(sizes.read_text().split()[1]) * _PAGE
        # The kernel updates its maximum in batches of pages, with a delay.
        figures["max_resident_bytes"] = max(largest, figures["resident_bytes"])
    if not is_host(device):
        figures |= {
            "allocated_bytes": torch.accelerator.memory_allocated(device),
            "max_allocated_bytes": torch.accelerator.max_memory_allocated(device),
            "reserved_bytes": torch.accelerator.memory_reserved(device),
            "max_reserved_bytes": torch.accelerator.max_memory_reserved(device),
        }
    return figures
