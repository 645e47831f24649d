"""The order of a run's moments, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from megalith.errors import MegalithError
from megalith.train.evaluation import EvaluationSet
from megalith.train.loop import LoopConfig, TrainingRun, train
from megalith.train.results import Evaluation, ExitReason, Hook, SavedCheckpoint, StepResult, Times, WindowReport
from megalith.train.state import BestEvaluation, TrainState
from megalith.train.timers import Timers

from .conftest import batches, make_state


@dataclass
class Recorder(Hook):
    """Notes each moment as a short word."""

    moments: list[str] = field(default_factory=list)
    windows: list[WindowReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def after_step(self, result: StepResult) -> None:
        self.moments.append(f"step {result.iteration}")

    def after_window(self, report: WindowReport) -> None:
        self.windows.append(report)

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self.moments.append(f"{'final ' if evaluation.final else ''}{evaluation.split}")

    def after_save(self, saved: SavedCheckpoint) -> None:
        self.moments.append(f"save {saved.iteration}")

    def after_training(self, iteration: int) -> None:
        self.moments.append("done")

    def on_exit(self, exit_reason: ExitReason) -> None:
        self.moments.append(f"exit {exit_reason.kind}")


class MemorySaver:
    """Keeps nothing but says it did."""

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        return SavedCheckpoint(state.iteration, "memory", 0.0, 0)


@dataclass
class StopLater:
    """A stop that is asked for after a number of looks."""

    looks: int
    requested_by: str = "SIGTERM"

    @property
    def requested(self) -> str | None:
        self.looks -= 1
        return self.requested_by if self.looks < 0 else None


def make_run(loop_config: LoopConfig, **parts: object) -> tuple[TrainingRun, Recorder]:
    recorder = Recorder()
    run = TrainingRun(
        loop_config,
        make_state(),
        batches(),
        batches(1),
        batches(2),
        saver=MemorySaver(),
        hook=recorder,
        **parts,  # type: ignore[arg-type]
    )
    return run, recorder


def test_the_order_of_a_run(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(save_interval=4))
    assert [result.iteration for result in train(run)] == [1, 2, 3, 4, 5, 6]
    assert recorder.moments == [
        *("step 1", "step 2", "step 3", "validation", "step 4", "save 4", "step 5", "step 6", "validation"),
        *("done", "save 6", "final validation", "final test"),
    ]
    assert run.exit_reason == ExitReason("finished", 6)
    assert run.state.consumed_valid_samples == 2 * 2 * 4


def test_each_window_is_of_its_own_steps(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config())
    losses = [result.loss for result in train(run)]
    assert [window.iteration for window in recorder.windows] == [2, 4, 6]
    for window, pair in zip(recorder.windows, (losses[:2], losses[2:4], losses[4:]), strict=True):
        assert window.loss == pytest.approx(sum(pair) / 2, rel=1e-6)
        assert 0 < window.mfu_measured <= 1 and window.mfu_datasheet is None


def test_utilisation_is_of_each_peak(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(measured_peak_flops_per_s=1e6, datasheet_flops_per_s=4e6))
    list(train(run))
    for window in recorder.windows:
        assert window.mfu_measured == pytest.approx(window.teraflops * 1e6)
        assert window.mfu_datasheet == pytest.approx(window.mfu_measured / 4)


def test_a_signal_ends_the_run_after_the_step_and_saves(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(eval_interval=100), stop=StopLater(2))
    assert len(list(train(run))) == 2
    assert recorder.moments == ["step 1", "step 2", "save 2", "exit signal"]
    assert run.exit_reason == ExitReason("signal", 2, "SIGTERM")


def test_a_signal_before_the_first_step_saves_nothing(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(), stop=StopLater(0))
    assert list(train(run)) == []
    assert recorder.moments == ["exit signal"]


def test_a_signal_in_an_evaluation_gives_it_up_but_counts_its_samples(
    make_loop_config: Callable[..., LoopConfig],
) -> None:
    run, recorder = make_run(make_loop_config(eval_interval=1), stop=StopLater(1))
    list(train(run))
    assert recorder.moments == ["step 1", "save 1", "exit signal"]
    assert run.state.consumed_valid_samples == 2 * 4


def test_exit_interval(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(exit_interval=2, save_interval=2))
    list(train(run))
    assert recorder.moments == ["step 1", "step 2", "save 2", "exit interval"]
    # The same command again goes on to the next multiple instead of stopping where it stands.
    assert [result.iteration for result in train(run_again(run))] == [3, 4]


def run_again(run: TrainingRun) -> TrainingRun:
    run.exit_reason = None
    return run


def test_exit_duration(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(exit_minutes=1), started=-1e9)
    list(train(run))
    assert recorder.moments == ["step 1", "save 1", "exit duration"]


def test_exit_duration_ends_an_evaluation(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(exit_minutes=1, eval_interval=1), started=-1e9)
    list(train(run))
    assert recorder.moments == ["step 1", "save 1", "exit duration"]
    finished, moments = make_run(make_loop_config(exit_minutes=1), started=-1e9)
    finished.state.iteration = 6
    list(train(finished))
    assert moments.moments == ["done", "exit duration"]


@dataclass
class Breaks:
    """A probe that raises at a point of an iteration, as a killed compiler does, and says that a stop was asked for."""

    point: str
    asked: bool
    requested: str | None = None

    def __call__(self, point: str, iteration: int) -> None:
        if iteration == 3 and point == self.point:
            self.requested = "SIGINT" if self.asked else None
            torch.rand(3)  # what the step drew before it broke
            raise RuntimeError("the compiler was killed")


def test_a_step_that_a_signal_breaks_off_is_as_if_it_had_not_begun(make_loop_config: Callable[..., LoopConfig]) -> None:
    probe = Breaks("bwd", asked=True)
    run, recorder = make_run(make_loop_config(eval_interval=100), probe=probe, stop=probe)
    streams = []
    for _ in train(run):
        streams.append(run.state.rng_streams.state()["torch_rng_state"])
    assert recorder.moments == ["step 1", "step 2", "save 2", "exit signal"]
    assert run.exit_reason == ExitReason("signal", 2, "SIGINT")
    assert torch.equal(run.state.rng_streams.state()["torch_rng_state"], streams[-1])


def test_a_step_that_breaks_by_itself_is_an_error(make_loop_config: Callable[..., LoopConfig]) -> None:
    probe = Breaks("bwd", asked=False)
    run, recorder = make_run(make_loop_config(eval_interval=100), probe=probe, stop=probe)
    with pytest.raises(RuntimeError, match="compiler was killed"):
        list(train(run))
    assert recorder.moments == ["step 1", "step 2"]


def test_an_update_that_breaks_is_never_saved(
    make_loop_config: Callable[..., LoopConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Breaks("never", asked=True, requested=None)
    run, recorder = make_run(make_loop_config(), probe=probe, stop=probe)

    def broken(*_: float, **__: float | None) -> None:
        probe.requested = "SIGINT"
        raise RuntimeError("in the middle of the weights")

    monkeypatch.setattr(run.state.optimizer, "complete_step", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        list(train(run))
    assert recorder.moments == []


def test_a_finished_run_only_evaluates(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config())
    run.state.iteration = 6
    assert list(train(run)) == []
    assert recorder.moments == ["done", "final validation", "final test"]


def test_an_evaluation_is_the_mean_over_tokens_without_dropout(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(train_iterations=3))
    list(train(run))
    final, again = recorder.evaluations[-2], batches(1)
    for _ in range(4):  # the validation in the middle drew these
        next(again)
    run.state.model.eval()
    losses = []
    with torch.no_grad():
        for _ in range(4):
            batch = next(again)
            losses.append(run.state.model(batch["tokens"], labels_BS=batch["labels"]))
    assert final.loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
    assert final.num_samples == 8


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(save_interval=1))
    with torch.no_grad():
        run.state.model.output_weight[0, 0] = float("nan")
    found = r"loss is nan at iteration 1: .* weight embedding\.word_embeddings\.weight .* samples 0 to 3"
    with pytest.raises(MegalithError, match=found):
        list(train(run))
    assert recorder.moments == []


def test_skip_train_only_evaluates(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(train_iterations=6, save_interval=2, skip_training=True))
    assert list(train(run)) == []
    assert recorder.moments == ["final validation", "final test"]
    assert run.exit_reason == ExitReason("finished", 0)


def test_no_evaluation_before_the_first(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(make_loop_config(train_iterations=6, eval_interval=2, eval_start_iteration=4))
    list(train(run))
    assert [evaluation.iteration for evaluation in recorder.evaluations] == [4, 6, 6, 6]


def test_times_are_told_by_their_level(make_loop_config: Callable[..., LoopConfig]) -> None:
    """At level 0 those of evaluations and saves, above it those of the parts of the steps of a window, too."""
    at_level = {}
    for level in range(3):
        run, _ = make_run(make_loop_config(train_iterations=2, log_interval=2, eval_interval=2, save_interval=2))
        run.timers = Timers(level)
        names: list[str] = []
        run.hook = TimesOnly(names)
        list(train(run))
        at_level[level] = names
    assert at_level[0] == ["evaluate", "save-checkpoint", "evaluate", "evaluate"]
    assert at_level[1] == ["forward-backward", "optimizer", *at_level[0]]
    inner = ["batch-generator", "forward-compute", "backward-compute"]
    assert at_level[2] == ["forward-backward", *inner, "optimizer", *at_level[0]]


class TimesOnly(Hook):
    """Notes the names of all times."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def after_timing(self, iteration: int, times: Times) -> None:
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())
        self._names.extend(times)


def with_losses(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let evaluations find these losses, one after the other."""
    found = iter(losses)

    def evaluated(state: TrainState, eval_set: EvaluationSet, *_: object, final: bool, **__: object) -> Evaluation:
        return Evaluation(state.iteration, state.consumed_samples, eval_set.name, next(found), 1, 0.0, final)

    monkeypatch.setattr("megalith.train.loop.evaluate", evaluated)


def test_a_run_stops_after_evaluations_without_a_new_lowest_loss(
    make_loop_config: Callable[..., LoopConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, [3.0, 2.0, 2.5, 1.0, 1.5, 1.0])  # the rise of 2.5 is made good; a tie is no new lowest
    run, recorder = make_run(
        make_loop_config(train_iterations=20, eval_interval=1, early_stopping_patience=2, eval_iterations=1)
    )
    list(train(run))
    assert recorder.moments[-4:] == ["step 6", "validation", "save 6", "exit early stopping"]
    assert run.exit_reason is not None and (run.exit_reason.kind, run.exit_reason.iteration) == ("early stopping", 6)
    assert "iteration 4" in run.exit_reason.detail
    # Started again it stops at once; with more patience, which counts on from where it was, it continues.
    recorder.moments.clear()
    assert list(train(run_again(run))) == []
    assert recorder.moments == ["exit early stopping"]
    with_losses(monkeypatch, [1.2])
    run.loop_config = replace(run.loop_config, early_stopping_patience=3)
    assert [result.iteration for result in train(run_again(run))] == [7]


def test_the_best_evaluation_is_saved_and_named_to_the_saver(
    make_loop_config: Callable[..., LoopConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, [3.0, 2.0, float("nan"), 2.5, 9.0, 9.0])
    run, recorder = make_run(
        make_loop_config(train_iterations=4, eval_interval=1, save_interval=3, keep_best=True, eval_iterations=1)
    )
    list(train(run))
    assert [moment for moment in recorder.moments if "save" in moment] == ["save 1", "save 2", "save 3", "save 4"]
    assert (run.state.best.iteration, run.state.best.loss, run.state.best.later) == (2, 2.0, 2)


def test_a_skipped_last_iteration_is_saved(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, recorder = make_run(
        make_loop_config(train_iterations=4, save_interval=3, iterations_to_skip=frozenset({3}), eval_iterations=0)
    )
    list(train(run))
    assert [moment for moment in recorder.moments if "save" in moment] == ["save 3", "save 4"]


def test_the_mean_of_several_validation_sets_counts(
    make_loop_config: Callable[..., LoopConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(monkeypatch, [3.0, 1.0, 0.0, 5.0, *[0.0] * 9])
    sets = [EvaluationSet(name, batches(1), 1) for name in ("a", "b")]
    config = make_loop_config(train_iterations=2, eval_interval=1, keep_best=True)
    run, _ = make_run(config, valid_sets=sets)
    run.valid = None
    list(train(run))
    assert (run.state.best.iteration, run.state.best.loss) == (1, 2.0)


def test_evaluations_are_not_counted_unless_asked_for(make_loop_config: Callable[..., LoopConfig]) -> None:
    run, _ = make_run(make_loop_config())
    list(train(run))
    assert run.state.best == BestEvaluation()
