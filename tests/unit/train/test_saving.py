"""Saving beside the training: when the loop schedules, goes on, waits, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from megalith.errors import CheckpointError, MegalithError
from megalith.train.loop import LoopConfig, TrainingRun, train
from megalith.train.results import ExitReason, Hook, SavedCheckpoint, ScheduledSave, StepResult
from megalith.train.state import TrainState

from .conftest import batches, make_state


@dataclass
class Recorder(Hook):
    """Notes each moment as a short word."""

    moments: list[str] = field(default_factory=list)

    def after_step(self, result: StepResult) -> None:
        self.moments.append(f"step {result.iteration}")

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        self.moments.append(f"scheduled {scheduled.iteration}")

    def after_save(self, saved: SavedCheckpoint) -> None:
        self.moments.append(f"{saved.path} {saved.iteration}")

    def on_exit(self, exit_reason: ExitReason) -> None:
        self.moments.append(f"exit {exit_reason.kind}")


class Writer:
    """Saves at once, or beside the training in two stages that take some looks each.

    Args:
        looks: how often it is busy when it is asked.
        fails_at: the stage that fails.
    """

    def __init__(self, looks: int = 0, fails_at: int | None = None) -> None:
        self.looks, self.fails_at = looks, fails_at
        self.scheduled: int | None = None
        self.closed = False
        self.unchanged: dict[int, list[bool]] = {}  # iteration -> weights as saved, at each wait
        self._stage, self._left, self._kind = 0, 0, ""

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        assert self.scheduled is None, "two saves at a time"
        return SavedCheckpoint(state.iteration, "kept" if persistent else "passing", 0.0, 0)

    def schedule(self, state: TrainState, *, persistent: bool = True) -> ScheduledSave:
        assert self.scheduled is None, "two saves at a time"
        self.scheduled, self._stage, self._left = state.iteration, 0, self.looks
        self._kind = "kept" if persistent else "passing"
        self._state, self.saved = state, state.model.output_weight.detach().clone()
        return ScheduledSave(state.iteration, self._kind, 0.0)

    def wait_for_copies(self) -> None:
        if self.scheduled is not None:
            same = torch.equal(self.saved, self._state.model.output_weight)
            self.unchanged.setdefault(self.scheduled, []).append(same)

    @property
    def busy(self) -> bool:
        self._left -= 1
        return self.scheduled is not None and self._left >= 0

    @property
    def failed(self) -> bool:
        return self.scheduled is not None and self._stage == self.fails_at

    def advance(self, *, failed: bool = False) -> SavedCheckpoint | None:
        iteration = self.scheduled
        assert iteration is not None
        if self._stage == self.fails_at:
            self.scheduled = None
            raise CheckpointError("the disk is full")
        self._stage, self._left = self._stage + 1, self.looks
        if self._stage < 2:
            return None
        self.scheduled = None
        return SavedCheckpoint(iteration, self._kind, 0.0, 0)

    def close(self) -> None:
        self.closed = True


def make_run(loop_config: LoopConfig, writer: Writer, **parts: object) -> tuple[TrainingRun, Recorder]:
    recorder = Recorder()
    run = TrainingRun(
        loop_config,
        make_state(),
        batches(),
        saver=writer,
        hook=recorder,
        async_saver=writer,
        **parts,  # type: ignore[arg-type]
    )
    return run, recorder


@pytest.fixture
def loop_config(make_loop_config: Callable[..., LoopConfig]) -> LoopConfig:
    return make_loop_config(eval_iterations=0, save_interval=4, train_iterations=10)


def test_stages_pass_at_the_ends_of_steps(loop_config: LoopConfig) -> None:
    run, recorder = make_run(loop_config, Writer(looks=1))
    list(train(run))
    assert recorder.moments == [
        *("step 1", "step 2", "step 3", "step 4", "scheduled 4", "step 5", "step 6", "step 7", "step 8", "kept 4"),
        *("scheduled 8", "step 9", "step 10", "kept 8", "kept 10"),
    ]
    assert run.exit_reason == ExitReason("finished", 10)


def test_what_is_saved_changes_only_after_the_copies_are_waited_for(loop_config: LoopConfig) -> None:
    writer = Writer(looks=1)
    run, _ = make_run(loop_config, writer)
    list(train(run))
    assert writer.unchanged == {4: [True, False, False, False], 8: [True, False]}


def test_a_second_save_waits_for_the_first(loop_config: LoopConfig) -> None:
    run, recorder = make_run(replace(loop_config, save_interval=1, train_iterations=3), Writer(looks=100))
    list(train(run))
    assert recorder.moments == [
        *("step 1", "scheduled 1", "step 2", "kept 1", "scheduled 2", "step 3", "kept 2", "scheduled 3", "kept 3"),
    ]


def test_the_last_save_is_written_at_once(loop_config: LoopConfig) -> None:
    run, recorder = make_run(replace(loop_config, save_interval=100), Writer())
    list(train(run))
    assert recorder.moments[-2:] == ["step 10", "kept 10"]


def test_a_stop_waits_for_the_save_under_way(loop_config: LoopConfig) -> None:
    run, recorder = make_run(replace(loop_config, exit_interval=5), Writer(looks=100))
    list(train(run))
    assert recorder.moments[-5:] == ["scheduled 4", "step 5", "kept 4", "kept 5", "exit interval"]
    run, recorder = make_run(replace(loop_config, exit_interval=4), Writer(looks=100))
    list(train(run))
    assert recorder.moments[-3:] == ["scheduled 4", "kept 4", "exit interval"]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failure_ends_the_run_as_that_of_a_save_at_once_does(loop_config: LoopConfig, stage: int) -> None:
    run, recorder = make_run(loop_config, Writer(fails_at=stage))
    with pytest.raises(CheckpointError, match="disk is full"):
        list(train(run))
    assert recorder.moments[-1] == f"step {5 + stage}"
    run.close()
    assert run.async_saver is not None and run.async_saver.closed  # type: ignore[attr-defined]


def test_a_loss_that_is_not_finite_does_not_cost_the_save_under_way(loop_config: LoopConfig) -> None:
    run, recorder = make_run(loop_config, Writer(looks=100))
    with pytest.raises(MegalithError, match="nan at iteration 5"):
        for result in train(run):
            if result.iteration == 4:
                with torch.no_grad():
                    run.state.model.output_weight[0, 0] = float("nan")
    assert recorder.moments[-2:] == ["scheduled 4", "kept 4"]


@pytest.mark.parametrize("beside", [True, False])
def test_passing_checkpoints_come_between_the_others(loop_config: LoopConfig, beside: bool) -> None:
    run, recorder = make_run(replace(loop_config, ephemeral_save_interval=2, train_iterations=6), Writer())
    if not beside:
        run.async_saver = None
    list(train(run))
    assert [moment for moment in recorder.moments if moment[:4] in ("pass", "kept")] == [
        "passing 2",
        "kept 4",
        "kept 6",
    ]
