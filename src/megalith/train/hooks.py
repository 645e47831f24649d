"""The named moments of a run.

The loop knows nothing of consoles, files or dashboards: it calls one method of `Hook` at each moment, and whoever wants
to listen overrides those it cares for. A hook must not change the state of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megalith.train.results import (
    BadStep,
    Ending,
    Evaluation,
    GradientNoise,
    SavedCheckpoint,
    ScheduledSave,
    StepResult,
    Times,
    WindowReport,
)


class Hook:
    """A listener that does nothing; override what is of interest."""

    def after_step(self, result: StepResult) -> None:
        """Every optimizer step, applied or skipped."""

    def after_window(self, report: WindowReport) -> None:
        """Every `--log-interval` steps."""

    def after_noise(self, noise: GradientNoise) -> None:
        """The gradient noise scale was measured."""

    def on_bad_step(self, bad: BadStep) -> None:
        """A step is wrong, or its loss stands out; told before it is done about."""

    def after_growth(self, before: int, after: int) -> None:
        """The steps to come have `after` samples instead of `before`."""

    def after_timing(self, iteration: int, times: Times) -> None:
        """Times of what has just been done (a step on average, an evaluation, a save), of all ranks."""

    def before_evaluation(self, split: str, num_samples: int, *, final: bool) -> None:
        """An evaluation starts; `final` for those after training."""

    def before_evaluation_iteration(self, number: int, total: int, *, final: bool) -> None:
        """Global batch `number` of `total` of an evaluation starts (counted from 1)."""

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete."""

    def before_save(self, iteration: int, *, persistent: bool = True) -> None:
        """A checkpoint is about to be written: one to keep, or one of which only the last is kept."""

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        """A checkpoint is being written beside the training."""

    def after_save(self, saved: SavedCheckpoint) -> None:
        """A checkpoint is complete on disk."""

    def after_training(self, iteration: int) -> None:
        """All iterations are done; the final save and evaluations follow."""

    def on_exit(self, ending: Ending) -> None:
        """The run stops before its last iteration, its state saved."""

    def close(self) -> None:
        """The run is over, whichever way; files are closed."""


class Hooks(Hook):
    """Several listeners as one, called in order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)


def _tell_all(moment: str) -> Callable[..., None]:
    def tell(hooks: Hooks, *args: Any, **options: Any) -> None:
        for hook in hooks.hooks:
            getattr(hook, moment)(*args, **options)

    return tell


for _moment in (name for name in vars(Hook) if not name.startswith("_")):
    setattr(Hooks, _moment, _tell_all(_moment))
