"""The settings of a training run: precision, lengths, optimizer and schedules."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting
from megalith.config.values import DEVICES
from megalith.registry import Registered

_LEAST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126  # a loss scale and its inverse are normal fp32 numbers


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision of weights, activations and gradients, and the loss scale."""

    fp16: bool = setting(False, help="fp16 weights and activations with loss scaling")
    bf16: bool = setting(False, help="bf16 weights and activations")
    loss_scale: float | None = setting(
        None, help="static loss scale; dynamic with --fp16 by default", at_least=_LEAST_SCALE, at_most=_LARGEST_SCALE
    )
    initial_loss_scale: float = setting(
        2**32, help="initial dynamic loss scale", at_least=_LEAST_SCALE, at_most=_LARGEST_SCALE
    )
    min_loss_scale: float = setting(
        1.0, help="minimum dynamic loss scale", aliases=("--min-scale",), at_least=_LEAST_SCALE, at_most=_LARGEST_SCALE
    )
    loss_scale_window: float = setting(
        1000, help="steps without overflow before the loss scale doubles", unit="steps", at_least=1
    )
    hysteresis: int = setting(2, help="overflows before the loss scale halves", at_least=1)
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, help="accumulate and reduce gradients in fp32 (always so with --bf16)", aliases=("--fp32-allreduce",)
    )
    grad_reduce_in_bf16: bool = setting(
        False, help="with --bf16: accumulate and reduce gradients in bf16 instead of fp32"
    )
    megatron_fsdp_main_grads_dtype: str = setting(
        "auto",
        help="with --use-megatron-fsdp and --grad-reduce-in-bf16: fp32 keeps gradients in fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    megatron_fsdp_grad_comm_dtype: str = setting(
        "auto",
        help="dtype of gradient communication, which is that of the gradients",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        help="apply --nan-policy to non-finite losses and gradients (not with a dynamic loss scale, which skips the "
        "step)",
    )
    check_for_spiky_loss: bool = setting(
        False,
        help="apply --nan-policy to losses above 10 times the maximum of the last 100 steps, instead of only a warning",
    )
    check_for_large_grads: bool = setting(
        False, help="apply --nan-policy to gradient norms above 10 times the maximum of the last 100 steps"
    )
    nan_policy: str | None = setting(
        None,
        help="action on an anomalous step, after locating it: stop, skip the update, or rerun the step and stop if it "
        "fails again; rerun by default, stop unless --rerun-mode is validate_results",
        choices=("stop", "skip", "rerun"),
        ours=True,
    )
    rerun_mode: str = setting(
        "validate_results",
        help="validate_results is --nan-policy rerun; report_stats runs every step twice and counts differing losses",
        choices=("disabled", "validate_results", "report_stats"),
    )
    error_injection_rate: int = setting(
        0, help="inject an error into one of this many steps, to test --rerun-mode; 0 for none", at_least=0
    )
    error_injection_type: str = setting(
        "transient_error",
        help="injected error: a loss that is wrong once (transient), always wrong (persistent), or correct but "
        "reported as wrong",
        choices=("correct_result", "transient_error", "persistent_error"),
    )

    @property
    def params_dtype(self) -> str:
        """Name of the dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic: fp16 without a fixed one."""
        return self.fp16 and self.loss_scale is None

    @property
    def grads_in_fp32(self) -> bool:
        """Return whether gradients are accumulated in fp32."""
        if self.accumulate_allreduce_grads_in_fp32 or self.megatron_fsdp_main_grads_dtype == "fp32":
            return True
        return not (self.fp16 or (self.bf16 and self.grad_reduce_in_bf16))

    @property
    def bad_step_policy(self) -> str:
        """Return the action on an anomalous step: "stop", "skip" or "rerun"."""
        return self.nan_policy or ("rerun" if self.rerun_mode == "validate_results" else "stop")

    @property
    def stop_on_nan(self) -> bool:
        """Return whether a non-finite loss or gradient makes a step anomalous."""
        return self.check_for_nan_in_loss_and_grad and not self.dynamic_loss_scale


@dataclass(frozen=True)
class TrainConfig:
    """Batch sizes, length, evaluation and ending of a run."""

    micro_batch_size: int = setting(help="samples per forward pass of one process", unit="samples", at_least=1)
    global_batch_size: int | None = setting(
        None, help="samples per step; micro-batch size x data-parallel size by default", unit="samples", at_least=1
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (),
        help="START INCREMENT SAMPLES: increase the global batch size from START by INCREMENT to --global-batch-size "
        "over SAMPLES samples",
        unit="samples",
        at_least=1,
    )
    step_batch_size_schedule: str | None = setting(
        None,
        help="global batch sizes with thresholds in tokens, such as '0:768 250B:1536', instead of --global-batch-size",
    )
    decrease_batch_size_if_needed: bool = setting(
        False, help="round global batch sizes down to a multiple of micro-batch size x data-parallel size"
    )
    train_iters: int | None = setting(None, help="length of the run", unit="iterations", at_least=1)
    train_samples: int | None = setting(
        None, help="length of the run, instead of --train-iters", unit="samples", at_least=1
    )
    phase_transition_iterations: str | None = setting(
        None,
        help="iterations such as 1000,5000 at which phases end: the run saves and stops, and the next start continues "
        "with the data that it names, from its beginning",
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        help="iterations whose successor is skipped: its samples are consumed without training",
        at_least=0,
    )
    hooks: tuple[str, ...] = setting(
        (), help="registered hooks, each module:Class", flag="--hook", registers="hook", ours=True
    )
    seed: int = setting(1234, help="seed of weights, dropout and data order", at_least=1, at_most=2**32 - 1)
    eval_interval: int = setting(1000, help="iterations between evaluations", unit="iterations", at_least=1)
    eval_iters: int = setting(
        100, help="global batches per evaluation; 0 or -1 for no evaluation", unit="iterations", at_least=-1
    )
    start_eval_at_iter: int | None = setting(
        None, help="no evaluation before this iteration", unit="iterations", at_least=1
    )
    eval_global_batch_size: int | None = setting(
        None,
        help="samples per evaluation iteration; --global-batch-size by default",
        unit="samples",
        at_least=1,
    )
    eval_micro_batch_size: int | None = setting(
        None,
        help="samples per forward pass in an evaluation; --micro-batch-size by default",
        unit="samples",
        at_least=1,
    )
    early_stopping_patience: int | None = setting(
        None,
        help="save and stop after this many evaluations in a row without a new lowest validation loss",
        unit="evaluations",
        at_least=1,
        ours=True,
    )
    prove: str | None = setting(
        None,
        help="first: prove the configuration in miniature before the training starts, and stop if it does not hold",
        choices=("first",),
        ours=True,
    )
    skip_train: bool = setting(False, help="only evaluate the checkpoint of --load on validation and test data")
    exit_interval: int | None = setting(None, help="save and stop at multiples of this", unit="iterations", at_least=1)
    exit_duration_in_mins: int | None = setting(None, help="save and stop after this time", unit="minutes", at_least=1)
    exit_signal_handler: bool = setting(
        False, help="save and stop on a signal", nothing="signals are always answered by finishing the step and saving"
    )
    device: str = setting(
        "auto",
        help="device; auto is CUDA if there is a GPU, and an error if torch cannot use it, else another accelerator",
        choices=DEVICES,
        ours=True,
    )
    deterministic_mode: bool = setting(
        False, help="bitwise reproducible kernels on a GPU, slower; on a CPU runs are always reproducible"
    )
    compile: bool = setting(
        False, help="compile each block with torch.compile (needs a C++ compiler on a CPU, Triton on a GPU)", ours=True
    )
    recompute_granularity: str | None = setting(
        None,
        help="activation checkpointing: recompute whole layers (full), or --recompute-modules of all layers "
        "(selective), in the backward pass",
        choices=("full", "selective"),
        shorthands={"--recompute-activations": "selective"},
    )
    recompute_method: str | None = setting(
        None,
        help="with --recompute-granularity full: all layers of a (virtual) stage in groups of --recompute-num-layers "
        "(uniform), or its first --recompute-num-layers one by one (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = setting(
        None, help="layers per group (uniform), or number of first layers (block)", unit="layers", at_least=1
    )
    recompute_modules: tuple[str, ...] | None = setting(
        None,
        help="with --recompute-granularity selective: unfused attention scores (core_attn, the default), MLPs (mlp), "
        "MoE layers (moe), shared experts (shared_experts), activations of experts (moe_act), outputs of norms "
        "(layernorm), up-projections of MLA (mla_up_proj); none without a value",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"),
        may_be_empty=True,
    )
    moe_layer_recompute: bool = setting(
        False, help="older form of --recompute-granularity selective --recompute-modules moe"
    )
    manual_gc: bool = setting(
        False, help="collect garbage at fixed steps", nothing="the loop makes no reference cycles to collect"
    )
    manual_gc_interval: int = setting(
        0,
        help="steps between garbage collections",
        unit="steps",
        at_least=0,
        nothing="the loop makes no reference cycles to collect",
    )

    @property
    def eval_batches(self) -> int:
        """Global batches of one evaluation, 0 for none."""
        return max(0, self.eval_iters)

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """Return the parts of layers that are recomputed in the backward pass; empty if whole layers are."""
        if self.recompute_granularity == "full":
            return frozenset()
        experts = {"moe"} if self.moe_layer_recompute else set()
        chosen = self.recompute_granularity == "selective" or bool(experts)
        named = ("core_attn",) if self.recompute_modules is None else self.recompute_modules
        return frozenset({*named, *experts}) if chosen else frozenset()

    def ramp_reaches(self, final: int) -> bool:
        """Return whether --rampup-batch-size reaches this batch size in whole increments."""
        if len(self.rampup_batch_size) != 3:
            return False
        start, increment, _ = self.rampup_batch_size
        return start < final and (final - start) % increment == 0

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """Return the iterations at which phases end, in order; empty if they cannot be parsed."""
        words = (self.phase_transition_iterations or "").split(",")
        return tuple(sorted({int(word) for word in words if word.strip().isdecimal()}))

    def phase(self, iteration: int, last: int) -> tuple[int, int]:
        """Return start and end iteration of the phase that the next step belongs to."""
        ends = self.phase_ends
        start = max((end for end in ends if end <= iteration), default=0)
        return start, min((end for end in ends if end > iteration), default=last)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, weight decay and clipping."""

    optimizer: str = setting(
        "adam",
        help="optimizer: adam is AdamW; sgd has momentum; muon, adaptive_muon (AdaMuon) and soap (AdamW in the "
        "eigenbasis of Shampoo's preconditioners) update matrices in the layers, AdamW or --muon-scalar-optimizer "
        "the rest; dist_muon is equivalent to muon",
        choices=("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap"),
        registers="optimizer",
    )
    weight_decay: float = setting(0.01, help="weight decay of matrices and embeddings", at_least=0)
    start_weight_decay: float | None = setting(None, help="initial weight decay of an increasing schedule", at_least=0)
    end_weight_decay: float | None = setting(None, help="final weight decay of an increasing schedule", at_least=0)
    weight_decay_incr_style: str = setting(
        "constant", help="schedule of the weight decay", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = setting(0.9, help="decay of the first moment", at_least=0, below=1)
    adam_beta2: float = setting(0.999, help="decay of the second moment", at_least=0, below=1)
    adam_eps: float = setting(1e-8, help="epsilon of Adam", above=0)
    sgd_momentum: float = setting(0.9, help="momentum of --optimizer sgd", at_least=0, below=1)
    lion_beta1: float = setting(0.95, help="interpolation factor of Lion's update", at_least=0, below=1)
    lion_beta2: float = setting(0.98, help="decay of Lion's momentum", at_least=0, below=1)
    dump_param_to_param_group_map: str | None = setting(
        None, help="JSON file to which the parameter group of each weight is written"
    )
    clip_grad: float = setting(1.0, help="maximum global gradient norm; 0 for no clipping", at_least=0)
    decoupled_lr: float | None = setting(
        None, help="peak learning rate of word embeddings and output layer; --lr by default", at_least=0
    )
    decoupled_min_lr: float | None = setting(
        None, help="minimum of that learning rate; --min-lr by default", at_least=0
    )
    apply_wd_to_qk_layernorm: bool = setting(False, help="apply weight decay to query and key layer norms")
    no_weight_decay_cond_type: str | None = setting(
        None,
        help="same as --apply-wd-to-qk-layernorm",
        choices=("apply_wd_to_qk_layernorm", "qwen3_next"),
    )
    soap_shampoo_beta: float = setting(
        0.95, help="decay of the preconditioners of --optimizer soap", at_least=0, below=1, ours=True
    )
    soap_precondition_frequency: int = setting(
        1, help="steps between updates of the eigenbasis", unit="steps", at_least=1, ours=True
    )
    muon_momentum: float = setting(0.9, help="momentum of Muon", at_least=0, below=1)
    muon_nesterov: bool = setting(False, help="Nesterov momentum in Muon", aliases=("--muon-use-nesterov",))
    muon_split_qkv: bool = setting(
        True,
        help="treat the query, key and value parts of their projection as separate matrices in Muon",
        off=("--muon-no-split-qkv",),
    )
    muon_scale_mode: str = setting(
        "spectral",
        help="scale of Muon's updates: sqrt of the larger dimension, of rows / columns, or of max(1, rows / columns)",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = setting(1.0, help="additional factor of Muon's updates", above=0)
    muon_coefficient_type: str = setting(
        "quintic",
        help="coefficients of Muon's Newton-Schulz iterations",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_num_ns_steps: int = setting(5, help="Newton-Schulz iterations of Muon", at_least=1)
    muon_tp_mode: str = setting(
        "duplicated",
        help="with tensor parallelism: Muon orthogonalizes the whole matrix on every rank, or each rank its part "
        "(blockwise); distributed is equivalent to duplicated",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_fp32_matmul_prec: str = setting(
        "medium", help="precision of fp32 products in Muon on a GPU", choices=("low", "medium", "high")
    )
    muon_use_syrk: bool = setting(
        False, help="a kernel for symmetric products", nothing="torch multiplies these matrices"
    )
    muon_scalar_optimizer: str = setting(
        "adam", help="optimizer for parameters that Muon does not update", choices=("adam", "lion")
    )
    use_precision_aware_optimizer: bool = setting(
        False, help="store optimizer states, master weights or gradients in the dtypes of the next four flags"
    )
    main_grads_dtype: str = setting(
        "fp32", help="dtype of the gradients that the optimizer reads", choices=("fp32", "bf16")
    )
    main_params_dtype: str = setting(
        "fp32", help="dtype of master weights with --bf16 and --fp16", choices=("fp32", "fp16")
    )
    exp_avg_dtype: str = setting(
        "fp32",
        help="dtype of the first moment",
        choices=("fp32", "bf16"),
        later=("fp16", "fp8"),
        later_with="formats that need a scale per tensor",
    )
    exp_avg_sq_dtype: str = setting(
        "fp32",
        help="dtype of the second moment",
        choices=("fp32", "bf16"),
        later=("fp16", "fp8"),
        later_with="formats that need a scale per tensor",
    )

    optimizer_cpu_offload: bool = setting(
        False, help="keep moments and master weights in host memory and update there; no effect on a CPU"
    )
    optimizer_offload_fraction: float = setting(
        1.0, help="fraction of parameters with --optimizer-cpu-offload", at_least=0, at_most=1
    )

    @property
    def offloaded(self) -> float:
        """Part of the parameters whose optimizer state is on the host."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def uses_muon(self) -> bool:
        """Return whether matrices in the layers are updated by a variant of Muon."""
        return self.optimizer in ("muon", "dist_muon", "adaptive_muon")

    @property
    def updates_matrices(self) -> bool:
        """Return whether matrices in the layers are updated as a whole instead of element by element."""
        if isinstance(self.optimizer, Registered):
            return bool(self.optimizer.entry.options.get("unit") == "matrix")
        return self.uses_muon or self.optimizer == "soap"

    @property
    def elementwise_optimizer(self) -> str:
        """Return the optimizer for parameters that are updated element by element."""
        if self.uses_muon:
            return self.muon_scalar_optimizer
        return "adam" if self.updates_matrices else self.optimizer

    @property
    def decays_qk_layernorm(self) -> bool:
        """Return whether weight decay applies to query and key layer norms."""
        return self.apply_wd_to_qk_layernorm or self.no_weight_decay_cond_type is not None

    @property
    def stores_low_precision(self) -> bool:
        """Return whether optimizer states or master weights are stored in another dtype than updates use."""
        dtypes = (self.main_grads_dtype, self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype)
        return any(dtype != "fp32" for dtype in dtypes)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run. Lengths in iterations or, in runs by samples, in samples."""

    lr: float = setting(help="peak learning rate", at_least=0)
    min_lr: float = setting(0.0, help="minimum learning rate", at_least=0)
    lr_decay_style: str = setting(
        "linear",
        help="learning rate schedule",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        registers="schedule",
    )
    lr_decay_iters: int | None = setting(
        None, help="length of the decay; that of the run by default", unit="iterations", at_least=1
    )
    lr_decay_samples: int | None = setting(
        None, help="length of the decay in runs by samples", unit="samples", at_least=1
    )
    lr_warmup_fraction: float | None = setting(
        None, help="warm-up as a fraction of the decay length", at_least=0, below=1
    )
    lr_warmup_iters: int = setting(0, help="length of the warm-up", unit="iterations", at_least=0)
    lr_warmup_samples: int = setting(0, help="length of the warm-up in runs by samples", unit="samples", at_least=0)
    lr_warmup_init: float = setting(0.0, help="learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_style: str = setting(
        "exponential", help="shape of the final WSD decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = setting(None, help="length of the final WSD decay", unit="iterations", at_least=1)
    lr_wsd_decay_samples: int | None = setting(
        None, help="length of the final WSD decay in runs by samples", unit="samples", at_least=1
    )
    override_opt_param_scheduler: bool = setting(
        False,
        help="on resume, use the schedule of the flags",
        aliases=("--override-opt_param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        help="on resume, use the schedule of the checkpoint",
        aliases=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    )
