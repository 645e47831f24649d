"""Hooks of users: the results they receive, and what they may change."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megalith.config import RunConfig
from megalith.distributed import comm
from megalith.errors import ConfigError, MegalithError
from megalith.registry import HOOK, Registered, error_of_user
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
    """A listener on every rank; override what is of interest. An exception ends the run."""

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
        ConfigError: The ranks' hooks have asked for different things, or for a rate that is no number.
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
        for hook in self._hooks:
            hook.on_end(self._control)

    def _call(self, moment: str, *args: Any) -> None:
        for hook in self._hooks:
            getattr(hook, moment)(*args, self._control)
            scale = self._control.lr_scale
            if not (isinstance(scale, int | float) and math.isfinite(scale) and scale >= 0.0):
                name = hook.name if isinstance(hook, _NamedHook) else type(hook).__qualname__
                raise ConfigError(f"--hook {name}: lr_scale is {scale!r}; it must be a finite number, at least 0")

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


class _NamedHook(UserHook):
    """A hook that --hook names: its exceptions become errors that say so.

    Raises:
        ConfigError: It has methods `on_...` that nothing would call.
        MegalithError: Its constructor raises.
    """

    def __init__(self, name: Registered) -> None:
        self.name, moments = name, [moment for moment in vars(UserHook) if moment.startswith("on_")]
        if idle := [method for method in dir(name.entry.thing) if method.startswith("on_") and method not in moments]:
            raise ConfigError(f"--hook {name}: nothing calls its {', '.join(idle)}; hooks have {', '.join(moments)}")
        with _named(f"--hook {name}: it cannot be constructed"):
            self._hook: UserHook = name()

    def on_end(self, control: Control) -> None:
        run_fails = sys.exc_info()[0] is not None
        try:
            with _named(f"--hook {self.name}: on_end"):
                self._hook.on_end(control)
        except MegalithError as error:
            if not run_fails:
                raise
            warn(str(error))  # the error of the run is the one to end with


def _named_call(moment: str) -> Callable[..., None]:
    def call(hook: _NamedHook, *args: Any) -> None:
        with _named(f"--hook {hook.name}: {moment}"):
            getattr(hook._hook, moment)(*args)

    return call


for _moment in ("on_start", "on_step", "on_evaluate", "on_save"):
    setattr(_NamedHook, _moment, _named_call(_moment))


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except MegalithError:
        raise
    except Exception as error:
        raise MegalithError(f"{what}: {error_of_user(error)}") from error


def registered_hooks(config: RunConfig) -> list[UserHook]:
    """Construct the hooks that --hook names, one of each class."""
    return [_NamedHook(hook) for hook in config.train.hooks if isinstance(hook, Registered)]
