"""The settings of what is printed, recorded and measured."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


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
