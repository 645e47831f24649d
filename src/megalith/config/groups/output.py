"""The settings of what a run writes: checkpoints, records and profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, and what is taken from a checkpoint."""

    save: str | None = setting(None, help="save folder for checkpoints")
    save_interval: int | None = setting(
        None,
        help="iterations between checkpoints",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        at_least=1,
    )
    load: str | None = setting(None, help="folder to resume from; a fresh start if it holds no checkpoint")
    ckpt_format: str = setting(
        "torch_dist",
        help="checkpoint format",
        choices=("torch_dist", "torch"),
        later=("torch_dcp", "fsdp_dtensor", "zarr"),
        later_with="the work on checkpoint formats",
    )
    ckpt_convert_format: str | None = setting(
        None,
        help="convert the checkpoint of --load to this format and the layout of the run, and exit",
        choices=("torch", "torch_dist"),
    )
    ckpt_convert_save: str | None = setting(
        None, help="with --ckpt-convert-format: folder in which a folder with the format's name is created"
    )
    ckpt_step: int | None = setting(None, help="iteration to load instead of the latest", at_least=0)
    no_load_optim: bool = setting(False, help="start with a fresh optimizer state")
    no_load_rng: bool = setting(False, help="start with fresh RNG states")
    no_save_optim: bool = setting(False, help="omit optimizer states from checkpoints")
    no_save_rng: bool = setting(False, help="omit RNG states from checkpoints")
    async_save: bool = setting(
        False, help="write checkpoints in the background; training only waits for the copy to host memory"
    )
    keep_last: int | None = setting(
        None,
        help="number of newest verified checkpoints to keep; older ones are deleted after a save",
        at_least=1,
        ours=True,
    )
    keep_best: bool = setting(
        False,
        help="save at each new lowest validation loss, and never delete the last such checkpoint",
        ours=True,
    )
    rehearse_resume: bool = setting(
        False,
        help="resume from the first checkpoint in a process beside the run, and compare their steps",
        ours=True,
    )
    save_retain_interval: int | None = setting(
        None,
        help="after a save, delete the previous checkpoint unless its iteration is a multiple of this; with "
        "--keep-last: never delete these multiples",
        unit="iterations",
        at_least=1,
    )
    non_persistent_save_interval: int | None = setting(
        None,
        help="iterations between ephemeral checkpoints, of which only the last is kept",
        unit="iterations",
        at_least=1,
    )
    non_persistent_ckpt_type: str | None = setting(
        None,
        help="save ephemeral checkpoints, and resume from one if it is the newest",
        choices=("global", "local", "in_memory"),
    )
    non_persistent_global_ckpt_dir: str | None = setting(
        None, help="folder of ephemeral checkpoints; non_persistent in --save or --load by default"
    )
    non_persistent_local_ckpt_dir: str | None = setting(
        None, help="folder of ephemeral checkpoints on a local disk, for --non-persistent-ckpt-type local"
    )
    finetune: bool = setting(False, help="load only weights and start at iteration 0")
    exit_on_missing_checkpoint: bool = setting(False, help="exit if --load holds no checkpoint")
    pretrained_checkpoint: str | None = setting(None, help="folder of initial weights if --load holds no checkpoint")
    use_checkpoint_args: bool = setting(False, help="take architecture, dropout and tokenizer from the checkpoint")
    use_mp_args_from_checkpoint_args: bool = setting(
        False, help="with --use-checkpoint-args: also take tensor- and pipeline-parallel sizes"
    )
    use_tokenizer_model_from_checkpoint_args: bool = setting(
        True, help="with --use-checkpoint-args: also take the tokenizer; otherwise that of the flags"
    )
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        help="handling of checkpoint tensors that the run does not load: ignore, log (log_..., return_...) or fail "
        "(raise_...); missing tensors are always an error",
        choices=(
            *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
            *("return_unexpected", "return_all", "ignore_all"),
        ),
    )
    accept_data_change: bool = setting(
        False,
        help="resume although the training data differs from the checkpoint's; this is printed and recorded",
        ours=True,
    )

    @property
    def save_folders(self) -> tuple[str, ...]:
        """Return all folders to which the run saves checkpoints."""
        if self.save is None:
            return ()
        passing = self.ephemeral_dir(self.save) if self.non_persistent_save_interval else None
        return (self.save,) if passing is None else (self.save, passing)

    def ephemeral_dir(self, folder: str) -> str | None:
        """Return the folder of ephemeral checkpoints, of which only the last is kept; None for none."""
        if self.non_persistent_ckpt_type is None:
            return None
        if self.non_persistent_ckpt_type == "local":
            return self.non_persistent_local_ckpt_dir
        return self.non_persistent_global_ckpt_dir or f"{folder.rstrip('/')}/non_persistent"


@dataclass(frozen=True)
class LogConfig:
    """What is printed, recorded and measured."""

    log_interval: int = setting(100, help="iterations between log lines", unit="iterations", at_least=1)
    log_throughput: bool = setting(False, help="log TFLOP/s")
    log_params_norm: bool = setting(False, help="log the norm of the parameters")
    log_num_zeros_in_grad: bool = setting(False, help="log the number of zeros in the gradient")
    log_gradient_noise_scale: bool = setting(
        False,
        help="log the gradient noise scale every --log-interval; the first micro-batch of these steps is computed "
        "twice",
        ours=True,
    )
    log_memory_interval: int | None = setting(
        None,
        help="iterations between reports of memory use; only after the first line by default",
        unit="iterations",
        at_least=1,
    )
    plan: str = setting(
        "warn",
        help="warn at the start if an earlier `megalith plan` of these sizes says that memory will not do, and refuse "
        "what weights, gradients and optimizer states alone exclude; off: start regardless",
        choices=("warn", "off"),
        ours=True,
    )
    log_progress: bool = setting(False, help="write starts and checkpoints to progress.txt in --save")
    log_straggler: bool = setting(False, help="report the slowest ranks every --log-interval")
    straggler_minmax_count: int = setting(
        1, help="with --log-straggler: number of slowest and fastest ranks to name", unit="ranks", at_least=1
    )
    timing_log_level: int = setting(
        0,
        help="timers to log: 0 loading, set-up, evaluations and saves; 1 also parts of a step; 2 also micro-batches",
        at_least=0,
        at_most=2,
    )
    timing_log_option: str = setting(
        "minmax",
        help="times of several ranks: longest, shortest and longest, or all",
        choices=("max", "minmax", "all"),
    )
    sample_prompts: tuple[str, ...] = setting(
        (),
        help="prompts that are continued at each evaluation, in log, report and trackers (greedy, at most 64 tokens); "
        "not with pipeline or context parallelism or FSDP2",
        ours=True,
    )
    tensorboard_dir: str | None = setting(None, help="folder of TensorBoard files")
    tensorboard_log_interval: int = setting(
        1, help="iterations between TensorBoard and W&B records", unit="iterations", at_least=1
    )
    tensorboard_queue_size: int = setting(
        1000, help="maximum number of TensorBoard records in the write queue", unit="records", at_least=1
    )
    wandb_project: str = setting("", help="Weights & Biases project; offline without a login")
    wandb_exp_name: str = setting("", help="name of the run in --wandb-project")
    wandb_save_dir: str = setting("", help="folder of W&B's files; wandb in the run folder by default")
    wandb_entity: str | None = setting(None, help="user or team of --wandb-project")
    trackers: tuple[str, ...] = setting(
        (),
        help="trackers to record to; trackio needs no account, the others are offline without a login",
        flag="--tracker",
        repeatable=True,
        choices=("tensorboard", "wandb", "trackio", "mlflow", "swanlab"),
        ours=True,
    )
    tracker_project: str = setting("megalith", help="project of the run in the trackers of --tracker", ours=True)
    tracker_run: str = setting("", help="name of the run in them; by default that of the folder of --save", ours=True)
    log_timers_to_tensorboard: bool = setting(False, help="record the timers of --timing-log-level")
    log_loss_scale_to_tensorboard: bool = setting(True, help="record the loss scale")
    log_validation_ppl_to_tensorboard: bool = setting(False, help="record the perplexity of evaluations")
    log_memory_to_tensorboard: bool = setting(False, help="record memory use")
    log_world_size_to_tensorboard: bool = setting(False, help="record the number of processes")
    profile: bool = setting(
        False,
        help="profile some iterations; the trace is written to the run folder, or taken by nsys on a GPU (see below)",
    )
    profile_step_start: int = setting(10, help="number of iterations before the profile", unit="iterations", at_least=0)
    profile_step_end: int = setting(12, help="last iteration to profile", unit="iterations", at_least=1)
    profile_ranks: tuple[int, ...] = setting((), help="ranks to profile; rank 0 by default", at_least=0)
    use_pytorch_profiler: bool = setting(
        False, help="profile with torch on a GPU too, instead of marking iterations for nsys"
    )
    pytorch_profiler_collect_shapes: bool = setting(
        False, help="record shapes in the profile", aliases=("--record-shapes",)
    )
    pytorch_profiler_collect_callstack: bool = setting(False, help="record call stacks in the profile")
    moe_routing_trace_path: str | None = setting(
        None, help="folder for traces of selected experts, one file per process"
    )
    moe_routing_trace_max_training_iters: int | None = setting(
        None, help="number of iterations to trace; all by default", unit="iterations", at_least=1
    )
    moe_routing_trace_capture_hidden_states: bool = setting(False, help="also trace router inputs")
    moe_routing_trace_capture_logits: bool = setting(False, help="also trace router logits")
    moe_routing_trace_dump_weights: bool = setting(
        False, help="also write the router weights of the first traced iteration"
    )
    record_memory_history: bool = setting(False, help="record allocations of GPU memory, for pytorch.org/memory_viz")
    memory_snapshot_path: str = setting(
        "snapshot.pickle", help="file of --record-memory-history, in the run folder unless it contains a folder"
    )
