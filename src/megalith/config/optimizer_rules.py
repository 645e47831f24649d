"""Rules of the optimizers: what Muon and SOAP can work on, number formats of the states, rates of single groups."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.layout_choices import MODEL_PARALLEL, SHARDING
from megalith.config.rule import Draft, Rule, rule, show
from megalith.config.run import all_settings

COEFFICIENT_SETS = {"simple": 1, "quintic": 5, "polar_express": 8}
"""Iterations after which the coefficients of --muon-coefficient-type begin again."""

_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@rule("optimizer", *SHARDING)
def matrices_are_seen_whole(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not draft.run.optimizer.sees_matrices:
        return ""
    cutting = parallel.dividing_setting
    if not cutting:
        return ""
    return (
        f"{show(draft, 'optimizer')} needs the whole gradient of a matrix, and {show(draft, cutting)} cuts it over "
        "the replicas; leave that out (each replica then updates all weights), or use --optimizer adam"
    )


@rule("optimizer", "num_query_groups", "group_query_attention", "num_attention_heads", *MODEL_PARALLEL)
def muon_has_each_key_head_once(draft: Draft) -> str:
    run = draft.run
    tensor = run.parallel.tensor_model_parallel_size
    groups = run.model.num_query_groups if run.model.group_query_attention else run.model.num_attention_heads
    if not run.optimizer.orthogonalises or tensor <= groups or run.optimizer.muon_tp_mode == "blockwise":
        return ""
    shown = [show(draft, name) for name in ("optimizer", "num_query_groups", "tensor_model_parallel_size")]
    return (
        f"{shown[0]} with {shown[1]} and {shown[2]}: "
        f"ranks that share a key head would count it twice; use --tensor-model-parallel-size {groups} or less, or "
        "--muon-tp-mode blockwise"
    )


@rule("optimizer", "optimizer_cpu_offload")
def matrices_stay_on_the_device(draft: Draft) -> str:
    optimizer = draft.run.optimizer
    if not optimizer.sees_matrices or not optimizer.optimizer_cpu_offload:
        return ""
    return (
        f"--optimizer-cpu-offload with {show(draft, 'optimizer')}: its products of matrices belong on the device; "
        "leave it out, or use --optimizer adam"
    )


@rule("optimizer", "muon_coefficient_type", "muon_num_ns_steps")
def muon_uses_all_coefficients(draft: Draft) -> str:
    config = draft.run.optimizer
    count = COEFFICIENT_SETS[config.muon_coefficient_type]
    if not config.orthogonalises or config.muon_num_ns_steps % count == 0:
        return ""
    return (
        f"{show(draft, 'muon_num_ns_steps')} is no multiple of the {count} coefficients of "
        f"{show(draft, 'muon_coefficient_type')}; use --muon-num-ns-steps {count}"
    )


@rule("use_precision_aware_optimizer", "optimizer", *_FORMATS)
def formats_are_asked_for(draft: Draft) -> str:
    config = draft.run.optimizer
    changed = [name for name in _FORMATS if getattr(config, name) != "fp32"]
    if not changed:
        return ""
    if not config.use_precision_aware_optimizer:
        return f"{show(draft, changed[0])} requires --use-precision-aware-optimizer"
    if config.optimizer in ("adam", "lion"):
        return ""
    return f"{show(draft, changed[0])} works with --optimizer adam and lion, not with {config.optimizer}"


@rule("main_params_dtype", *SHARDING)
def sharded_weights_are_the_main_parameters(draft: Draft) -> str:
    if draft.run.optimizer.main_params_dtype == "fp32" or not draft.run.parallel.divides_weights:
        return ""
    return (
        f"{show(draft, 'main_params_dtype')} and {show(draft, draft.run.parallel.dividing_setting)} exclude each "
        "other: sharded weights are fp32; use --use-distributed-optimizer"
    )


@rule("main_params_dtype", "fp16", "bf16")
def main_parameters_beside_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    if draft.run.optimizer.main_params_dtype == "fp32" or precision.fp16 or precision.bf16:
        return ""
    return f"{show(draft, 'main_params_dtype')}: in fp32 the weights are the main parameters; add --bf16 or --fp16"


@rule("ckpt_format", "optimizer", "apply_wd_to_qk_layernorm", "no_weight_decay_cond_type")
def per_rank_files_hold_adam(draft: Draft) -> str:
    config = draft.run.optimizer
    if draft.run.checkpoint.ckpt_format != "torch" or draft.run.checkpoint.save is None:
        return ""
    name = "optimizer" if config.optimizer != "adam" else "apply_wd_to_qk_layernorm"
    if config.optimizer == "adam" and not config.decays_qk_layernorm:
        return ""
    return (
        f"--ckpt-format torch is written for AdamW with its usual groups, not with {show(draft, name)}; use torch_dist"
    )


@rule("decoupled_lr", "decoupled_min_lr", "min_lr", "lr_warmup_init")
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


@rule("optimizer")
def every_replica_updates_all(draft: Draft) -> str:
    if draft.run.optimizer.optimizer != "dist_muon":
        return ""
    return (
        "--optimizer dist_muon divides no work here: each data-parallel replica keeps and updates all states, as with "
        "--optimizer muon, which gives the same weights"
    )


@rule("use_precision_aware_optimizer", *_FORMATS)
def precision_awareness_without_formats(draft: Draft) -> str:
    config = draft.run.optimizer
    if not config.use_precision_aware_optimizer or config.stores_rounded:
        return ""
    return (
        "--use-precision-aware-optimizer has no effect by itself: everything is stored in fp32; add "
        "--exp-avg-dtype bf16, --exp-avg-sq-dtype bf16, --main-grads-dtype bf16 or --main-params-dtype fp16"
    )


def _only_with(name: str, optimizers: tuple[str, ...]) -> Rule:
    """A notice for a setting of one optimizer that is given with another."""

    def check(draft: Draft) -> str:
        config = draft.run.optimizer
        used = (config.optimizer, config.muon_scalar_optimizer if config.orthogonalises else "")
        setting = all_settings()[name]
        default = getattr(config, name) == setting.default
        if name not in draft.given or default or any(optimizer in used for optimizer in optimizers):
            return ""
        return f"{show(draft, name)} has no effect with {show(draft, 'optimizer')}"

    return Rule(f"{name}_with_its_optimizer", (name, "optimizer", "muon_scalar_optimizer"), check)


OPTIMIZER_RULES: tuple[Rule, ...] = (
    matrices_stay_on_the_device,
    matrices_are_seen_whole,
    muon_has_each_key_head_once,
    muon_uses_all_coefficients,
    formats_are_asked_for,
    sharded_weights_are_the_main_parameters,
    main_parameters_beside_half_precision,
    per_rank_files_hold_adam,
    decoupled_rate_has_its_range,
)

OPTIMIZER_NOTICES: tuple[Rule, ...] = (
    idle_without("optimizer_offload_fraction", "optimizer_cpu_offload", "--optimizer-cpu-offload is not given"),
    every_replica_updates_all,
    precision_awareness_without_formats,
    idle_without("decoupled_min_lr", "decoupled_lr", "--decoupled-lr is not given"),
    *(_only_with(name, ("adam", "soap")) for name in ("adam_beta1", "adam_beta2", "adam_eps")),
    *(_only_with(name, ("soap",)) for name in ("soap_shampoo_beta", "soap_precondition_frequency")),
    *(_only_with(name, ("lion",)) for name in ("lion_beta1", "lion_beta2")),
    _only_with("sgd_momentum", ("sgd",)),
    *(
        _only_with(name, ("muon", "dist_muon", "adaptive_muon"))
        for name in (
            "muon_momentum",
            "muon_nesterov",
            "muon_split_qkv",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_coefficient_type",
            "muon_num_ns_steps",
            "muon_tp_mode",
            "muon_fp32_matmul_prec",
            "muon_scalar_optimizer",
        )
    ),
)
