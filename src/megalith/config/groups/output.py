"""The settings of what a run writes: checkpoints, records and profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


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
        later_with="the work on checkpoint formats",
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
    non_persistent_local_ckpt_dir: str | None = setting(
        None, help="folder of those checkpoints on a disk of this machine, for --non-persistent-ckpt-type local"
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
    use_tokenizer_model_from_checkpoint_args: bool = setting(
        True, help="with --use-checkpoint-args: take the tokenizer too; otherwise the one that the flags name"
    )
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        help="what to do about tensors of a checkpoint that the run does not ask for: nothing, say them (log_..., "
        "return_...) or stop (raise_...); what it lacks is always an error",
        choices=(
            *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
            *("return_unexpected", "return_all", "ignore_all"),
        ),
    )
    accept_data_change: bool = setting(
        False, help="go on although the training data is not that of the checkpoint; it is said and recorded", ours=True
    )

    @property
    def save_folders(self) -> tuple[str, ...]:
        """All the folders that the run saves checkpoints to."""
        if self.save is None:
            return ()
        passing = self.ephemeral_dir(self.save) if self.non_persistent_save_interval else None
        return (self.save,) if passing is None else (self.save, passing)

    def ephemeral_dir(self, folder: str) -> str | None:
        """Where the checkpoints are of which only the last one is kept, beside those in a folder; None for none."""
        if self.non_persistent_ckpt_type is None:
            return None
        if self.non_persistent_ckpt_type == "local":
            return self.non_persistent_local_ckpt_dir
        return self.non_persistent_global_ckpt_dir or f"{folder.rstrip('/')}/non_persistent"


@dataclass(frozen=True)
class LogConfig:
    """What is printed, recorded and measured."""

    log_interval: int = setting(100, help="iterations between lines", unit="iterations", at_least=1)
    log_throughput: bool = setting(False, help="add TFLOP/s to the line")
    log_params_norm: bool = setting(False, help="add the norm of the parameters to the line")
    log_num_zeros_in_grad: bool = setting(False, help="add the number of zeros in the gradient to the line")
    log_gradient_noise_scale: bool = setting(
        False,
        help="measure every --log-interval up to which batch size larger batches pay; the first micro-batch of "
        "these steps is computed twice",
        ours=True,
    )
    log_memory_interval: int | None = setting(
        None, help="print the memory in use this often, not only after the first line", unit="iterations", at_least=1
    )
    log_progress: bool = setting(False, help="write progress.txt in the folder of --save: starts and checkpoints")
    log_straggler: bool = setting(False, help="report ranks that the others wait for, every --log-interval")
    straggler_minmax_count: int = setting(
        1, help="with --log-straggler: slowest and fastest ranks that are named", unit="ranks", at_least=1
    )
    timing_log_level: int = setting(
        0,
        help="times to print: 0 of loading, set-up, evaluations and saves, 1 of the parts of a step too, 2 of "
        "its micro-batches too",
        at_least=0,
        at_most=2,
    )
    timing_log_option: str = setting(
        "minmax",
        help="how the times of several ranks are printed: the longest, the shortest and the longest, or all",
        choices=("max", "minmax", "all"),
    )
    tensorboard_dir: str | None = setting(None, help="folder of TensorBoard files")
    tensorboard_log_interval: int = setting(
        1, help="iterations between TensorBoard and W&B records", unit="iterations", at_least=1
    )
    tensorboard_queue_size: int = setting(
        1000, help="TensorBoard records that wait for the disk at most", unit="records", at_least=1
    )
    wandb_project: str = setting(
        "", help="record in this project of Weights & Biases; offline where nobody is logged in"
    )
    wandb_exp_name: str = setting("", help="name of the run in --wandb-project")
    wandb_save_dir: str = setting("", help="folder of W&B's files; wandb in the run folder unless given")
    wandb_entity: str | None = setting(None, help="user or team that --wandb-project belongs to")
    log_timers_to_tensorboard: bool = setting(False, help="record the times of --timing-log-level")
    log_loss_scale_to_tensorboard: bool = setting(True, help="record the loss scale")
    log_validation_ppl_to_tensorboard: bool = setting(False, help="record the perplexity of evaluations")
    log_memory_to_tensorboard: bool = setting(False, help="record the memory in use")
    log_world_size_to_tensorboard: bool = setting(False, help="record the number of processes")
    profile: bool = setting(
        False, help="profile some iterations; the trace goes to the run folder, or to nsys on a GPU (see below)"
    )
    profile_step_start: int = setting(10, help="iterations before the profile begins", unit="iterations", at_least=0)
    profile_step_end: int = setting(12, help="iteration that the profile ends with", unit="iterations", at_least=1)
    profile_ranks: tuple[int, ...] = setting((), help="ranks to profile; the first one unless given", at_least=0)
    use_pytorch_profiler: bool = setting(
        False, help="profile by torch on a GPU too, instead of marking the iterations for nsys"
    )
    pytorch_profiler_collect_shapes: bool = setting(False, help="shapes in the profile", aliases=("--record-shapes",))
    pytorch_profiler_collect_callstack: bool = setting(False, help="call stacks in the profile")
    moe_routing_trace_path: str | None = setting(
        None, help="folder for the experts that the tokens of each step chose, a file of each process"
    )
    moe_routing_trace_max_training_iters: int | None = setting(
        None, help="iterations to trace from the start of the run on; all unless given", unit="iterations", at_least=1
    )
    moe_routing_trace_capture_hidden_states: bool = setting(False, help="trace what routers are given")
    moe_routing_trace_capture_logits: bool = setting(False, help="trace the logits of routers")
    moe_routing_trace_dump_weights: bool = setting(
        False, help="write the weights of routers that the first traced iteration has"
    )
    record_memory_history: bool = setting(
        False, help="record what allocates memory of the GPU, for pytorch.org/memory_viz"
    )
    memory_snapshot_path: str = setting(
        "snapshot.pickle", help="file of --record-memory-history, in the run folder unless it is a path"
    )
