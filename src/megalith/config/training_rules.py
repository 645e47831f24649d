"""Rules of the training itself: number formats, batch and length."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.layout_rules import MODEL_PARALLEL
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show


@rule("fp16", "bf16")
def one_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    return "--fp16 and --bf16 exclude each other; use one of them" if precision.fp16 and precision.bf16 else ""


@rule("initial_loss_scale", "min_loss_scale")
def loss_scale_starts_above_its_minimum(draft: Draft) -> str:
    precision = draft.run.precision
    if precision.min_loss_scale <= precision.initial_loss_scale:
        return ""
    return (
        f"{show(draft, 'min_loss_scale')} is above {show(draft, 'initial_loss_scale')}; "
        f"use --min-loss-scale of at most {precision.initial_loss_scale:g}"
    )


def _replicas(draft: Draft) -> int:
    return max(1, draft.run.data_parallel_size)


@rule("global_batch_size", "micro_batch_size", "world_size", *MODEL_PARALLEL)
def micro_batches_fill_the_global_batch(draft: Draft) -> str:
    train, replicas = draft.run.train, _replicas(draft)
    unit = train.micro_batch_size * replicas
    if train.global_batch_size is None or train.global_batch_size % unit == 0:
        return ""
    times = f" times data-parallel size {replicas}" if replicas > 1 else ""
    smaller = divisors(train.global_batch_size // replicas, train.micro_batch_size)
    alternative = f", or use --micro-batch-size {smaller}" if train.global_batch_size % replicas == 0 else ""
    return (
        f"{show(draft, 'global_batch_size')} is not divisible by {show(draft, 'micro_batch_size')}{times}; "
        f"nearest: {multiples(train.global_batch_size, unit)}{alternative}"
    )


@rule("train_iters", "train_samples")
def one_length_of_the_run(draft: Draft) -> str:
    train = draft.run.train
    if train.train_iters is None and train.train_samples is None:
        return "the length of the run is required: --train-iters N or --train-samples N"
    if train.train_iters is not None and train.train_samples is not None:
        return f"{show(draft, 'train_iters')} and {show(draft, 'train_samples')} exclude each other; use one of them"
    return ""


@rule("train_samples", "global_batch_size", "micro_batch_size", "world_size", *MODEL_PARALLEL)
def samples_make_at_least_one_step(draft: Draft) -> str:
    train = draft.run.train
    batch = train.global_batch_size or train.micro_batch_size * _replicas(draft)
    if train.train_samples is None or train.train_samples >= batch:
        return ""
    return f"{show(draft, 'train_samples')} is less than one global batch of {batch}; use at least {batch}"


@rule("loss_scale", "fp16", "bf16")
def loss_scale_without_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    if precision.loss_scale is None or precision.fp16 or precision.bf16:
        return ""
    return f"{show(draft, 'loss_scale')} has no effect: the loss is scaled only under --fp16 or --bf16"


TRAINING_RULES: tuple[Rule, ...] = (
    one_half_precision,
    loss_scale_starts_above_its_minimum,
    micro_batches_fill_the_global_batch,
    one_length_of_the_run,
    samples_make_at_least_one_step,
)

TRAINING_NOTICES: tuple[Rule, ...] = (
    loss_scale_without_half_precision,
    *(
        idle_without(name, "fp16", "the loss scale moves only under --fp16")
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    ),
    idle_without("tensorboard_log_interval", "tensorboard_dir", "--tensorboard-dir is not given"),
)
