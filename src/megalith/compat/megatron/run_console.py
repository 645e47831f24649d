"""Console and log file of a run; the log also holds what the console shows."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megalith.compat.megatron import console_lines
from megalith.layout import Layout
from megalith.progress import duration
from megalith.train.results import (
    BadStep,
    Evaluation,
    ExitReason,
    GradientNoise,
    Hook,
    Samples,
    SavedCheckpoint,
    ScheduledSave,
    Times,
    WindowReport,
)
from megalith.train.streams import drop, warn


class _LogFile(logging.FileHandler):
    """Log file that stops with a single warning, without a traceback, if the disk fails."""

    def handleError(self, record: logging.LogRecord) -> None:
        self.setLevel(logging.CRITICAL + 1)
        warn(f"WARNING: no more is written to {self.baseFilename}: {sys.exc_info()[1]}")


class _WarningHandler(logging.Handler):
    """Handler that prints logged warnings to stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        warn(f"WARNING: {record.getMessage()}")


_NOWHERE = logging.NullHandler()
"""Prevents Python from printing warnings, which it does without a handler."""


class RunConsole:
    """Console and log file of one rank. The log holds everything printed here or logged with `logging`.

    If the reader of the console exits, such as `head` or an interrupted `tee`, the run and its log continue.

    Args:
        log_path: log file, appended to; its folder is created. None for a rank that cannot write a log.
        shows: whether this rank prints to the console; only the first one does.
    """

    def __init__(self, log_path: Path | None, out: TextIO | None = None, *, shows: bool = True) -> None:
        self._out, self._shows = out, shows
        self._logger = logging.getLogger("megalith")
        self._handlers: list[logging.Handler] = [_WarningHandler()] if shows else []
        if log_path is None:
            self._logger.addHandler(_NOWHERE)
            return
        log_path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(log_path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(message)s"))
        self._handlers.insert(0, file)
        self._logger.setLevel(logging.INFO)
        for handler in self._handlers:
            self._logger.addHandler(handler)

    def print(self, text: str) -> None:
        """Print to the console and write to the log."""
        self.log(text)
        if not self._shows:
            return
        out = self._out or sys.stdout  # now: it may be one that writes above a progress bar
        try:
            print(text, file=out, flush=True)
        except OSError as error:
            drop(out)
            self.log(f"WARNING: the console is gone ({error}); the run and this log continue")

    def warn(self, text: str) -> None:
        """Print to stderr and write to the log."""
        self.log(text)
        if self._shows:
            warn(text)

    def log(self, text: str) -> None:
        """Write to the log only."""
        self._logger.info("%s", text)

    def close(self) -> None:
        """Close the log file."""
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()


_LONG_WAIT_SECONDS = 0.1  # worth saying
_SPEED_EVERY_SECONDS = 60.0  # on the console; the log has it with every line


@dataclass(eq=False)
class MegatronConsole(Hook):
    """Hook that prints Megatron's lines about a run, and its speed."""

    console: RunConsole
    save: str | None  # the checkpoint folder; None where the run does not save
    layout: Layout  # layout of the ranks that save together
    throughput: bool = False  # TFLOP/s in the iteration lines (`--log-throughput`)
    passing: str | None = None  # folder of non-persistent checkpoints, of which only the last is kept
    save_format: str = "torch_dist"
    timing_option: str = "minmax"  # `--timing-log-option`
    _speed_shown: float | None = None

    def after_window(self, report: WindowReport) -> None:
        self.console.print(console_lines.iteration_line(report, datetime.now(), throughput=self.throughput))
        now = time.monotonic()
        due = self._speed_shown is None or now - self._speed_shown >= _SPEED_EVERY_SECONDS
        (self.console.print if due else self.console.log)(speed_line(report))
        self._speed_shown = now if due else self._speed_shown

    def after_noise(self, noise: GradientNoise) -> None:
        scale = "not available yet" if noise.scale is None else f"{noise.scale:.4g} samples"
        self.console.print(f" gradient noise scale at iteration {noise.iteration}: {scale}")

    def on_bad_step(self, bad: BadStep) -> None:
        done = {"alarm": "", "skip": "; the step is skipped", "rerun": "; the run continues", "stop": "; the run stops"}
        self.console.warn(f"WARNING: {bad}{done[bad.action]}")

    def on_batch_size_change(self, before: int, after: int) -> None:
        self.console.print(console_lines.growth_line(before, after))

    def after_timing(self, iteration: int, times: Times) -> None:
        if times:
            self.console.print(console_lines.timing_lines(times, self.timing_option))

    def before_evaluation(self, split: str, num_samples: int, *, final: bool) -> None:
        if final:
            self.console.print(console_lines.evaluating_line(num_samples))

    def before_evaluation_iteration(self, number: int, total: int, *, final: bool) -> None:
        if final:
            self.console.print(console_lines.evaluating_iteration_line(number, total))

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self.console.print(console_lines.evaluation_lines(evaluation))

    def after_sampling(self, sampled: Samples) -> None:
        for number, sample in enumerate(sampled.samples, start=1):
            shown = (
                f"{name.replace('_', ' ')}: {json.dumps(text, ensure_ascii=False)}" for name, text in sample.items()
            )
            self.console.print(f" sample {number} at iteration {sampled.iteration} | {' | '.join(shown)}")

    def before_save(self, iteration: int, *, persistent: bool = True) -> None:
        folder = (self.save if persistent else self.passing) or ""
        self.console.print(console_lines.saving_line(iteration, folder, self.save_format, datetime.now()))

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        self.console.print(console_lines.scheduled_line(scheduled.iteration, scheduled.folder))

    def after_save(self, saved: SavedCheckpoint) -> None:
        if saved.waited_seconds > _LONG_WAIT_SECONDS:
            self.console.print(
                f" the checkpoint of iteration {saved.iteration} was still being written: the training waited "
                f"{saved.waited_seconds:.2f} s for it"
            )
        folder = console_lines.as_typed(saved.folder or self.save or "", self.save, self.passing)
        tensor, pipeline = self.layout.tp, self.layout.pp
        self.console.print(
            console_lines.saved_line(saved.iteration, folder, datetime.now(), tensor=tensor, pipeline=pipeline)
        )
        self.console.log(
            f" {saved.num_bytes / 1e9:.3f} GB in {saved.seconds:.2f} s, written at {saved.gigabytes_per_second:.2f} "
            f"GB/s; the training stood still for {saved.stall_seconds:.2f} s"
        )

    def after_training(self, iteration: int) -> None:
        self.console.print(console_lines.milestone_line("after training is done", datetime.now()))

    def on_exit(self, exit_reason: ExitReason) -> None:
        now = datetime.now()
        if exit_reason.kind == "interval":
            self.console.print(console_lines.exit_at_iteration_line(exit_reason.iteration, now))
        elif exit_reason.kind == "duration":
            self.console.print(console_lines.exit_after_minutes_line(exit_reason.detail, now))
        elif exit_reason.kind == "early stopping":
            self.console.print(f"early stopping at iteration {exit_reason.iteration}: {exit_reason.detail}")
        elif exit_reason.kind == "hook":
            self.console.print(f"a hook ends the run: {exit_reason.detail}")
        else:
            self.console.print(console_lines.exit_on_signal_line(exit_reason.detail, now))


def speed_line(report: WindowReport) -> str:
    """Return a line with tokens per second, TFLOP/s, MFU by each peak, and the remaining time."""
    by_datasheet = "" if report.mfu_datasheet is None else f"{report.mfu_datasheet:.0%} of the datasheet's peak, "
    busy = ", when the machine was busy" if report.mfu_measured > 1 else ""
    share = f"MFU {by_datasheet}{report.mfu_measured:.0%} of the matmul peak measured at the start{busy}"
    left = f"; {duration(report.seconds_left)} left" if report.seconds_left else ""
    return f" speed: {report.tokens_per_second:,.0f} tokens/s, {report.teraflops:.3g} TFLOP/s, {share}{left}"
