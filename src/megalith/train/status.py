"""The status of a training in the last line of a terminal."""

from __future__ import annotations

import time
from collections import deque

from megalith import progress
from megalith.progress import duration, short
from megalith.train.loop import LoopConfig
from megalith.train.results import Evaluation, Hook, SavedCheckpoint, ScheduledSave, StepResult

_STEPS = 20  # whose mean is the pace
_SECONDS_BETWEEN = 0.2


class StatusLine(Hook):
    """Shows step, loss, tokens per second, MFU, remaining time and the next save below the lines of the console.

    MFU is of the datasheet's peak, or of the measured one where the device is not known (`WindowReport`). `shown_after`
    seconds the line appears first.
    """

    def __init__(self, config: LoopConfig, shown_after: float = progress.SECONDS_BEFORE_A_BAR) -> None:
        self._config, self._next = config, time.monotonic() + shown_after
        self._steps: deque[StepResult] = deque(maxlen=_STEPS)

    def after_step(self, result: StepResult) -> None:
        self._steps.append(result)
        if self._is_due():
            progress.show_status(self._parts(result))

    def before_evaluation_iteration(self, number: int, total: int, *, final: bool) -> None:
        if self._is_due():
            progress.show_status([f"evaluating {number}/{total}"])

    def before_save(self, iteration: int, *, persistent: bool = True) -> None:
        if self._is_due(_SECONDS_BETWEEN):
            progress.show_status([f"saving the checkpoint of step {iteration}"])

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        progress.hide_status()

    def after_save(self, saved: SavedCheckpoint) -> None:
        progress.hide_status()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        progress.hide_status()

    def close(self) -> None:
        progress.hide_status()

    def _is_due(self, early: float = 0.0) -> bool:
        """Return whether to show something, by so many seconds sooner than the pause between two steps says."""
        now = time.monotonic()
        if now + early < self._next:
            return False
        self._next = now + _SECONDS_BETWEEN
        return True

    def _parts(self, last: StepResult) -> list[str]:
        config, steps = self._config, self._steps
        seconds = sum(step.seconds for step in steps)
        achieved = sum(config.flops_of(step.num_samples) for step in steps) / seconds
        peak = config.datasheet_flops_per_s or config.measured_peak_flops_per_s
        left = (config.train_iterations - last.iteration) * seconds / len(steps)
        parts = [
            f"step {last.iteration}/{config.train_iterations}",
            f"loss {last.loss:.4g}",
            f"{short(sum(step.num_tokens for step in steps) / seconds)} tokens/s",
            f"MFU {achieved / peak:.0%}",
            f"{duration(left)} left",
        ]
        if (every := config.save_interval) is not None:
            parts.append(f"save at {min((last.iteration // every + 1) * every, config.train_iterations)}")
        return parts
