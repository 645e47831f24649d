"""The settings of a run in small frozen groups; each component receives its own group, not the tree.

Field names are Megatron's own names. Derived numbers are properties, computed and never written back. The groups check
nothing when they are constructed: `rules` does, over all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

_WORK_TRAINING = "the complete training options"
_WORK_CHECKPOINTS = "the work on checkpoint formats"
_WORK_DATA = "the complete data path"
_WORK_MODELS = "the work on more models"


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: enough to build a GPT as a library object."""

    num_layers: int = setting(help="number of transformer layers", unit="layers", at_least=1)
    hidden_size: int = setting(help="width of the model", at_least=1)
    num_attention_heads: int = setting(help="number of query heads", unit="heads", at_least=1)
    max_position_embeddings: int = setting(
        help="longest sequence, and rows of the learned position table", unit="tokens", at_least=1
    )
    group_query_attention: bool = setting(False, help="share each key and value head between several query heads")
    num_query_groups: int = setting(
        1, help="key and value heads under --group-query-attention", unit="heads", at_least=1
    )
    ffn_hidden_size: int | None = setting(
        None,
        help="width of the feed-forward layers; 4 x hidden, or int(8/3 x hidden / 64) x 64 with --swiglu",
        at_least=1,
    )
    kv_channels: int | None = setting(None, help="size of one head; hidden / heads unless given", at_least=1)
    position_embedding_type: str = setting(
        "learned_absolute",
        help="how positions enter the model",
        choices=("learned_absolute", "rope", "none"),
        shorthands={"--use-rotary-position-embeddings": "rope"},
        later=("yarn", "mrope", "relative"),
        later_with=_WORK_TRAINING,
    )
    add_position_embedding: bool = setting(
        True,
        help="table of positions; obsolete, with rotary positions only",
        off=("--no-position-embedding",),
        nothing="--position-embedding-type says whether there is a table of positions",
    )
    rotary_base: int = setting(10000, help="base of the rotary frequencies", at_least=1)
    rotary_percent: float = setting(1.0, help="part of each head that is rotated", above=0, at_most=1)
    rotary_interleaved: bool = setting(False, help="rotate neighbouring pairs instead of halves")
    use_rope_scaling: bool = setting(False, help="stretch slow rotary frequencies for long sequences as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, help="how far --use-rope-scaling stretches them", at_least=1)
    normalization: str = setting("LayerNorm", help="kind of normalisation", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(
        1e-5, help="epsilon of the normalisation", aliases=("--layernorm-epsilon",), above=0, below=1
    )
    swiglu: bool = setting(False, help="gated SiLU feed-forward layers instead of GELU")
    bias_gelu_fusion: bool = setting(
        True,
        help="GELU by its tanh approximation, as Megatron's fused kernel computes it; then it is the exact erf form",
        off=("--no-bias-gelu-fusion",),
    )
    add_bias_linear: bool = setting(True, help="biases in the linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, help="a bias on the query, key and value projection only")
    qk_layernorm: bool = setting(False, help="a norm of each query and key head, as in Qwen3")
    untie_embeddings_and_output_weights: bool = setting(False, help="an output layer of its own weights")
    hidden_dropout: float = setting(0.1, help="dropout of embeddings and residual branches", at_least=0, below=1)
    attention_dropout: float = setting(0.1, help="dropout of attention probabilities", at_least=0, below=1)
    attention_softmax_in_fp32: bool = setting(
        False, help="softmax of the unfused attention kernel in fp32 (the fused kernel always does so)"
    )
    init_method_std: float = setting(0.02, help="standard deviation of initial weights", at_least=0)
    use_cpu_initialization: bool = setting(False, help="draw the initial weights exactly as Megatron does on a CPU")
    make_vocab_size_divisible_by: int = setting(128, help="pad the vocabulary to a multiple of this", at_least=1)
    attention_backend: str = setting(
        "auto",
        help="attention kernel: torch SDPA (flash, fused) or step by step as Megatron's local kernel (unfused, local); "
        "auto is the latter under --transformer-impl local",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    transformer_impl: str = setting(
        "transformer_engine",
        help="whose arithmetic --attention-backend auto follows; there is one implementation of the layers",
        choices=("local", "transformer_engine"),
        later=("inference_optimized",),
        later_with="the serving work",
    )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layers by Megatron's rule."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def activation(self) -> str:
        """The activation of the feed-forward layers: swiglu, gelu_tanh or gelu_erf, by Megatron's rule."""
        if self.swiglu:
            return "swiglu"
        return "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu_erf"

    @property
    def fused_attention(self) -> bool:
        """Whether attention is torch SDPA instead of Megatron's local arithmetic step by step."""
        if self.attention_backend == "auto":
            return self.transformer_impl != "local"
        return self.attention_backend in ("flash", "fused")

    @property
    def rotary_size(self) -> int:
        """Rotated part of a head, 0 without rotary positions."""
        return int(self.head_size * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias


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
        help="what is computed again in the backward pass instead of kept for it: whole layers, or attention scores, "
        "which needs nothing here since fused attention stores none",
        choices=("full", "selective"),
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


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from and how they are cut into samples."""

    seq_length: int = setting(help="tokens of one sample", unit="tokens", at_least=1)
    data_path: tuple[str, ...] = setting((), help="prefix of a .bin/.idx pair, without the ending")
    split: str = setting("969, 30, 1", help="parts for training, validation and test")
    mock_data: bool = setting(False, help="made-up data, to try a configuration")
    data_cache_path: str | None = setting(None, help="folder of the index caches; beside the data unless given")
    num_workers: int = setting(2, help="threads that read data ahead; 0 reads between the steps", at_least=0)
    eod_mask_loss: bool = setting(False, help="no loss on end-of-document tokens")
    mmap_bin_files: bool = setting(True, help="read .bin files through a memory map")
    dataloader_type: str = setting(
        "single",
        help="order of the samples",
        choices=("single",),
        later=("cyclic", "external"),
        later_with=_WORK_DATA,
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: str = setting(
        "GPT2BPETokenizer",
        help="kind of tokenizer",
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
        later=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
            "ByteLevelTokenizer",
        ),
        later_with=_WORK_DATA,
    )
    vocab_file: str | None = setting(None, help="vocab.json of the GPT-2 tokenizer")
    merge_file: str | None = setting(None, help="merges.txt of the GPT-2 tokenizer")
    tokenizer_model: str | None = setting(None, help="folder of the HuggingFaceTokenizer, with its tokenizer.json")
    vocab_size: int | None = setting(None, help="number of ids of the NullTokenizer", unit="tokens", at_least=1)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The flags that this kind of tokenizer needs and that are not given."""
        if self.tokenizer_type == "NullTokenizer":
            return () if self.vocab_size else ("--vocab-size",)
        if self.tokenizer_type == "HuggingFaceTokenizer":
            return () if self.tokenizer_model else ("--tokenizer-model",)
        files = {"--vocab-file": self.vocab_file, "--merge-file": self.merge_file}
        return tuple(flag for flag, file in files.items() if not file)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, and what is taken from a checkpoint."""

    save: str | None = setting(None, help="folder that checkpoints are saved to")
    save_interval: int | None = setting(
        None,
        help="iterations between checkpoints",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        at_least=1,
    )
    load: str | None = setting(None, help="folder to resume from; a fresh start where it holds no checkpoint")
    ckpt_format: str = setting(
        "torch_dist",
        help="layout on disk",
        choices=("torch_dist", "torch"),
        later=("torch_dcp", "fsdp_dtensor", "zarr"),
        later_with=_WORK_CHECKPOINTS,
    )
    ckpt_convert_format: str | None = setting(
        None,
        help="write the checkpoint of --load in this format and the layout of the run, and exit",
        choices=("torch", "torch_dist"),
    )
    ckpt_convert_save: str | None = setting(
        None, help="with --ckpt-convert-format: folder to write it to; a folder of the format's name is made in it"
    )
    ckpt_step: int | None = setting(None, help="iteration to load instead of the latest", at_least=0)
    no_load_optim: bool = setting(False, help="start with a fresh optimizer state")
    no_load_rng: bool = setting(False, help="start with fresh random states")
    no_save_optim: bool = setting(False, help="leave the optimizer state out of checkpoints")
    no_save_rng: bool = setting(False, help="leave the random states out of checkpoints")
    async_save: bool = setting(
        False, help="write checkpoints while training goes on; it waits only until its state is copied in memory"
    )
    keep_last: int | None = setting(
        None, help="newest sound checkpoints to keep; older ones are deleted after a save", at_least=1, ours=True
    )
    save_retain_interval: int | None = setting(
        None,
        help="after a save delete the checkpoint before it unless its iteration is a multiple of this; with "
        "--keep-last: never delete these multiples",
        unit="iterations",
        at_least=1,
    )
    non_persistent_save_interval: int | None = setting(
        None, help="iterations between checkpoints of which only the last one is kept", unit="iterations", at_least=1
    )
    non_persistent_ckpt_type: str | None = setting(
        None,
        help="save checkpoints of which only the last one is kept, and resume from it where it is the newest",
        choices=("global", "local", "in_memory"),
    )
    non_persistent_global_ckpt_dir: str | None = setting(
        None, help="folder of those checkpoints; non_persistent in --save or --load by default"
    )
    finetune: bool = setting(False, help="take the weights only and start at iteration 0")
    exit_on_missing_checkpoint: bool = setting(False, help="stop when --load holds no checkpoint")
    pretrained_checkpoint: str | None = setting(
        None, help="folder whose weights to begin with where --load holds no checkpoint"
    )
    use_checkpoint_args: bool = setting(False, help="take the architecture and the tokenizer from the checkpoint")
    use_mp_args_from_checkpoint_args: bool = setting(
        False, help="with --use-checkpoint-args: take the tensor and pipeline sizes too"
    )
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        help="what to do about tensors of a checkpoint that the run does not ask for; what it lacks is always an error",
        choices=("assume_ok_unexpected", "log_unexpected", "raise_unexpected", "raise_all"),
    )
    accept_data_change: bool = setting(
        False, help="go on although the training data is not that of the checkpoint; it is said and recorded", ours=True
    )

    @property
    def save_folders(self) -> tuple[str, ...]:
        """All the folders that the run saves checkpoints to."""
        if self.save is None:
            return ()
        passing = self.passing_folder(self.save) if self.non_persistent_save_interval else None
        return (self.save,) if passing is None else (self.save, passing)

    def passing_folder(self, folder: str) -> str | None:
        """Where the checkpoints are of which only the last one is kept, beside those in a folder; None for none."""
        if self.non_persistent_ckpt_type is None:
            return None
        return self.non_persistent_global_ckpt_dir or f"{folder.rstrip('/')}/non_persistent"


@dataclass(frozen=True)
class LogConfig:
    """What is printed and recorded."""

    log_interval: int = setting(100, help="iterations between lines", unit="iterations", at_least=1)
    log_throughput: bool = setting(False, help="add TFLOP/s to the line")
    log_params_norm: bool = setting(False, help="add the norm of the parameters to the line")
    log_num_zeros_in_grad: bool = setting(False, help="add the number of zeros in the gradient to the line")
    log_straggler: bool = setting(False, help="report ranks that the others wait for, every --log-interval")
    straggler_minmax_count: int = setting(
        1, help="with --log-straggler: slowest and fastest ranks that are named", unit="ranks", at_least=1
    )
    tensorboard_dir: str | None = setting(None, help="folder of TensorBoard files")
    tensorboard_log_interval: int = setting(
        1, help="iterations between TensorBoard records", unit="iterations", at_least=1
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is divided over processes."""

    tensor_model_parallel_size: int = setting(1, help="processes that share each layer", at_least=1)
    pipeline_model_parallel_size: int = setting(1, help="processes that share the layers in turn", at_least=1)
    context_parallel_size: int = setting(1, help="processes that share each sequence", at_least=1)
    sequence_parallel: bool = setting(False, help="split norms and dropout over the tensor-parallel processes too")
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, help="layers of a virtual pipeline stage; each process then has several", unit="layers", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None, help="virtual pipeline stages of each process", at_least=1
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, help="layers of the first pipeline stage; the others share the rest", unit="layers", at_least=0
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, help="layers of the last pipeline stage; the others share the rest", unit="layers", at_least=0
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, help="the embedding counts as a layer when the layers are divided over the pipeline"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, help="the loss counts as a layer when the layers are divided over the pipeline"
    )
    pipeline_schedule: str = setting(
        "auto",
        help="order of the work of a pipeline; auto is interleaved with virtual stages, else 1f1b",
        choices=("auto", "1f1b", "interleaved", "zb-h1"),
        ours=True,
    )
    cp_comm_type: str = setting(
        "p2p",
        help="context parallelism by a ring (p2p) or by exchanging heads for sequence parts (a2a)",
        choices=("p2p", "a2a"),
        later=("allgather", "a2a+p2p"),
        later_with=_WORK_TRAINING,
    )
    use_distributed_optimizer: bool = setting(
        False, help="each data-parallel process keeps a part of the optimizer state (ZeRO-1)"
    )
    use_torch_fsdp2: bool = setting(
        False, help="each data-parallel process keeps a part of weights, gradients and optimizer state (ZeRO-3)"
    )
    torch_fsdp2_reshard_after_forward: bool = setting(
        True,
        help="under --use-torch-fsdp2 let gathered weights go behind each pass of a layer (off: ZeRO-2)",
        off=("--torch-fsdp2-no-reshard-after-forward",),
    )
    distributed_backend: str = setting(
        "nccl", help="collective library; nccl becomes gloo where there is no GPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(10, help="longest wait for a peer", unit="minutes", at_least=1)
    distributed_timeout_seconds_after_init: int | None = setting(
        None, help="longest wait for a peer once all processes have met", unit="seconds", at_least=1
    )
    debug_collectives: bool = setting(
        False,
        help="check before each collective that all ranks call the same one with the same shape, dtype and operation",
        ours=True,
    )

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for a peer."""
        if self.distributed_timeout_seconds_after_init is not None:
            return self.distributed_timeout_seconds_after_init
        return 60.0 * self.distributed_timeout_minutes

    @property
    def sequence_parallel_here(self) -> bool:
        """Sequence parallelism is off by itself without tensor parallelism."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    def virtual_stages(self, num_layers: int) -> int:
        """Virtual pipeline stages of each process."""
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is None:
            return 1
        return max(1, num_layers // self.pipeline_model_parallel_size // self.num_layers_per_virtual_pipeline_stage)


@dataclass(frozen=True)
class LaunchConfig:
    """What the launcher says about this process. The variables of srun and mpirun are understood too."""

    rank: int = setting(0, help="number of this process", at_least=0, from_environment="RANK", flagless=True)
    world_size: int = setting(1, help="number of processes", at_least=1, from_environment="WORLD_SIZE", flagless=True)
    local_rank: int = setting(
        0,
        help="number of this process on its machine",
        aliases=("--local_rank",),
        at_least=0,
        from_environment="LOCAL_RANK",
    )
    local_world_size: int | None = setting(
        None,
        help="number of processes on this machine",
        at_least=1,
        from_environment="LOCAL_WORLD_SIZE",
        flagless=True,
        ours=True,
    )
    master_addr: str = setting(
        "127.0.0.1", help="host of rank 0", from_environment="MASTER_ADDR", flagless=True, ours=True
    )
    master_port: int = setting(
        29500,
        help="port that rank 0 listens on",
        at_least=1,
        at_most=65535,
        from_environment="MASTER_PORT",
        flagless=True,
        ours=True,
    )
    launcher: str = setting(
        "",
        help="what started the processes; seen by itself",
        from_environment="MEGALITH_LAUNCHER",
        flagless=True,
        ours=True,
    )
    nproc: int | None = setting(
        None,
        help="start this many processes on this machine and look after them, instead of torchrun",
        unit="processes",
        at_least=1,
        ours=True,
    )
    max_restarts: int = setting(
        0,
        help="with --nproc: start again from the last checkpoint this often when a process fails",
        unit="restarts",
        at_least=0,
        ours=True,
    )

    @property
    def one_host(self) -> bool:
        """Whether all processes are known to be on this machine."""
        return self.local_world_size == self.world_size or self.master_addr in ("127.0.0.1", "localhost", "::1")
