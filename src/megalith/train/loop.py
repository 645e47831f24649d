"""The training loop: steps, evaluations and checkpoints in Megatron's order, until the end or a request to stop.

`train` is a generator: whoever drives it sees each `StepResult` and may stop between two. It prints nothing; the hooks
do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice

from megalith.errors import MegalithError
from megalith.schedules.batch_size import BatchSizes
from megalith.schedules.pipeline import default_schedule
from megalith.train.anomalies import AnomalyPolicy, BadStepError, TakeStep
from megalith.train.checkpoint_saver import BackgroundSaver, CheckpointSaver
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.evaluation import EvaluationSet, evaluate
from megalith.train.faults import Probe, no_probe
from megalith.train.results import Ending, GradientNoise, Hook, Progress, StepResult, Window
from megalith.train.signals import StopSignals
from megalith.train.state import TrainState
from megalith.train.step import Batch, train_step
from megalith.train.step_hooks import BeforeUpdate, BlendCount, ProbeHook, StepHook
from megalith.train.timers import Timers, gather_times


@dataclass(frozen=True)
class Plan:
    """The lengths and intervals of a run."""

    train_iterations: int
    global_batch_size: int
    num_micro_batches: int
    log_interval: int
    eval_interval: int
    eval_iterations: int  # global batches of one evaluation; 0 for no evaluation at all
    flops_per_step: float  # model FLOPs of one step on this device
    peak_flops: float  # FLOP/s of its best matrix product, as measured
    save_interval: int | None = None  # iterations between checkpoints; None for a single one at the end
    ephemeral_save_interval: int | None = None  # iterations between checkpoints of which only the last is kept
    exit_interval: int | None = None
    phase_ends: frozenset[int] = frozenset()  # save and stop at these iterations
    exit_minutes: float | None = None
    log_params_norm: bool = False
    pipeline_schedule: str | None = None  # order of the work of a pipeline; the usual one if None
    batch_sizes: BatchSizes | None = None  # of steps that grow; the two sizes above are the last ones then
    skipped: frozenset[int] = frozenset()  # numbers of done iterations after which the next one is passed over
    log_noise: bool = False  # measure the gradient noise scale every `log_interval`
    skip_training: bool = False
    first_evaluation: int = 0  # no evaluation in the course of the training before this iteration
    # samples and micro-batches of one iteration of an evaluation; as of a step if None
    eval_batch_size: int | None = None
    eval_micro_batches: int | None = None
    datasheet_flops: float | None = None  # `peak_flops` by the datasheet; None where the device is not known

    @property
    def eval_samples(self) -> int:
        """Number of samples of one iteration of an evaluation."""
        return self.eval_batch_size or self.global_batch_size

    def micro_batches_after(self, consumed: int) -> int:
        """Return the number of micro-batches of the step that follows `consumed` samples."""
        return self.num_micro_batches if self.batch_sizes is None else self.batch_sizes.num_micro_batches(consumed)

    def samples_of(self, num_micro_batches: int) -> int:
        """Return the number of samples of a step with this many micro-batches, over all replicas."""
        return num_micro_batches * (self.global_batch_size // self.num_micro_batches)

    def flops_of(self, num_samples: int) -> float:
        """Return the model FLOPs of this many samples on this device."""
        return self.flops_per_step * (num_samples / self.global_batch_size)


@dataclass
class TrainingRun:
    """Everything that the loop uses. `valid` and `test` are None where the split is empty."""

    plan: Plan
    state: TrainState
    train: Iterator[Batch]
    valid: Iterator[Batch] | None = None
    test: Iterator[Batch] | None = None
    saver: CheckpointSaver | None = None
    hook: Hook = field(default_factory=Hook)
    stop: StopSignals | NeverStop = field(default_factory=NeverStop)
    probe: Probe = no_probe
    started: float = field(default_factory=time.monotonic)
    ending: Ending | None = None  # why the loop ended; None while it runs
    background: BackgroundSaver | None = None  # saves beside the training, but for the last save; None for none
    timers: Timers = field(default_factory=Timers)
    valid_sets: Sequence[EvaluationSet] = ()  # in place of `valid`: several sets, or one evaluated in full
    sources: Sequence[str] = ()  # names of the datasets of a blend that is trained on; none without a blend
    # what is done about anomalous steps; the run stops at one by default
    anomalies: AnomalyPolicy = None  # type: ignore[assignment]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        state, schedule = self.state, self.plan.pipeline_schedule
        self.anomalies = self.anomalies or AnomalyPolicy(state, schedule or default_schedule(len(state.chunks)))
        self.consensus = RankConsensus(
            self.stop,
            state.context,
            counts=state.counts_losses,
            writers=self.background,
            is_late=lambda: _is_out_of_time(self),
        )

    @cached_property
    def take_step(self) -> TakeStep:
        """Calls `train_step` with the options of this run."""
        hooks: list[StepHook] = [ProbeHook(self.probe), *self.anomalies.hooks]
        if self.sources:
            hooks.append(BlendCount(self.state, self.sources))
        if self.background is not None:
            hooks.append(BeforeUpdate(self.background.settle))
        schedule, totals = self.plan.pipeline_schedule, self.consensus.totals
        return partial(train_step, self.state, schedule=schedule, totals=totals, hooks=hooks, timers=self.timers)

    def close(self) -> None:
        """Cancel pending asynchronous saves. Safe to call after success or failure."""
        if self.background is not None:
            self.background.close()


def train(run: TrainingRun) -> Iterator[StepResult]:
    """Run the remaining iterations, then the final save and evaluations; yield after each step.

    When it stops early, the state is saved first. Either way `run.ending` says why.

    Raises:
        BadStepError: a loss or gradient is wrong, and this is to end the run.
    """
    plan, state, window = run.plan, run.state, Window()
    unsaved, size = False, plan.micro_batches_after(state.consumed_samples)
    last = 0 if plan.skip_training else plan.train_iterations
    while not _should_stop(run) and state.iteration < last:
        if (grown := plan.micro_batches_after(state.consumed_samples)) != size:
            run.hook.after_growth(plan.samples_of(size), plan.samples_of(grown))
            if unsaved:
                _save(run)
            unsaved, size = False, grown
        if state.iteration in plan.skipped:
            _skip_iteration(run, size)
            continue
        result = _step(run)
        if result is None:
            break
        unsaved = True
        window.add(result)
        run.progress.add(result)
        run.hook.after_step(result)
        if state.iteration % plan.log_interval == 0:
            steps = len(window.results)
            flops = plan.flops_of(sum(result.num_samples for result in window.results)) / steps
            run.hook.after_window(window.close(plan.train_iterations, flops, plan.peak_flops, plan.datasheet_flops))
            if run.timers.level:
                _report_times(run, run.timers.take(), steps=steps)
        if run.consensus.failed or not run.consensus.busy:  # all ranks are done with a stage of the save under way
            _advance_save(run)
        if state.iteration % plan.eval_interval == 0 and state.iteration >= plan.first_evaluation:
            _validate(run)
        if plan.save_interval and state.iteration % plan.save_interval == 0:
            _save(run)
            unsaved = False
        elif (often := plan.ephemeral_save_interval) and state.iteration % often == 0 and state.iteration < last:
            _save(run, persistent=False)
        yield result
        run.ending = run.ending or _planned_exit(run)
    if run.ending is None and not plan.skip_training:
        run.hook.after_training(state.iteration)
    if unsaved:
        _save(run, last=True)
    _complete_save(run)
    if run.ending is None:
        _finish(run)
    else:
        run.hook.on_exit(run.ending)


def _step(run: TrainingRun) -> StepResult | None:
    """Take a step; None if a signal interrupted it, with the state as it was before.

    A Ctrl-C in a terminal also reaches processes that work for this one, such as the compiler of `--compile`; their
    death then comes as an exception out of the step, which is no failure of it.
    """
    plan, state = run.plan, run.state
    iteration, streams, size = state.iteration, state.streams.state(), plan.micro_batches_after(state.consumed_samples)
    logged = (iteration + 1) % plan.log_interval == 0
    try:
        batches, small = _small_step(run, size) if plan.log_noise and logged else (run.train, None)
        attempt = run.anomalies.begin(batches)
        result = run.take_step(attempt.batches, size, apply=attempt.apply)
        result = run.anomalies.settle(attempt, result, run.take_step, run.hook.on_bad_step)
    except BadStepError:
        _complete_save(run)  # of an earlier step
        raise
    except Exception as error:
        whole = state.iteration == iteration and not state.updating and run.consensus.alone
        if isinstance(error, MegalithError) or not whole or not _should_stop(run):
            raise
        state.streams.load_state(streams)
        return None
    if small is not None and small.grad_norm and result.grad_norm and not (small.anomaly or result.anomaly):
        scale = state.noise.add(small.num_samples, small.grad_norm, result.num_samples, result.grad_norm)
        sizes = small.num_samples, result.num_samples
        run.hook.after_noise(GradientNoise(result.iteration, *sizes, small.grad_norm, result.grad_norm, scale))
    state.flops += plan.flops_of(result.num_samples) * state.context.world.size
    if plan.log_params_norm and logged:
        return replace(result, params_norm=state.optimizer.params_norm())
    return result


def _small_step(run: TrainingRun, size: int) -> tuple[Iterator[Batch], StepResult | None]:
    """Compute the gradient of the first micro-batches of a step alone, as many as its stages need.

    Returns:
        The micro-batches of the whole step, and the result for the first of them; None if these are all there are.
    """
    state = run.state
    fewest = state.context.pp.size if len(state.chunks) > 1 else 1
    if fewest >= size:
        return run.train, None
    before, ahead = state.snapshot(), list(islice(run.train, fewest))
    small = run.take_step(iter(ahead), fewest, apply=False)
    state.restore_snapshot(before)
    return chain(ahead, run.train), small


def _skip_iteration(run: TrainingRun, num_micro_batches: int) -> None:
    """Skip an iteration (`--iterations-to-skip`): its samples are consumed without a line, evaluation or save."""
    state = run.state
    field = state.model.tokens_field
    samples = sum(next(run.train)[field].shape[0] for _ in range(num_micro_batches)) * state.context.dp.size
    state.iteration += 1
    state.consumed_samples += samples
    state.skipped_samples += samples


def _should_stop(run: TrainingRun) -> bool:
    """Return whether to stop now; a signal comes before the exits that the configuration asks for."""
    if requested := run.consensus.requested:
        run.ending = Ending("signal", run.state.iteration, requested)
    return run.ending is not None


def _planned_exit(run: TrainingRun) -> Ending | None:
    """Return the exit that the configuration asks for after this step, or None."""
    plan, iteration = run.plan, run.state.iteration
    if run.consensus.out_of_time:
        return Ending("duration", iteration, str(_minutes(run)))
    if (plan.exit_interval and iteration % plan.exit_interval == 0) or iteration in plan.phase_ends:
        return Ending("interval", iteration)
    return None


def _minutes(run: TrainingRun) -> float:
    return (time.monotonic() - run.started) / 60.0


def _is_out_of_time(run: TrainingRun) -> bool:
    """Return whether `--exit-duration-in-mins` is over by the clock of this process."""
    return bool(run.plan.exit_minutes) and _minutes(run) > (run.plan.exit_minutes or 0)


def _validate(run: TrainingRun) -> None:
    """Evaluate in the middle of training. The samples count as consumed even if a signal cuts it short."""
    if not (sets := _validation_sets(run)):
        return
    for held_out in sets:
        if not _evaluate(run, held_out, final=False):
            break
    run.state.consumed_valid_samples += run.plan.eval_iterations * run.plan.eval_samples


def _validation_sets(run: TrainingRun) -> Sequence[EvaluationSet]:
    """Return the validation sets; those read in full have their own lengths, whatever `--eval-iters`."""
    sets = run.valid_sets
    if run.valid is not None:
        sets = (EvaluationSet("validation", run.valid, run.plan.eval_iterations),)
    return [held_out for held_out in sets if held_out.iterations]


def _evaluate(run: TrainingRun, held_out: EvaluationSet, *, final: bool) -> bool:
    """Evaluate and notify the hooks; False if a signal or `--exit-duration-in-mins` cut it short."""
    plan = run.plan
    run.hook.before_evaluation(held_out.name, held_out.iterations * plan.eval_samples, final=final)
    began = time.perf_counter()
    try:
        evaluation = evaluate(
            run.state,
            held_out,
            plan.eval_micro_batches or plan.num_micro_batches,
            final=final,
            hook=run.hook,
            totals=run.consensus.totals,
            should_stop=lambda: run.consensus.requested is not None or run.consensus.out_of_time,
            probe=run.probe,
        )
    except Exception as error:
        if isinstance(error, MegalithError) or not run.consensus.alone or not run.consensus.requested:
            raise
        return False  # broken off as a step can be, see `_step`
    if evaluation is not None:
        _report_times(run, {"evaluate": time.perf_counter() - began})
        run.hook.after_evaluation(evaluation)
    return evaluation is not None


def _save(run: TrainingRun, *, persistent: bool = True, last: bool = False) -> None:
    if run.saver is None:
        return
    _complete_save(run)
    run.hook.before_save(run.state.iteration, persistent=persistent)
    began = time.perf_counter()
    if run.background is not None and not last:
        run.hook.after_scheduling(run.background.schedule(run.state, persistent=persistent))
    else:
        run.hook.after_save(run.saver.save(run.state, persistent=persistent))
    _report_times(run, {"save-checkpoint": time.perf_counter() - began})


def _report_times(run: TrainingRun, own: Mapping[str, float], *, steps: int = 1) -> None:
    """Report to the hooks how long something took on each rank, divided by `steps`."""
    times = gather_times(own, run.state.context, steps=steps)
    run.hook.after_timing(run.state.iteration, times)


def _complete_save(run: TrainingRun) -> None:
    """Wait for the asynchronous save, if any."""
    while run.background is not None and run.background.scheduled is not None:
        _advance_save(run)


def _advance_save(run: TrainingRun) -> None:
    """Advance the asynchronous save, if there is one, by a stage; raises if a rank could not do its part."""
    if run.background is None or run.background.scheduled is None:
        return
    saved = run.background.proceed(failed=run.consensus.failed)
    if saved is not None:
        run.hook.after_save(saved)


def _finish(run: TrainingRun) -> None:
    """Evaluate on both held-out splits after the last iteration."""
    lasting = run.plan.eval_iterations
    test = [EvaluationSet("test", run.test, lasting)] if run.test is not None and lasting else []
    for held_out in (*_validation_sets(run), *test):
        if not _evaluate(run, held_out, final=True):
            if not _should_stop(run):
                run.ending = Ending("duration", run.state.iteration, str(_minutes(run)))
            assert run.ending is not None
            run.hook.on_exit(run.ending)
            return
    run.ending = Ending("finished", run.state.iteration)
