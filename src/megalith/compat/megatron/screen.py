"""The console of a run: Megatron's lines on the screen, everything in the log file."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megalith.compat.megatron import console
from megalith.layout import Layout
from megalith.train.results import (
    BadStep,
    Ending,
    Evaluation,
    GradientNoise,
    Hook,
    SavedCheckpoint,
    ScheduledSave,
    Times,
    WindowReport,
)
from megalith.train.streams import drop, warn


class _LogFile(logging.FileHandler):
    """A log file that ends with one warning, without a traceback, when the disk fails."""

    def handleError(self, record: logging.LogRecord) -> None:
        self.setLevel(logging.CRITICAL + 1)
        warn(f"WARNING: no more is written to {self.baseFilename}: {sys.exc_info()[1]}")


class _Shown(logging.Handler):
    """What the program logs as a warning is for the user to see."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        warn(f"WARNING: {record.getMessage()}")


_NOWHERE = logging.NullHandler()
"""Without a handler Python prints warnings by itself."""


class Screen:
    """Text that the user should see, and text for the log only. The log gets both, and everything that is logged.

    A reader of the screen that leaves, such as `head` or a `tee` that was interrupted, costs the screen only: the run
    goes on, and so does its log.

    Args:
        log_path: the log file, appended to; its folder is made. None for a rank that can write no log of its own.
        shows: False for the ranks other than the first, which alone has the screen.
    """

    def __init__(self, log_path: Path | None, out: TextIO | None = None, *, shows: bool = True) -> None:
        self._out, self._shows = out or sys.stdout, shows
        self._logger = logging.getLogger("megalith")
        self._handlers: list[logging.Handler] = [_Shown()] if shows else []
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

    def say(self, text: str) -> None:
        """Show and log."""
        self.note(text)
        if not self._shows:
            return
        try:
            print(text, file=self._out, flush=True)
        except OSError as error:
            drop(self._out)
            self.note(f"WARNING: the screen is gone ({error}); the run goes on, and this log with it")

    def warn(self, text: str) -> None:
        """Show where errors are shown, and log."""
        self.note(text)
        if self._shows:
            warn(text)

    def note(self, text: str) -> None:
        """Log only."""
        self._logger.info("%s", text)

    def close(self) -> None:
        """Close the log file."""
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()


_LONG_WAIT_SECONDS = 0.1  # worth saying
_SPEED_EVERY_SECONDS = 60.0  # on the screen; the log has it with every line


@dataclass(eq=False)
class MegatronConsole(Hook):
    """Says each moment of a run in Megatron's words, and the speed in ours."""

    screen: Screen
    save: str | None  # the checkpoint folder; None where the run does not save
    layout: Layout  # of the ranks that save together
    throughput: bool = False  # TFLOP/s in the iteration lines (`--log-throughput`)
    passing: str | None = None  # the folder of the checkpoints of which only the last one is kept
    save_format: str = "torch_dist"
    timing_option: str = "minmax"  # of `--timing-log-option`
    _speed_shown: float | None = None

    def after_window(self, report: WindowReport) -> None:
        self.screen.say(console.iteration_line(report, datetime.now(), throughput=self.throughput))
        now = time.monotonic()
        due = self._speed_shown is None or now - self._speed_shown >= _SPEED_EVERY_SECONDS
        (self.screen.say if due else self.screen.note)(speed_line(report))
        self._speed_shown = now if due else self._speed_shown

    def after_noise(self, noise: GradientNoise) -> None:
        scale = "not to be told yet" if noise.scale is None else f"{noise.scale:.4g} samples"
        self.screen.say(f" gradient noise scale at iteration {noise.iteration}: {scale}")

    def on_bad_step(self, bad: BadStep) -> None:
        done = {"alarm": "", "skip": "; the step is skipped", "rerun": "; the run goes on", "stop": "; the run stops"}
        self.screen.warn(f"WARNING: {bad}{done[bad.action]}")

    def after_growth(self, before: int, after: int) -> None:
        self.screen.say(console.growth_line(before, after))

    def after_timing(self, iteration: int, times: Times) -> None:
        if times:
            self.screen.say(console.timing_lines(times, self.timing_option))

    def before_evaluation(self, split: str, num_samples: int, *, final: bool) -> None:
        if final:
            self.screen.say(console.evaluating_line(num_samples))

    def before_evaluation_iteration(self, number: int, total: int, *, final: bool) -> None:
        if final:
            self.screen.say(console.evaluating_iteration_line(number, total))

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self.screen.say(console.evaluation_lines(evaluation))

    def before_save(self, iteration: int, *, persistent: bool = True) -> None:
        folder = (self.save if persistent else self.passing) or ""
        self.screen.say(console.saving_line(iteration, folder, self.save_format, datetime.now()))

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        self.screen.say(console.scheduled_line(scheduled.iteration, scheduled.folder))

    def after_save(self, saved: SavedCheckpoint) -> None:
        if saved.waited_seconds > _LONG_WAIT_SECONDS:
            self.screen.say(
                f" the checkpoint of iteration {saved.iteration} was still being written: the training waited "
                f"{saved.waited_seconds:.2f} s for it"
            )
        folder = console.as_typed(saved.folder or self.save or "", self.save, self.passing)
        tensor, pipeline = self.layout.tp, self.layout.pp
        self.screen.say(console.saved_line(saved.iteration, folder, datetime.now(), tensor=tensor, pipeline=pipeline))
        self.screen.note(
            f" {saved.num_bytes / 1e9:.3f} GB in {saved.seconds:.2f} s, written at {saved.gigabytes_per_second:.2f} "
            f"GB/s; the training stood still for {saved.stall_seconds:.2f} s"
        )

    def after_training(self, iteration: int) -> None:
        self.screen.say(console.milestone_line("after training is done", datetime.now()))

    def on_exit(self, ending: Ending) -> None:
        now = datetime.now()
        if ending.kind == "interval":
            self.screen.say(console.exit_at_iteration_line(ending.iteration, now))
        elif ending.kind == "duration":
            self.screen.say(console.exit_after_minutes_line(ending.detail, now))
        elif ending.kind == "hook":
            self.screen.say(f"a hook ends the run: {ending.detail}")
        else:
            self.screen.say(console.exit_on_signal_line(ending.detail, now))


def speed_line(report: WindowReport) -> str:
    """Tokens a second, TFLOP/s, MFU by each of the peaks, and the time that is left."""
    by_datasheet = "" if report.mfu_datasheet is None else f"{report.mfu_datasheet:.0%} of the datasheet's peak, "
    busy = ", when the machine was busy" if report.mfu_measured > 1 else ""
    share = f"MFU {by_datasheet}{report.mfu_measured:.0%} of the matmul peak measured at the start{busy}"
    left = f"; {duration(report.seconds_left)} left" if report.seconds_left else ""
    return f" speed: {report.tokens_per_second:,.0f} tokens/s, {report.teraflops:.3g} TFLOP/s, {share}{left}"


def duration(seconds: float) -> str:
    """A length of time in the two largest units that it has: `3 d 4 h`, `2 min 5 s`, `7 s`."""
    whole = round(seconds)
    parts = [
        ("d", whole // 86400),
        ("h", whole // 3600 % 24),
        ("min", whole // 60 % 60),
        ("s", whole % 60),
    ]
    first = next((place for place, (_, number) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for unit, number in parts[first : first + 2])
