"""From the settings of the learning rate and weight decay, in iterations or samples, to schedules in samples."""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.schedules.learning_rate import LearningRateSchedule
from megalith.schedules.parameters import ParameterSchedule
from megalith.schedules.weight_decay import WeightDecaySchedule


def build_schedule(run: RunConfig) -> ParameterSchedule:
    """The schedule that the flags ask for.

    Raises:
        ConfigError: the lengths or rates contradict each other.
    """
    settings, batch = run.schedule, run.global_batch_size
    if run.train.train_iters is not None:
        total = run.train.train_iters * batch
        decay = (settings.lr_decay_iters or run.train.train_iters) * batch
        wsd = None if settings.lr_wsd_decay_iters is None else settings.lr_wsd_decay_iters * batch
        warmup: float = settings.lr_warmup_iters * batch
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
    return ParameterSchedule(learning_rate, _weight_decay(run, total))


def _weight_decay(run: RunConfig, total: int) -> WeightDecaySchedule:
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return WeightDecaySchedule(optimizer.weight_decay, optimizer.weight_decay, total)
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    return WeightDecaySchedule(start, end, total, optimizer.weight_decay_incr_style)
