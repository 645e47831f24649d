"""Hooks of users: the results they receive, and what they may change."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megalith.config import RunConfig
from megalith.distributed import comm
from megalith.errors import ConfigError, MegalithError
from megalith.registry import HOOK, Registered, naming_errors
from megalith.train.results import Evaluation, ExitReason, Hook, SavedCheckpoint, StepResult
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.train.loop import TrainingRun


class Control:
    """Requests of a hook to the run; the hooks of all ranks must request the same.

    Attributes:
        lr_scale: The learning rate of the steps to come is that of the schedule times this. A checkpoint keeps it.
        config: Of the run.
        model: The modules of this rank: the model, or its parts under pipeline parallelism.
        rank: Of this process, 0 to the number of processes - 1.
    """

    def __init__(self, config: RunConfig, model: Sequence[nn.Module], rank: int, lr_scale: float) -> None:
        self.config, self.model, self.rank, self.lr_scale = config, tuple(model), rank, lr_scale
        self.stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        """End the run after this step, as --exit-interval does: its state is saved, and the reason is printed."""
        self.stop_reason = self.stop_reason or reason


class UserHook:
    """Callbacks of a run on every rank; override the ones you need. An exception ends the run."""

    __megalith_flag__ = ""  # `--hook NAME` of a hook that the flag names; spelled so that no user's attribute is hidden

    def on_start(self, control: Control) -> None:
        """Run before the first step."""

    def on_step(self, result: StepResult, control: Control) -> None:
        """Run after each optimizer step, applied or skipped."""

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        """Run after each evaluation."""

    def on_save(self, saved: SavedCheckpoint, control: Control) -> None:
        """Run after a checkpoint is complete on disk."""

    def on_end(self, control: Control) -> None:
        """Run at the end of the run, whichever way it ended."""


setattr(UserHook, HOOK, True)


class UserHooks(Hook):
    """The hooks of the user among those of the run.

    Raises:
        ConfigError: The ranks' hooks have asked for different things, or for a rate that is not a number.
    """

    def __init__(self, hooks: Sequence[UserHook], config: RunConfig, run: TrainingRun) -> None:
        self._hooks, self._run = tuple(hooks), run
        self._control = Control(config, run.state.chunks, run.state.context.rank, run.state.lr_scale)
        self._call("on_start")
        self._agree()

    def after_step(self, result: StepResult) -> None:
        self._call("on_step", result)
        self._agree()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self._call("on_evaluate", evaluation)
        self._agree()

    def after_save(self, saved: SavedCheckpoint) -> None:
        self._call("on_save", saved)

    def close(self) -> None:
        run_fails = sys.exc_info()[0] is not None
        for hook in self._hooks:
            try:
                with _naming_errors(hook, "on_end"):
                    hook.on_end(self._control)
            except MegalithError as error:
                if not (run_fails and hook.__megalith_flag__):
                    raise
                warn(str(error))  # the error of the run is the one to end with

    def _call(self, moment: str, *args: Any) -> None:
        for hook in self._hooks:
            with _naming_errors(hook, moment):
                getattr(hook, moment)(*args, self._control)
            scale = self._control.lr_scale
            if not (isinstance(scale, int | float) and math.isfinite(scale) and scale >= 0.0):
                flag = hook.__megalith_flag__ or f"--hook {type(hook).__qualname__}"
                raise ConfigError(f"{flag}: lr_scale is {scale!r}; it must be a finite number, at least 0")

    def _agree(self) -> None:
        """Apply the hooks' requests, if those of all ranks are the same."""
        state, control = self._run.state, self._control
        stops, scale = float(control.stop_reason is not None), control.lr_scale
        own = torch.tensor([stops, -stops, scale, -scale], dtype=torch.float64, device=state.context.device)
        most_stops, least_stops, most, least = comm.all_reduce(own, state.context.world, "max").tolist()
        if most_stops != -least_stops or most != -least:
            raise ConfigError(
                f"--hook: the ranks' hooks ask for different things (lr_scale {-least} to {most}, stop on "
                f"{'some' if most_stops != -least_stops else 'all'} ranks): let them decide by the result, which is "
                "the same on all"
            )
        state.lr_scale = scale
        if control.stop_reason is not None and self._run.exit_reason is None:
            self._run.exit_reason = ExitReason("hook", state.iteration, control.stop_reason)


def _naming_errors(hook: UserHook, moment: str) -> AbstractContextManager[None]:
    flag = hook.__megalith_flag__
    return naming_errors(f"{flag}: {moment}") if flag else nullcontext()


def registered_hooks(config: RunConfig) -> list[UserHook]:
    """Construct the hooks that --hook names, one of each class.

    Raises:
        ConfigError: One has methods `on_...` that nothing would call.
        MegalithError: A constructor raises.
    """
    return [_constructed(name) for name in config.train.hooks if isinstance(name, Registered)]


def _constructed(name: Registered) -> UserHook:
    flag, moments = f"--hook {name}", [moment for moment in vars(UserHook) if moment.startswith("on_")]
    if idle := [method for method in dir(name.entry.thing) if method.startswith("on_") and method not in moments]:
        raise ConfigError(f"{flag}: nothing calls its {', '.join(idle)}; hooks have {', '.join(moments)}")
    hook: UserHook = name()
    hook.__megalith_flag__ = flag
    return hook
