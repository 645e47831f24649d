"""Rules of the optimizers, the learning rate and weight decay."""

from __future__ import annotations

from megalith.config.rules.rule import Draft, Rule, exclusive, forbid, idle, idle_without, note, notice, rule, show
from megalith.config.run import RunConfig
from megalith.registry import Registered

COEFFICIENT_SETS = {"simple": 1, "quintic": 5, "polar_express": 8}
"""Iterations after which the coefficients of --muon-coefficient-type begin again."""

_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@rule
def matrices_are_seen_whole(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not draft.run.optimizer.updates_matrices:
        return ""
    cutting = parallel.sharding_setting
    if not cutting:
        return ""
    return (
        f"{show(draft, 'optimizer')} needs the whole gradient of a matrix, and {show(draft, cutting)} cuts it over "
        "the replicas; leave that out (each replica then updates all weights), or use --optimizer adam"
    )


@rule
def muon_has_each_key_head_once(draft: Draft) -> str:
    run = draft.run
    tensor = run.parallel.tensor_model_parallel_size
    groups = run.model.num_query_groups if run.model.group_query_attention else run.model.num_attention_heads
    if not run.optimizer.uses_muon or tensor <= groups or run.optimizer.muon_tp_mode == "blockwise":
        return ""
    shown = [show(draft, name) for name in ("optimizer", "num_query_groups", "tensor_model_parallel_size")]
    return (
        f"{shown[0]} with {shown[1]} and {shown[2]}: "
        f"ranks that share a key head would count it twice; use --tensor-model-parallel-size {groups} or less, or "
        "--muon-tp-mode blockwise"
    )


matrices_stay_on_the_device = forbid(
    lambda run: run.optimizer.updates_matrices and run.optimizer.optimizer_cpu_offload,
    "--optimizer-cpu-offload with {optimizer}: its products of matrices belong on the device; leave it out, or use "
    "--optimizer adam",
)


@rule
def muon_uses_all_coefficients(draft: Draft) -> str:
    config = draft.run.optimizer
    count = COEFFICIENT_SETS[config.muon_coefficient_type]
    if not config.uses_muon or config.muon_num_ns_steps % count == 0:
        return ""
    return (
        f"{show(draft, 'muon_num_ns_steps')} is not a multiple of the {count} coefficients of "
        f"{show(draft, 'muon_coefficient_type')}; use --muon-num-ns-steps {count}"
    )


@rule
def formats_are_asked_for(draft: Draft) -> str:
    config = draft.run.optimizer
    changed = [name for name in _FORMATS if getattr(config, name) != "fp32"]
    if not changed:
        return ""
    if not config.use_precision_aware_optimizer:
        return f"{show(draft, changed[0])} requires --use-precision-aware-optimizer"
    if config.optimizer in ("adam", "lion") or (
        isinstance(config.optimizer, Registered) and not config.updates_matrices
    ):
        return ""
    return f"{show(draft, changed[0])} works with --optimizer adam and lion, not with {config.optimizer}"


@rule
def sharded_weights_are_master_weights(draft: Draft) -> str:
    if draft.run.optimizer.main_params_dtype == "fp32" or not draft.run.parallel.fully_shards:
        return ""
    return (
        f"{show(draft, 'main_params_dtype')} and {show(draft, draft.run.parallel.sharding_setting)} exclude each "
        "other: sharded weights are fp32; use --use-distributed-optimizer"
    )


master_weights_require_half_precision = forbid(
    lambda run: run.optimizer.main_params_dtype != "fp32" and not run.precision.fp16 and not run.precision.bf16,
    "{main_params_dtype}: fp32 parameters have no master weights; add --bf16 or --fp16",
)


@rule
def decoupled_rate_has_its_range(draft: Draft) -> str:
    config, schedule = draft.run.optimizer, draft.run.schedule
    if config.decoupled_lr is None:
        return ""
    lowest = schedule.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    if lowest > config.decoupled_lr:
        name = "min_lr" if config.decoupled_min_lr is None else "decoupled_min_lr"
        return (
            f"{show(draft, name)} is above {show(draft, 'decoupled_lr')}; use --decoupled-min-lr of at most "
            f"{config.decoupled_lr:g}"
        )
    if schedule.lr_warmup_init > config.decoupled_lr:
        return (
            f"{show(draft, 'lr_warmup_init')} is above {show(draft, 'decoupled_lr')}; use --lr-warmup-init of at most "
            f"{config.decoupled_lr:g}"
        )
    return ""


every_replica_updates_all = note(
    lambda run: run.optimizer.optimizer == "dist_muon",
    "--optimizer dist_muon divides no work here: each data-parallel replica keeps and updates all states, as with "
    "--optimizer muon, which gives the same weights",
)
precision_awareness_without_formats = note(
    lambda run: run.optimizer.use_precision_aware_optimizer and not run.optimizer.stores_low_precision,
    "--use-precision-aware-optimizer has no effect alone: all dtypes are fp32; add --exp-avg-dtype bf16, "
    "--exp-avg-sq-dtype bf16, --main-grads-dtype bf16 or --main-params-dtype fp16",
)


def _read_by(optimizers: tuple[str, ...], *names: str) -> list[Rule]:
    """Make notices for settings that only some optimizers read."""

    def used(run: RunConfig) -> bool:
        config = run.optimizer
        return config.optimizer in optimizers or config.elementwise_optimizer in optimizers

    return idle(names, used, lambda draft: f" with {show(draft, 'optimizer')}")


optimizer_settings_are_read = (
    *idle_without("optimizer_cpu_offload", "optimizer_offload_fraction"),
    *idle_without("decoupled_lr", "decoupled_min_lr"),
    *_read_by(("adam", "soap"), "adam_beta1", "adam_beta2", "adam_eps"),
    *_read_by(("soap",), "soap_shampoo_beta", "soap_precondition_frequency"),
    *_read_by(("lion",), "lion_beta1", "lion_beta2"),
    *_read_by(("sgd",), "sgd_momentum"),
    *_read_by(
        ("muon", "dist_muon", "adaptive_muon"),
        *("muon_momentum", "muon_nesterov", "muon_split_qkv", "muon_scale_mode", "muon_extra_scale_factor"),
        *("muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode", "muon_fp32_matmul_prec"),
        "muon_scalar_optimizer",
    ),
)


_BY_ITERS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


@rule
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


lowest_rate_is_not_above_the_peak = forbid(
    lambda run: run.schedule.min_lr > run.schedule.lr,
    "{min_lr} is above {lr}; use --min-lr of at most {run.schedule.lr:g}",
)
warm_up_rises = forbid(
    lambda run: run.schedule.lr_warmup_init > run.schedule.lr,
    "{lr_warmup_init} is above {lr}; use --lr-warmup-init of at most {run.schedule.lr:g}",
)


@rule
def one_length_of_the_warm_up(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.lr_warmup_fraction is None:
        return ""
    others = [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(schedule, name)]
    if not others:
        return ""
    return f"{show(draft, 'lr_warmup_fraction')} and {show(draft, others[0])} exclude each other; use one of them"


def _decay_length(draft: Draft) -> tuple[int, str, str] | None:
    """Return the length of the decay, its unit and where it comes from; None if the run has no single length."""
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


@rule
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


@rule
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


@notice
def warm_up_ends_before_the_final_decay(draft: Draft) -> str:
    decay, schedule = _decay_length(draft), draft.run.schedule
    if schedule.lr_decay_style != "WSD" or decay is None:
        return ""
    length, unit, _ = decay
    begin = length - (getattr(schedule, f"lr_wsd_decay_{unit}") or 0)
    end = (schedule.lr_warmup_fraction or 0.0) * length or getattr(schedule, f"lr_warmup_{unit}")
    if end <= begin:
        return ""
    return (
        f"{show(draft, f'lr_wsd_decay_{unit}')} begins after {begin} {unit}, and the warm-up ends after {end:g}: the "
        "learning rate falls there at once"
    )


one_source_of_the_schedule_on_resume = exclusive(
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
    "exclude each other: one takes the schedule from the flags, the other from the checkpoint; use one of them",
)


@rule
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


schedule_settings_are_read = (
    *idle(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda run: run.schedule.lr_decay_style == "WSD",
        lambda draft: " without --lr-decay-style WSD",
    ),
    *idle(
        ("min_lr",),
        lambda run: run.schedule.lr_decay_style != "constant",
        lambda draft: " with --lr-decay-style constant",
    ),
    *idle(
        ("lr_decay_iters", "lr_decay_samples"),
        lambda run: run.schedule.lr_decay_style != "constant" or run.schedule.lr_warmup_fraction,
        lambda draft: " with --lr-decay-style constant",
    ),
    *idle(
        ("lr_warmup_init",),
        lambda run: run.schedule.lr_warmup_iters or run.schedule.lr_warmup_samples or run.schedule.lr_warmup_fraction,
        lambda draft: ": there is no warm-up",
    ),
    *idle(
        ("weight_decay",),
        lambda run: run.optimizer.weight_decay_incr_style == "constant",
        lambda draft: f": {show(draft, 'start_weight_decay')} and {show(draft, 'end_weight_decay')} count",
    ),
)
