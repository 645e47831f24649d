"""The loop: steps, evaluations, checkpoints, in Megatron's order, until the work is done or a stop is asked for.

`train` is a generator: whoever drives it sees each `StepResult` and may stop between two. It prints nothing; the hooks
do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from megalith.errors import MegalithError
from megalith.train.agreement import Agreement, NeverStop, StopRequest
from megalith.train.evaluation import evaluate
from megalith.train.faults import Probe, no_probe
from megalith.train.hooks import Hook
from megalith.train.results import Ending, SavedCheckpoint, ScheduledSave, StepResult, Window
from megalith.train.state import TrainState
from megalith.train.step import nothing_before, train_step
from megalith.train.work import Batch


@dataclass(frozen=True)
class Plan:
    """How long and how often.

    Attributes:
        num_micro_batches: micro-batches of one step, and of one iteration of an evaluation.
        eval_iterations: global batches of one evaluation; 0 for no evaluation at all.
        save_interval: iterations between checkpoints; None for a single one at the end.
        passing_save_interval: iterations between those of which only the last one is kept.
        exit_interval: save and stop at a multiple of this iteration.
        exit_minutes: save and stop after this time.
        flops_per_step: model FLOPs of one step on this device.
        peak_flops: FLOP/s of its best matrix product.
        pipeline_schedule: order of the work of a pipeline; the usual one if None.
        stop_on_nan: a loss that is not finite ends the run instead of being trained on.
    """

    train_iterations: int
    global_batch_size: int
    num_micro_batches: int
    log_interval: int
    eval_interval: int
    eval_iterations: int
    flops_per_step: float
    peak_flops: float
    save_interval: int | None = None
    passing_save_interval: int | None = None
    exit_interval: int | None = None
    exit_minutes: float | None = None
    log_params_norm: bool = False
    stop_on_nan: bool = True
    pipeline_schedule: str | None = None


class Saver(Protocol):
    """Where checkpoints go."""

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        """Write the state; returns when it is complete. Of those that are not persistent only the last one is kept."""
        ...


class BackgroundSaver(Protocol):
    """What writes checkpoints beside the training, one at a time. All ranks schedule and proceed together."""

    @property
    def scheduled(self) -> int | None:
        """The iteration of the save that is under way; None if there is none."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is at work for it."""
        ...

    @property
    def failed(self) -> bool:
        """Whether this rank could not do its part."""
        ...

    def schedule(self, state: TrainState, *, persistent: bool = True) -> ScheduledSave:
        """Begin to write the state, which may change after `settle`."""
        ...

    def settle(self) -> None:
        """Wait until the state may change."""
        ...

    def proceed(self, *, failed: bool = False) -> SavedCheckpoint | None:
        """Go on to the next stage of the save under way, waiting for what is busy; the checkpoint if it is complete."""
        ...

    def close(self) -> None:
        """Give up a save that is under way."""
        ...


@dataclass
class TrainingRun:
    """All that the loop works with. `valid` and `test` are absent where the split is.

    Attributes:
        background: saves beside the training, but for the last save; None for none.
        ending: why the loop ended; None while it runs.
        agreement: what all ranks decide alike.
    """

    plan: Plan
    state: TrainState
    train: Iterator[Batch]
    valid: Iterator[Batch] | None = None
    test: Iterator[Batch] | None = None
    saver: Saver | None = None
    hook: Hook = field(default_factory=Hook)
    stop: StopRequest = field(default_factory=NeverStop)
    probe: Probe = no_probe
    started: float = field(default_factory=time.monotonic)
    ending: Ending | None = None
    background: BackgroundSaver | None = None

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.stop, self.state.context, counts=self.state.speaks, writers=self.background)

    def close(self) -> None:
        """Give up what still goes on; to be called whichever way the run ended."""
        if self.background is not None:
            self.background.close()


def train(run: TrainingRun) -> Iterator[StepResult]:
    """Run the remaining iterations, then the final save and evaluations; yields after each step.

    When it stops early, the state is saved first. Either way `run.ending` says why.

    Raises:
        MegalithError: the loss is not finite and no loss scaler is there to skip the step.
    """
    plan, state, window = run.plan, run.state, Window()
    unsaved = False
    while not _ended(run) and state.iteration < plan.train_iterations:
        result = _step(run)
        if result is None:
            break
        unsaved = True
        window.add(result)
        run.hook.after_step(result)
        if state.iteration % plan.log_interval == 0:
            run.hook.after_window(window.close(plan.train_iterations, plan.flops_per_step, plan.peak_flops))
        _go_on_saving(run)
        if plan.stop_on_nan:
            _refuse_nan(run, result)
        if state.iteration % plan.eval_interval == 0:
            _validate(run)
        if plan.save_interval and state.iteration % plan.save_interval == 0:
            _save(run)
            unsaved = False
        elif _passing_save_is_due(plan, state.iteration):
            _save(run, persistent=False)
        yield result
        run.ending = _ending_by_plan(run)
    if run.ending is None:
        run.hook.after_training(state.iteration)
    if unsaved:
        _save(run, last=True)
    _complete_save(run)
    if run.ending is None:
        _finish(run)
    else:
        run.hook.on_exit(run.ending)


def _step(run: TrainingRun) -> StepResult | None:
    """Take a step; None if a signal broke it off, with the state as it was before.

    A Ctrl-C in a terminal also reaches processes that work for this one, such as the compiler of `--compile`; their
    death then comes as an exception out of the step, which is no failure of it.
    """
    plan, state = run.plan, run.state
    iteration, streams = state.iteration, state.streams.state()
    logged = (iteration + 1) % plan.log_interval == 0
    try:
        result = train_step(
            state,
            run.train,
            plan.num_micro_batches,
            schedule=plan.pipeline_schedule,
            with_params_norm=plan.log_params_norm and logged,
            probe=run.probe,
            totals=lambda sums: run.agreement.totals(sums, out_of_time=_late(run)),
            before_update=nothing_before if run.background is None else run.background.settle,
        )
    except Exception as error:
        whole = state.iteration == iteration and not state.updating and run.agreement.alone
        if isinstance(error, MegalithError) or not whole or not _ended(run):
            raise
        state.streams.load_state(streams)
        return None
    state.flops += plan.flops_per_step * state.context.world.size
    return result


def _ended(run: TrainingRun) -> bool:
    """Whether to stop now; a signal goes before the plan's own reasons."""
    if requested := run.agreement.requested:
        run.ending = Ending("signal", run.state.iteration, requested)
    return run.ending is not None


def _ending_by_plan(run: TrainingRun) -> Ending | None:
    """The exits that the configuration asks for, checked after each step."""
    plan, iteration = run.plan, run.state.iteration
    if run.agreement.out_of_time:
        return Ending("duration", iteration, str(_minutes(run)))
    if plan.exit_interval and iteration % plan.exit_interval == 0:
        return Ending("interval", iteration)
    return None


def _minutes(run: TrainingRun) -> float:
    return (time.monotonic() - run.started) / 60.0


def _late(run: TrainingRun) -> bool:
    """Whether time is up by this process's clock."""
    return bool(run.plan.exit_minutes) and _minutes(run) > (run.plan.exit_minutes or 0)


def _refuse_nan(run: TrainingRun, result: StepResult) -> None:
    values = {"loss": result.loss, "gradient norm": 0.0 if result.grad_norm is None else result.grad_norm}
    for name, value in values.items():
        if not math.isfinite(value):
            _complete_save(run)  # of an earlier step
            first = result.consumed_samples - result.num_samples
            raise MegalithError(
                f"the {name} is {value} at iteration {result.iteration} (training samples {first} to "
                f"{result.consumed_samples - 1}, learning rate {result.learning_rate:g}); nothing of this step is "
                "saved. Lower --lr, lengthen the warm-up or look at these samples; "
                "--no-check-for-nan-in-loss-and-grad goes on all the same"
            )


def _validate(run: TrainingRun) -> None:
    """The evaluation in the middle of training. Its samples count as drawn even if a signal cuts it short."""
    if run.valid is None or not run.plan.eval_iterations:
        return
    _evaluate(run, "validation", run.valid, final=False)
    run.state.consumed_valid_samples += run.plan.eval_iterations * run.plan.global_batch_size


def _evaluate(run: TrainingRun, split: str, batches: Iterator[Batch], *, final: bool) -> bool:
    """Evaluate and tell the hooks; False if a signal or `--exit-duration-in-mins` cut it short."""
    plan = run.plan
    run.hook.before_evaluation(split, plan.eval_iterations * plan.global_batch_size, final=final)
    try:
        evaluation = evaluate(
            run.state,
            batches,
            split=split,
            iterations=plan.eval_iterations,
            num_micro_batches=plan.num_micro_batches,
            final=final,
            hook=run.hook,
            totals=lambda sums: run.agreement.totals(sums, out_of_time=_late(run)),
            should_stop=lambda: run.agreement.requested is not None or run.agreement.out_of_time,
            probe=run.probe,
        )
    except Exception as error:
        if isinstance(error, MegalithError) or not run.agreement.alone or not run.agreement.requested:
            raise
        return False  # broken off as a step can be, see `_step`
    if evaluation is not None:
        run.hook.after_evaluation(evaluation)
    return evaluation is not None


def _passing_save_is_due(plan: Plan, iteration: int) -> bool:
    """Whether to save for a restart only; after the last iteration there is a save to keep."""
    interval = plan.passing_save_interval
    return interval is not None and iteration % interval == 0 and iteration < plan.train_iterations


def _save(run: TrainingRun, *, persistent: bool = True, last: bool = False) -> None:
    if run.saver is None:
        return
    _complete_save(run)
    run.hook.before_save(run.state.iteration, persistent=persistent)
    if run.background is not None and not last:
        run.hook.after_scheduling(run.background.schedule(run.state, persistent=persistent))
    elif persistent:
        run.hook.after_save(run.saver.save(run.state))
    else:
        run.hook.after_save(run.saver.save(run.state, persistent=False))


def _go_on_saving(run: TrainingRun) -> None:
    """Let the save under way go on if all ranks are done with a stage of it; raises if one could not do its part."""
    saver, agreed = run.background, run.agreement
    if saver is not None and saver.scheduled is not None and (agreed.failed or not agreed.busy):
        _proceed(run, saver)


def _complete_save(run: TrainingRun) -> None:
    """Complete the save under way, if there is one, and wait for it."""
    while run.background is not None and run.background.scheduled is not None:
        _proceed(run, run.background)


def _proceed(run: TrainingRun, saver: BackgroundSaver) -> None:
    saved = saver.proceed(failed=run.agreement.failed)
    if saved is not None:
        run.hook.after_save(saved)


def _finish(run: TrainingRun) -> None:
    """Every iteration is done: evaluate on both held-out splits once more, saying which."""
    if run.plan.eval_iterations:
        for split, batches in (("validation", run.valid), ("test", run.test)):
            if batches is not None and not _evaluate(run, split, batches, final=True):
                if not _ended(run):
                    run.ending = Ending("duration", run.state.iteration, str(_minutes(run)))
                assert run.ending is not None
                run.hook.on_exit(run.ending)
                return
    run.ending = Ending("finished", run.state.iteration)
