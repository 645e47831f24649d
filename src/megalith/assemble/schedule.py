"""Schedules in samples from the settings of learning rate and weight decay, in iterations or samples."""

from __future__ import annotations

from dataclasses import replace

from megalith.config import RunConfig, check_groups
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule


def build_schedule(run: RunConfig) -> ParameterSchedule:
    """Build the schedules of learning rate and weight decay.

    Lengths in iterations are converted with the run's batch sizes, so that they end at the named iteration even if the
    batch size grows (which Megatron does not support).

    Raises:
        ConfigError: the lengths or rates contradict each other.
    """
    check_groups(run.schedule, run.optimizer, run.train, run.parallel, run.launch)
    settings, samples_of = run.schedule, run.batch_sizes.consumed_after
    if run.train.train_iters is not None:
        total = samples_of(run.train.train_iters)
        end = settings.lr_decay_iters or run.train.train_iters
        decay, last = samples_of(end), settings.lr_wsd_decay_iters
        wsd = None if last is None else decay - samples_of(max(0, end - last))
        warmup: float = samples_of(settings.lr_warmup_iters)
    else:
        total = run.train.train_samples or 0
        decay = settings.lr_decay_samples or total
        wsd = settings.lr_wsd_decay_samples
        warmup = settings.lr_warmup_samples
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * decay
    learning_rate = LearningRateSchedule(
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        decay_samples=decay,
        style=settings.lr_decay_style,
        warmup_samples=warmup,
        init_lr=settings.lr_warmup_init,
        wsd_samples=wsd,
        wsd_style=settings.lr_wsd_decay_style,
    )
    return ParameterSchedule(learning_rate, _weight_decay(run, total), _decoupled(run, learning_rate))


def _decoupled(run: RunConfig, base: LearningRateSchedule) -> LearningRateSchedule | None:
    """Return the learning rate of word embeddings and output layer; None if it is the common one."""
    peak, lowest = run.optimizer.decoupled_lr, run.optimizer.decoupled_min_lr
    return None if peak is None else replace(base, max_lr=peak, min_lr=base.min_lr if lowest is None else lowest)


def _weight_decay(run: RunConfig, total: int) -> WeightDecaySchedule:
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return WeightDecaySchedule(optimizer.weight_decay, optimizer.weight_decay, total)
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    return WeightDecaySchedule(start, end, total, optimizer.weight_decay_incr_style)
