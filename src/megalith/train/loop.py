"""The training loop: steps, evaluations and checkpoints in Megatron's order, until the end or a request to stop.

`train` is a generator: the caller receives each `StepResult` and may stop between two steps. It prints nothing; the
hooks do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice

import torch

from megalith.errors import MegalithError
from megalith.schedules.batch_size import BatchSizeSchedule
from megalith.schedules.pipeline import default_schedule
from megalith.train.anomalies import AnomalyPolicy, BadStepError, TakeStep
from megalith.train.checkpoint_saver import AsyncSaver, CheckpointSaver
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.evaluation import EvaluationSet, evaluate
from megalith.train.faults import Probe, no_probe
from megalith.train.results import Evaluation, ExitReason, GradientNoise, Hook, Progress, StepResult, Window
from megalith.train.signals import StopSignals
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step
from megalith.train.step_hooks import BeforeUpdate, BlendCount, ProbeHook, StepHook
from megalith.train.timers import Timers, gather_times


@dataclass(frozen=True)
class LoopConfig:
    """The lengths and intervals of a run."""

    train_iterations: int
    global_batch_size: int
    num_micro_batches: int
    log_interval: int
    eval_interval: int
    eval_iterations: int  # global batches of one evaluation; 0 for no evaluation at all
    flops_per_step: float  # model FLOPs of one step on this device
    measured_peak_flops_per_s: float  # of the fastest matrix product of this device
    save_interval: int | None = None  # iterations between checkpoints; None for a single one at the end
    ephemeral_save_interval: int | None = None  # iterations between ephemeral checkpoints; only the last is kept
    exit_interval: int | None = None
    early_stopping_patience: int | None = None  # stop after this many evaluations in a row without a new lowest loss
    keep_best: bool = False  # save at each new lowest validation loss
    phase_transition_iterations: frozenset[int] = frozenset()  # save and stop at these iterations
    exit_minutes: float | None = None
    log_params_norm: bool = False
    pipeline_schedule: str | None = None  # name (schedules.pipeline); the default one if None
    batch_size_schedule: BatchSizeSchedule | None = None  # batch-size ramp-up; both sizes above are then the final ones
    iterations_to_skip: frozenset[int] = frozenset()  # skip the iteration that follows each of these
    log_noise: bool = False  # measure the gradient noise scale every `log_interval`
    skip_training: bool = False
    eval_start_iteration: int = 0  # no validation during training before this iteration
    # samples and micro-batches of one iteration of an evaluation; as of a step if None
    eval_batch_size: int | None = None
    eval_micro_batches: int | None = None
    datasheet_flops_per_s: float | None = None  # peak according to the datasheet; None if the device is unknown

    @property
    def eval_samples(self) -> int:
        """Number of samples of one iteration of an evaluation."""
        return self.eval_batch_size or self.global_batch_size

    def micro_batches_after(self, consumed: int) -> int:
        """Return the number of micro-batches of the step that follows `consumed` samples."""
        sizes = self.batch_size_schedule
        return self.num_micro_batches if sizes is None else sizes.num_micro_batches(consumed)

    def samples_of(self, num_micro_batches: int) -> int:
        """Return the number of samples of a step with this many micro-batches, over all replicas."""
        return num_micro_batches * (self.global_batch_size // self.num_micro_batches)

    def flops_of(self, num_samples: int) -> float:
        """Return the model FLOPs of this many samples on this device."""
        return self.flops_per_step * (num_samples / self.global_batch_size)


@dataclass
class TrainingRun:
    """Everything that the loop uses. `valid` and `test` are None where the split is empty."""

    loop_config: LoopConfig
    state: TrainState
    train: Iterator[MicroBatch]
    valid: Iterator[MicroBatch] | None = None
    test: Iterator[MicroBatch] | None = None
    saver: CheckpointSaver | None = None
    hook: Hook = field(default_factory=Hook)
    stop: StopSignals | NeverStop = field(default_factory=NeverStop)
    probe: Probe = no_probe
    started: float = field(default_factory=time.monotonic)
    exit_reason: ExitReason | None = None  # why the loop ended; None while it runs
    async_saver: AsyncSaver | None = None  # saves asynchronously, except the final save; None if disabled
    timers: Timers = field(default_factory=Timers)
    valid_sets: Sequence[EvaluationSet] = ()  # in place of `valid`: several sets, or one evaluated in full
    blend_dataset_names: Sequence[str] = ()  # of the training blend; empty without a blend
    # what to do about anomalous steps; the run stops at the first by default
    anomalies: AnomalyPolicy = None  # type: ignore[assignment]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        state, schedule = self.state, self.loop_config.pipeline_schedule
        self.anomalies = self.anomalies or AnomalyPolicy(state, schedule or default_schedule(len(state.chunks)))
        self.consensus = RankConsensus(
            self.stop,
            state.context,
            contributes=state.contributes_losses,
            async_saver=self.async_saver,
            is_out_of_time=lambda: _is_out_of_time(self),
        )

    @cached_property
    def take_step(self) -> TakeStep:
        """Calls `train_step` with the options of this run."""
        hooks: list[StepHook] = [ProbeHook(self.probe), *self.anomalies.hooks]
        if self.blend_dataset_names:
            hooks.append(BlendCount(self.state, self.blend_dataset_names))
        if self.async_saver is not None:
            hooks.append(BeforeUpdate(self.async_saver.wait_for_copies))
        schedule, sum_over_ranks = self.loop_config.pipeline_schedule, self.consensus.sum_over_ranks
        step = partial(train_step, self.state, pipeline_schedule=schedule, sum_over_ranks=sum_over_ranks)
        return partial(step, hooks=hooks, timers=self.timers)

    def close(self) -> None:
        """Cancel pending asynchronous saves. Safe to call after success or failure."""
        if self.async_saver is not None:
            self.async_saver.close()


def train(run: TrainingRun) -> Iterator[StepResult]:
    """Run the remaining iterations, then the final save and evaluations; yield after each step.

    When it stops early, the state is saved first. `run.exit_reason` is the reason in either case.

    Raises:
        BadStepError: anomalous loss or gradient and the policy is to stop.
    """
    config, state, window = run.loop_config, run.state, Window()
    run.consensus.sum_over_ranks(torch.zeros(0, device=state.context.device))  # of signals that came before
    unsaved, num_micro_batches = False, config.micro_batches_after(state.consumed_samples)
    run.exit_reason = run.exit_reason or (None if config.skip_training else _early_stop(run))
    final_iteration = 0 if config.skip_training else config.train_iterations
    ephemeral_interval = config.ephemeral_save_interval
    while not _should_stop(run) and state.iteration < final_iteration:
        if (new_number := config.micro_batches_after(state.consumed_samples)) != num_micro_batches:
            run.hook.on_batch_size_change(config.samples_of(num_micro_batches), config.samples_of(new_number))
            if unsaved:
                _save(run)
            unsaved, num_micro_batches = False, new_number
        if state.iteration in config.iterations_to_skip:
            _skip_iteration(run, num_micro_batches)
            unsaved = True
            continue
        result = _step(run)
        if result is None:
            break
        unsaved = True
        window.add(result)
        run.progress.add(result)
        run.hook.after_step(result)
        if state.iteration % config.log_interval == 0:
            steps = len(window.results)
            flops = config.flops_of(sum(result.num_samples for result in window.results)) / steps
            peaks = config.measured_peak_flops_per_s, config.datasheet_flops_per_s
            run.hook.after_window(window.close(config.train_iterations, flops, *peaks))
            if run.timers.level:
                _report_times(run, run.timers.take(), steps=steps)
        if run.consensus.save_failed or not run.consensus.save_in_progress:  # all ranks completed its current stage
            _advance_save(run)
        if state.iteration % config.eval_interval == 0 and state.iteration >= config.eval_start_iteration:
            _validate(run)
        at_best = config.keep_best and state.best.iteration == state.iteration
        if at_best or (config.save_interval and state.iteration % config.save_interval == 0):
            _save(run)
            unsaved = False
        elif ephemeral_interval and state.iteration % ephemeral_interval == 0 and state.iteration < final_iteration:
            _save(run, persistent=False)
        yield result
        run.exit_reason = run.exit_reason or _planned_exit(run)
    if run.exit_reason is None and not config.skip_training:
        run.hook.after_training(state.iteration)
    if unsaved:
        _save(run, final=True)
    _complete_save(run)
    if run.exit_reason is None:
        _final_evaluation(run)
    else:
        run.hook.on_exit(run.exit_reason)


def _step(run: TrainingRun) -> StepResult | None:
    """Take a step; None if a signal interrupted it, with the state as it was before.

    A Ctrl-C in a terminal also kills child processes, such as the compiler of `--compile`; the resulting exception is
    not a step failure and is treated as a stop request.
    """
    config, state = run.loop_config, run.state
    iteration, rng_state = state.iteration, state.rng_streams.state()
    num_micro_batches = config.micro_batches_after(state.consumed_samples)
    logged = (iteration + 1) % config.log_interval == 0
    try:
        batches, small_result = run.train, None
        if config.log_noise and logged:
            batches, small_result = _small_batch_step(run, num_micro_batches)
        attempt = run.anomalies.begin(batches)
        result = run.take_step(attempt.batches, num_micro_batches, apply=attempt.apply)
        result = run.anomalies.resolve(attempt, result, run.take_step, run.hook.on_bad_step)
    except BadStepError:
        _complete_save(run)  # of an earlier step
        raise
    except Exception as error:
        state_intact = state.iteration == iteration and not state.updating and run.consensus.is_single_rank
        if isinstance(error, MegalithError) or not state_intact or not _should_stop(run):
            raise
        state.rng_streams.load_state(rng_state)
        return None
    if small_result is not None and not (small_result.anomaly or result.anomaly):
        (small, small_norm), (large, large_norm) = ((r.num_samples, r.grad_norm) for r in (small_result, result))
        if small_norm and large_norm:
            scale = state.noise.add(small, small_norm, large, large_norm)
            run.hook.after_noise(GradientNoise(result.iteration, small, large, small_norm, large_norm, scale))
    state.flops += config.flops_of(result.num_samples) * state.context.world.size
    if config.log_params_norm and logged:
        return replace(result, params_norm=state.optimizer.params_norm())
    return result


def _small_batch_step(run: TrainingRun, num_micro_batches: int) -> tuple[Iterator[MicroBatch], StepResult | None]:
    """Compute the gradient of the first micro-batches of a step, the fewest the pipeline schedule accepts.

    Returns:
        The micro-batches of the whole step, and the result for the first of them; None if these are all there are.
    """
    state = run.state
    min_micro_batches = state.context.pp.size if len(state.chunks) > 1 else 1
    if min_micro_batches >= num_micro_batches:
        return run.train, None
    before, ahead = state.snapshot(), list(islice(run.train, min_micro_batches))
    small_result = run.take_step(iter(ahead), min_micro_batches, apply=False)
    state.restore_snapshot(before)
    return chain(ahead, run.train), small_result


def _skip_iteration(run: TrainingRun, num_micro_batches: int) -> None:
    """Consume the samples of an iteration without training, logging, evaluating or saving (`--iterations-to-skip`)."""
    state = run.state
    field = state.model.tokens_field
    samples = sum(next(run.train)[field].shape[0] for _ in range(num_micro_batches)) * state.context.dp.size
    state.iteration += 1
    state.consumed_samples += samples
    state.skipped_samples += samples


def _should_stop(run: TrainingRun) -> bool:
    """Return whether to stop now; a signal takes precedence over the exits that the configuration requests."""
    if requested := run.consensus.requested:
        run.exit_reason = ExitReason("signal", run.state.iteration, requested)
    return run.exit_reason is not None


def _planned_exit(run: TrainingRun) -> ExitReason | None:
    """Return the exit that the configuration requests after this step, or None."""
    if (stop := _early_stop(run)) is not None:
        return stop
    config, iteration = run.loop_config, run.state.iteration
    if run.consensus.out_of_time:
        return ExitReason("duration", iteration, str(_elapsed_minutes(run)))
    at_exit_interval = config.exit_interval and iteration % config.exit_interval == 0
    if at_exit_interval or iteration in config.phase_transition_iterations:
        return ExitReason("interval", iteration)
    return None


def _early_stop(run: TrainingRun) -> ExitReason | None:
    """Return the exit after `--early-stopping-patience` evaluations without a new lowest validation loss, or None."""
    patience, best = run.loop_config.early_stopping_patience, run.state.best
    if patience is None or best.later < patience:
        return None
    lowest = f"the lowest validation loss is {best.loss:.6E}, of iteration {best.iteration}"
    return ExitReason("early stopping", run.state.iteration, f"{lowest}, {best.later} evaluations ago")


def _elapsed_minutes(run: TrainingRun) -> float:
    return (time.monotonic() - run.started) / 60.0


def _is_out_of_time(run: TrainingRun) -> bool:
    """Return whether `--exit-duration-in-mins` is over by the clock of this process."""
    return _elapsed_minutes(run) > (run.loop_config.exit_minutes or math.inf)


def _validate(run: TrainingRun) -> None:
    """Evaluate during training. The samples count as consumed even if a signal interrupts the evaluation."""
    if not (sets := _validation_sets(run)):
        return
    losses = list[float]()
    for eval_set in sets:
        if (evaluation := _evaluate(run, eval_set, final=False)) is None:
            break
        losses.append(evaluation.loss)
    if len(losses) == len(sets) and (run.loop_config.early_stopping_patience or run.loop_config.keep_best):
        run.state.best.add(run.state.iteration, losses)
    run.state.consumed_valid_samples += run.loop_config.eval_iterations * run.loop_config.eval_samples


def _validation_sets(run: TrainingRun) -> Sequence[EvaluationSet]:
    """Return the validation sets; those read in full have their own lengths, whatever `--eval-iters`."""
    sets = run.valid_sets
    if run.valid is not None:
        sets = (EvaluationSet("validation", run.valid, run.loop_config.eval_iterations),)
    return [eval_set for eval_set in sets if eval_set.iterations]


def _evaluate(run: TrainingRun, eval_set: EvaluationSet, *, final: bool) -> Evaluation | None:
    """Evaluate and notify the hooks; None if a signal or `--exit-duration-in-mins` interrupted it."""
    config = run.loop_config
    run.hook.before_evaluation(eval_set.name, eval_set.iterations * config.eval_samples, final=final)
    began = time.perf_counter()
    try:
        evaluation = evaluate(
            run.state,
            eval_set,
            config.eval_micro_batches or config.num_micro_batches,
            final=final,
            hook=run.hook,
            sum_over_ranks=run.consensus.sum_over_ranks,
            should_stop=lambda: run.consensus.requested is not None or run.consensus.out_of_time,
            probe=run.probe,
        )
    except Exception as error:
        if isinstance(error, MegalithError) or not run.consensus.is_single_rank or not run.consensus.requested:
            raise
        return None  # interrupted as a step can be, see `_step`
    if evaluation is not None:
        _report_times(run, {"evaluate": time.perf_counter() - began})
        run.hook.after_evaluation(evaluation)
    return evaluation


def _save(run: TrainingRun, *, persistent: bool = True, final: bool = False) -> None:
    if run.saver is None:
        return
    _complete_save(run)
    run.hook.before_save(run.state.iteration, persistent=persistent)
    began = time.perf_counter()
    if run.async_saver is not None and not final:
        run.hook.after_scheduling(run.async_saver.schedule(run.state, persistent=persistent))
    else:
        run.hook.after_save(run.saver.save(run.state, persistent=persistent))
    _report_times(run, {"save-checkpoint": time.perf_counter() - began})


def _report_times(run: TrainingRun, seconds: Mapping[str, float], *, steps: int = 1) -> None:
    """Report to the hooks the seconds of this and all other ranks by timer name, divided by `steps`."""
    times = gather_times(seconds, run.state.context, steps=steps)
    run.hook.after_timing(run.state.iteration, times)


def _complete_save(run: TrainingRun) -> None:
    """Wait for the asynchronous save, if any."""
    while run.async_saver is not None and run.async_saver.scheduled is not None:
        _advance_save(run)


def _advance_save(run: TrainingRun) -> None:
    """Advance the asynchronous save, if there is one, by a stage; raises if a rank could not do its part."""
    if run.async_saver is None or run.async_saver.scheduled is None:
        return
    saved = run.async_saver.advance(failed=run.consensus.save_failed)
    if saved is not None:
        run.hook.after_save(saved)


def _final_evaluation(run: TrainingRun) -> None:
    """Evaluate on the validation and test splits after the last iteration."""
    eval_iterations = run.loop_config.eval_iterations
    test = [EvaluationSet("test", run.test, eval_iterations)] if run.test is not None and eval_iterations else []
    for eval_set in (*_validation_sets(run), *test):
        if _evaluate(run, eval_set, final=True) is None:
            if not _should_stop(run):
                run.exit_reason = ExitReason("duration", run.state.iteration, str(_elapsed_minutes(run)))
            assert run.exit_reason is not None
            run.hook.on_exit(run.exit_reason)
            return
    run.exit_reason = ExitReason("finished", run.state.iteration)
