"""Rules of the learning rate and of weight decay over the run."""

from __future__ import annotations

from megalith.config.rule import Draft, Rule, rule, show

_BY_ITERS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


@rule("train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def schedule_counts_as_the_run_does(draft: Draft) -> str:
    train, schedule = draft.run.train, draft.run.schedule
    if (train.train_iters is None) == (train.train_samples is None):
        return ""
    by_iters = train.train_iters is not None
    wrong, right = (_BY_SAMPLES, "iters") if by_iters else (_BY_ITERS, "samples")
    shown = [show(draft, name) for name in wrong if getattr(schedule, name)]
    if not shown:
        return ""
    length = "train_iters" if by_iters else "train_samples"
    return f"{', '.join(shown)}: the run is counted by {show(draft, length)}; use the -{right} flags of the schedule"


@rule("min_lr", "lr")
def lowest_rate_is_not_above_the_peak(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.min_lr <= schedule.lr:
        return ""
    return f"{show(draft, 'min_lr')} is above {show(draft, 'lr')}; use --min-lr of at most {schedule.lr:g}"


@rule("lr_warmup_init", "lr")
def warm_up_rises(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.lr_warmup_init <= schedule.lr:
        return ""
    return (
        f"{show(draft, 'lr_warmup_init')} is above {show(draft, 'lr')}; use --lr-warmup-init of at most {schedule.lr:g}"
    )


@rule("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
def one_length_of_the_warm_up(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.lr_warmup_fraction is None:
        return ""
    others = [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(schedule, name)]
    if not others:
        return ""
    return f"{show(draft, 'lr_warmup_fraction')} and {show(draft, others[0])} exclude each other; use one of them"


def _decay_length(draft: Draft) -> tuple[int, str, str] | None:
    """Length of the decay, its unit and where it comes from; None when the run has no single length."""
    train, schedule = draft.run.train, draft.run.schedule
    if (train.train_iters is None) == (train.train_samples is None):
        return None
    unit = "iters" if train.train_iters is not None else "samples"
    for name, value in (
        (f"lr_decay_{unit}", getattr(schedule, f"lr_decay_{unit}")),
        (f"train_{unit}", getattr(train, f"train_{unit}")),
    ):
        if value is not None:
            return value, unit, show(draft, name)
    return None


@rule("train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def warm_up_ends_before_the_decay_does(draft: Draft) -> str:
    decay = _decay_length(draft)
    if decay is None:
        return ""
    length, unit, source = decay
    if getattr(draft.run.schedule, f"lr_warmup_{unit}") < length:
        return ""
    return (
        f"{show(draft, f'lr_warmup_{unit}')} is not below the length of the decay, {length} {unit} ({source}); "
        f"use at most {length - 1}, or a longer --lr-decay-{unit}"
    )


@rule("lr_decay_style", "train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def wsd_has_a_final_decay(draft: Draft) -> str:
    decay = _decay_length(draft)
    if draft.run.schedule.lr_decay_style != "WSD" or decay is None:
        return ""
    length, unit, source = decay
    final = getattr(draft.run.schedule, f"lr_wsd_decay_{unit}")
    if final is None:
        return f"--lr-decay-style WSD requires --lr-wsd-decay-{unit}, the length of the final decay (at most {length})"
    if final > length:
        return f"{show(draft, f'lr_wsd_decay_{unit}')} is longer than the schedule, {source}; use at most {length}"
    return ""


@rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
def one_source_of_the_schedule_on_resume(draft: Draft) -> str:
    schedule = draft.run.schedule
    if not (schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler):
        return ""
    return (
        "--override-opt-param-scheduler (take the flags) and --use-checkpoint-opt-param-scheduler "
        "(take the checkpoint) exclude each other; use one of them"
    )


@rule("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
def growing_weight_decay_has_two_ends(draft: Draft) -> str:
    optimizer = draft.run.optimizer
    ends = (optimizer.start_weight_decay, optimizer.end_weight_decay)
    style = show(draft, "weight_decay_incr_style")
    if optimizer.weight_decay_incr_style == "constant":
        given = [name for name in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, name) is not None]
        if not given:
            return ""
        shown = ", ".join(show(draft, name) for name in given)
        return f"{shown} with {style}: use --weight-decay-incr-style linear or cosine, or --weight-decay alone"
    if None in ends:
        return f"{style} requires both --start-weight-decay and --end-weight-decay"
    if ends[0] is not None and ends[1] is not None and ends[0] > ends[1]:
        return f"{show(draft, 'start_weight_decay')} is above {show(draft, 'end_weight_decay')}; exchange them"
    return ""


@rule("lr_decay_style")
def wsd_settings_without_wsd(draft: Draft) -> str:
    names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    shown = [show(draft, name) for name in names if name in draft.given]
    if draft.run.schedule.lr_decay_style == "WSD" or not shown:
        return ""
    return f"{', '.join(shown)}: no effect without --lr-decay-style WSD"


SCHEDULE_RULES: tuple[Rule, ...] = (
    schedule_counts_as_the_run_does,
    lowest_rate_is_not_above_the_peak,
    warm_up_rises,
    one_length_of_the_warm_up,
    warm_up_ends_before_the_decay_does,
    wsd_has_a_final_decay,
    one_source_of_the_schedule_on_resume,
    growing_weight_decay_has_two_ends,
)

SCHEDULE_NOTICES: tuple[Rule, ...] = (wsd_settings_without_wsd,)
