"""The settings of a training run: number formats, lengths, optimizer and schedules."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

_WORK_TRAINING = "the complete training options"


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and the loss scale."""

    fp16: bool = setting(False, help="fp16 weights and activations with a loss scale")
    bf16: bool = setting(False, help="bf16 weights and activations")
    loss_scale: float | None = setting(None, help="fixed loss scale; dynamic under --fp16 unless given", above=0)
    initial_loss_scale: float = setting(2**32, help="first dynamic loss scale", above=0)
    min_loss_scale: float = setting(1.0, help="smallest dynamic loss scale", above=0)
    loss_scale_window: float = setting(1000, help="clean steps before the loss scale doubles", unit="steps", at_least=1)
    hysteresis: int = setting(2, help="overflows before the loss scale halves", at_least=1)
    accumulate_allreduce_grads_in_fp32: bool = setting(False, help="gradients in fp32 (always so with --bf16)")
    check_for_nan_in_loss_and_grad: bool = setting(
        True, help="stop when loss or gradients are not finite (not under a dynamic loss scale, which skips the step)"
    )

    @property
    def params_dtype(self) -> str:
        """Name of the dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves: fp16 without a fixed one."""
        return self.fp16 and self.loss_scale is None

    @property
    def grads_in_fp32(self) -> bool:
        """Whether gradients accumulate in fp32."""
        return not self.fp16 or self.accumulate_allreduce_grads_in_fp32

    @property
    def stop_on_nan(self) -> bool:
        """Whether a loss or gradient that is not finite stops the run."""
        return self.check_for_nan_in_loss_and_grad and not self.dynamic_loss_scale


@dataclass(frozen=True)
class TrainConfig:
    """Batch sizes, length, evaluation and ending of a run."""

    micro_batch_size: int = setting(help="samples of one forward pass of one process", unit="samples", at_least=1)
    global_batch_size: int | None = setting(
        None, help="samples of one step; micro-batch size x data-parallel size unless given", unit="samples", at_least=1
    )
    train_iters: int | None = setting(None, help="length of the run", unit="iterations", at_least=1)
    train_samples: int | None = setting(
        None, help="length of the run, instead of --train-iters", unit="samples", at_least=1
    )
    seed: int = setting(1234, help="seed of weights, dropout and data order", at_least=1)
    eval_interval: int = setting(1000, help="iterations between evaluations", unit="iterations", at_least=1)
    eval_iters: int = setting(100, help="global batches of one evaluation", unit="iterations", at_least=0)
    exit_interval: int | None = setting(
        None, help="save and stop when the iteration is a multiple of this", unit="iterations", at_least=1
    )
    exit_duration_in_mins: int | None = setting(None, help="save and stop after this time", unit="minutes", at_least=1)
    exit_signal_handler: bool = setting(
        False, help="save and stop on a signal", nothing="signals are always answered by finishing the step and saving"
    )
    device: str = setting(
        "auto", help="where to compute: auto takes CUDA where there is one", choices=("auto", "cpu", "cuda"), ours=True
    )
    compile: bool = setting(
        False, help="compile each block with torch.compile (on a CPU this needs a C++ compiler)", ours=True
    )
    recompute_granularity: str | None = setting(
        None,
        help="what is computed again in the backward pass instead of kept for it: whole layers, or parts of all "
        "layers (--recompute-modules)",
        choices=("full", "selective"),
        shorthands={"--recompute-activations": "selective"},
    )
    recompute_method: str | None = setting(
        None,
        help="which layers of a (virtual) stage --recompute-granularity full means: all, in groups of "
        "--recompute-num-layers that are recomputed as one, or the first --recompute-num-layers, one by one",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = setting(
        None, help="layers of a group (uniform) or from the first on (block)", unit="layers", at_least=1
    )
    recompute_modules: tuple[str, ...] = setting(
        (),
        help="parts of all layers that --recompute-granularity selective means: the scores of unfused attention "
        "(core_attn, where nothing is given), the feed-forward layers (mlp), the outputs of norms (layernorm)",
        choices=("core_attn", "layernorm", "mlp"),
        later=("moe_act", "moe", "shared_experts", "mla_up_proj"),
        later_with="the work on more models",
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


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, weight decay and clipping."""

    optimizer: str = setting(
        "adam",
        help="optimizer: adam is AdamW, with decoupled weight decay",
        choices=("adam",),
        later=("sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
        later_with=_WORK_TRAINING,
    )
    weight_decay: float = setting(0.01, help="weight decay of matrices and embeddings", at_least=0)
    start_weight_decay: float | None = setting(None, help="first weight decay of a growing one", at_least=0)
    end_weight_decay: float | None = setting(None, help="last weight decay of a growing one", at_least=0)
    weight_decay_incr_style: str = setting(
        "constant", help="how the weight decay grows", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = setting(0.9, help="decay of the first moment", at_least=0, below=1)
    adam_beta2: float = setting(0.999, help="decay of the second moment", at_least=0, below=1)
    adam_eps: float = setting(1e-8, help="epsilon of Adam", above=0)
    clip_grad: float = setting(1.0, help="largest global gradient norm, 0 for no clipping", at_least=0)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run. Lengths in iterations or, in runs by samples, in samples."""

    lr: float = setting(help="peak learning rate", at_least=0)
    min_lr: float = setting(0.0, help="lowest learning rate after the decay", at_least=0)
    lr_decay_style: str = setting(
        "linear",
        help="shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = setting(
        None, help="length of the decay; the run unless given", unit="iterations", at_least=1
    )
    lr_decay_samples: int | None = setting(
        None, help="length of the decay in runs by samples", unit="samples", at_least=1
    )
    lr_warmup_fraction: float | None = setting(None, help="warm-up as a part of the decay length", at_least=0, below=1)
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
        False, help="on resume take the schedule from the flags", aliases=("--override-opt_param-scheduler",)
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, help="on resume take the schedule from the checkpoint", aliases=("--use-checkpoint-opt_param-scheduler",)
    )
