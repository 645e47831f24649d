"""The loop: steps, evaluations, checkpoints, in Megatron's order, until the work is done or a stop is asked for.

`train` is a generator: whoever drives it sees each `StepResult` and may stop between two. It prints nothing; the hooks
do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice

import torch

from megalith.errors import MegalithError
from megalith.schedules.batch_size import BatchSizes
from megalith.schedules.pipeline import default_schedule
from megalith.train.anomalies import AnomalyPolicy, BadStepError, TakeStep
from megalith.train.checkpoint_saver import BackgroundSaver, CheckpointSaver
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.faults import Probe, no_probe
from megalith.train.results import Ending, Evaluation, GradientNoise, Hook, Progress, StepResult, Window
from megalith.train.signals import StopSignals
from megalith.train.state import TrainState
from megalith.train.step import Batch, StageWork, Totals, mean_losses, run_pipeline, totals_of, train_step
from megalith.train.step_hooks import BeforeUpdate, BlendCount, ProbeHook, StepHook
from megalith.train.timers import Timers, over_ranks


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    train_iterations: int
    global_batch_size: int
    num_micro_batches: int
    log_interval: int
    eval_interval: int
    eval_iterations: int  # global batches of one evaluation; 0 for no evaluation at all
    flops_per_step: float  # model FLOPs of one step on this device
    peak_flops: float  # FLOP/s of its best matrix product, as measured
    save_interval: int | None = None  # iterations between checkpoints; None for a single one at the end
    passing_save_interval: int | None = None  # iterations between checkpoints of which only the last is kept
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
    def samples_of_evaluation(self) -> int:
        """Samples of one iteration of an evaluation."""
        return self.eval_batch_size or self.global_batch_size

    def micro_batches_after(self, consumed: int) -> int:
        """Micro-batches of the step that follows so many samples."""
        return self.num_micro_batches if self.batch_sizes is None else self.batch_sizes.num_micro_batches(consumed)

    def samples_of(self, num_micro_batches: int) -> int:
        """Samples of a step of so many micro-batches, over all replicas."""
        return num_micro_batches * (self.global_batch_size // self.num_micro_batches)

    def flops_of(self, num_samples: int) -> float:
        """Model FLOPs of so many samples on this device."""
        return self.flops_per_step * (num_samples / self.global_batch_size)


@dataclass(frozen=True)
class HeldOut:
    """A validation set: its name in the log, its micro-batches of this replica, and global batches an evaluation."""

    name: str
    batches: Iterator[Batch]
    iterations: int


@dataclass
class TrainingRun:
    """All that the loop works with. `valid` and `test` are absent where the split is."""

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
    valid_sets: Sequence[HeldOut] = ()  # instead of `valid`, several sets or one that is gone through as a whole
    sources: Sequence[str] = ()  # names of the datasets of a blend that is trained on; none without a blend
    # what is done about anomalous steps; the run stops at one by default
    anomalies: AnomalyPolicy = None  # type: ignore[assignment]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        state, schedule = self.state, self.plan.pipeline_schedule
        self.anomalies = self.anomalies or AnomalyPolicy(state, schedule or default_schedule(len(state.chunks)))
        self.consensus = RankConsensus(
            self.stop, state.context, counts=state.speaks, writers=self.background, is_late=lambda: _late(self)
        )

    @cached_property
    def take_step(self) -> TakeStep:
        """`train_step` with the options of this run."""
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
    """Run the remaining iterations, then the final save and evaluations; yields after each step.

    When it stops early, the state is saved first. Either way `run.ending` says why.

    Raises:
        BadStepError: a loss or gradient is wrong, and this is to end the run.
    """
    plan, state, window = run.plan, run.state, Window()
    unsaved, size = False, plan.micro_batches_after(state.consumed_samples)
    last = 0 if plan.skip_training else plan.train_iterations
    while not _ended(run) and state.iteration < last:
        if (grown := plan.micro_batches_after(state.consumed_samples)) != size:
            run.hook.after_growth(plan.samples_of(size), plan.samples_of(grown))
            if unsaved:
                _save(run)
            unsaved, size = False, grown
        if state.iteration in plan.skipped:
            _pass_over(run, size)
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
                _tell_times(run, run.timers.take(), steps=steps)
        if run.consensus.failed or not run.consensus.busy:  # all ranks are done with a stage of the save under way
            _proceed(run)
        if state.iteration % plan.eval_interval == 0 and state.iteration >= plan.first_evaluation:
            _validate(run)
        if plan.save_interval and state.iteration % plan.save_interval == 0:
            _save(run)
            unsaved = False
        elif (often := plan.passing_save_interval) and state.iteration % often == 0 and state.iteration < last:
            _save(run, persistent=False)
        yield result
        run.ending = run.ending or _ending_by_plan(run)
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
    """Take a step; None if a signal broke it off, with the state as it was before.

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
        if isinstance(error, MegalithError) or not whole or not _ended(run):
            raise
        state.streams.load_state(streams)
        return None
    if small is not None and small.grad_norm and result.grad_norm and not (small.bad or result.bad):
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
    before, ahead = state.moment(), list(islice(run.train, fewest))
    small = run.take_step(iter(ahead), fewest, apply=False)
    state.go_back(before)
    return chain(ahead, run.train), small


def _pass_over(run: TrainingRun, num_micro_batches: int) -> None:
    """Draw the samples of a step and do nothing with them, as Megatron does: no line, no evaluation, no save."""
    state = run.state
    field = state.model.tokens_field
    samples = sum(next(run.train)[field].shape[0] for _ in range(num_micro_batches)) * state.context.dp.size
    state.iteration += 1
    state.consumed_samples += samples
    state.skipped_samples += samples


def _ended(run: TrainingRun) -> bool:
    """Whether to stop now; a signal goes before the plan's own reasons."""
    if requested := run.consensus.requested:
        run.ending = Ending("signal", run.state.iteration, requested)
    return run.ending is not None


def _ending_by_plan(run: TrainingRun) -> Ending | None:
    """The exits that the configuration asks for, checked after each step."""
    plan, iteration = run.plan, run.state.iteration
    if run.consensus.out_of_time:
        return Ending("duration", iteration, str(_minutes(run)))
    if (plan.exit_interval and iteration % plan.exit_interval == 0) or iteration in plan.phase_ends:
        return Ending("interval", iteration)
    return None


def _minutes(run: TrainingRun) -> float:
    return (time.monotonic() - run.started) / 60.0


def _late(run: TrainingRun) -> bool:
    """Whether time is up by this process's clock."""
    return bool(run.plan.exit_minutes) and _minutes(run) > (run.plan.exit_minutes or 0)


def _validate(run: TrainingRun) -> None:
    """The evaluation in the middle of training. Its samples count as drawn even if a signal cuts it short."""
    if not (sets := _validation_sets(run)):
        return
    for held_out in sets:
        if not _evaluate(run, held_out, final=False):
            break
    run.state.consumed_valid_samples += run.plan.eval_iterations * run.plan.samples_of_evaluation


def _validation_sets(run: TrainingRun) -> Sequence[HeldOut]:
    """Those that an evaluation goes through; whole sets have their own lengths, whatever `--eval-iters` says."""
    sets = run.valid_sets
    if run.valid is not None:
        sets = (HeldOut("validation", run.valid, run.plan.eval_iterations),)
    return [held_out for held_out in sets if held_out.iterations]


def _evaluate(run: TrainingRun, held_out: HeldOut, *, final: bool) -> bool:
    """Evaluate and tell the hooks; False if a signal or `--exit-duration-in-mins` cut it short."""
    plan = run.plan
    run.hook.before_evaluation(held_out.name, held_out.iterations * plan.samples_of_evaluation, final=final)
    began = time.perf_counter()
    try:
        evaluation = evaluate(
            run.state,
            held_out.batches,
            split=held_out.name,
            iterations=held_out.iterations,
            num_micro_batches=plan.eval_micro_batches or plan.num_micro_batches,
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
        _tell_times(run, {"evaluate": time.perf_counter() - began})
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
    _tell_times(run, {"save-checkpoint": time.perf_counter() - began})


def _tell_times(run: TrainingRun, own: Mapping[str, float], *, steps: int = 1) -> None:
    """Tell the hooks how long something took on each rank, for each of so many steps."""
    times = over_ranks(own, run.state.context, steps=steps)
    run.hook.after_timing(run.state.iteration, times)


def _complete_save(run: TrainingRun) -> None:
    """Complete the save under way, if there is one, and wait for it."""
    while run.background is not None and run.background.scheduled is not None:
        _proceed(run)


def _proceed(run: TrainingRun) -> None:
    """Take the save under way, if there is one, a stage further; raises if a rank could not do its part."""
    if run.background is None or run.background.scheduled is None:
        return
    saved = run.background.proceed(failed=run.consensus.failed)
    if saved is not None:
        run.hook.after_save(saved)


def _finish(run: TrainingRun) -> None:
    """Every iteration is done: evaluate on both held-out splits once more, saying which."""
    lasting = run.plan.eval_iterations
    test = [HeldOut("test", run.test, lasting)] if run.test is not None and lasting else []
    for held_out in (*_validation_sets(run), *test):
        if not _evaluate(run, held_out, final=True):
            if not _ended(run):
                run.ending = Ending("duration", run.state.iteration, str(_minutes(run)))
            assert run.ending is not None
            run.hook.on_exit(run.ending)
            return
    run.ending = Ending("finished", run.state.iteration)


def evaluate(
    state: TrainState,
    batches: Iterator[Batch],
    *,
    split: str,
    iterations: int,
    num_micro_batches: int,
    final: bool = False,
    hook: Hook,
    totals: Totals | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    probe: Probe = no_probe,
) -> Evaluation | None:
    """Average the loss over `iterations` global batches, all unmasked tokens alike; None if it was given up.

    Args:
        state: its counters are left alone; the model is back in training mode afterwards.
        should_stop: asked after each global batch; the evaluation is given up when it says so.

    Source: docs/reference/training.md#the-loop: single-precision sums over the micro-batches of a global batch, then
    added to the running total.
    """
    started = time.perf_counter()
    num_samples, totals = 0, totals or totals_of(state)
    _, *further = state.model.loss_names
    total = torch.zeros(2 * len(further) + 2, device=state.context.device)
    for chunk in state.chunks:
        chunk.eval()
    try:
        for number in range(1, iterations + 1):
            probe("eval", state.iteration)
            hook.before_evaluation_iteration(number, iterations, final=final)
            work = StageWork(state.chunks, batches, state.context, training=False)
            run_pipeline(state, work, "forward", num_micro_batches)
            total = total + totals(work.total())
            num_samples += work.num_samples * state.context.dp.size
            if should_stop():
                return None
    finally:
        for chunk in state.chunks:
            chunk.train()
    loss, *others = mean_losses(total)
    return Evaluation(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        split=split,
        loss=loss,
        further_losses=dict(zip(further, others, strict=True)),
        num_samples=num_samples,
        seconds=time.perf_counter() - started,
        final=final,
    )
