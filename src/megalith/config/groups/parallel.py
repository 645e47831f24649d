"""The settings of the ranks: how a run is divided over them, and what their launcher says."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is divided over processes."""

    tensor_model_parallel_size: int = setting(1, help="processes that share each layer", at_least=1)
    pipeline_model_parallel_size: int = setting(1, help="processes that share the layers in turn", at_least=1)
    context_parallel_size: int = setting(1, help="processes that share each sequence", at_least=1)
    expert_model_parallel_size: int = setting(
        1,
        help="data- and context-parallel processes that share the experts of each layer",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = setting(
        None, help="processes that share each expert; those that share each layer, unless given", at_least=1
    )
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
        per_layer=True,
        help="context parallelism by a ring (p2p) or by exchanging heads for sequence parts (a2a)",
        choices=("p2p", "a2a"),
        later=("allgather", "a2a+p2p"),
        later_with="further kinds of context parallelism",
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
    use_megatron_fsdp: bool = setting(
        False,
        help="each data-parallel process keeps a part of what --data-parallel-sharding-strategy says, by the means of "
        "--use-distributed-optimizer and --use-torch-fsdp2",
        aliases=("--use-custom-fsdp",),
    )
    data_parallel_sharding_strategy: str = setting(
        "optim_grads_params",
        help="under --use-megatron-fsdp: nothing, optimizer states (ZeRO-1), gradients too (ZeRO-2), or weights too "
        "(ZeRO-3)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
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

    @property
    def divides_states(self) -> bool:
        """Whether data-parallel processes divide the optimizer states, and nothing else (ZeRO-1)."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy == "optim"
        return self.use_distributed_optimizer

    @property
    def divides_weights(self) -> bool:
        """Whether data-parallel processes divide weights, gradients and optimizer states (ZeRO-2 and ZeRO-3)."""
        divided = self.use_megatron_fsdp and self.data_parallel_sharding_strategy in (
            "optim_grads",
            "optim_grads_params",
        )
        return self.use_torch_fsdp2 or divided

    @property
    def lets_weights_go(self) -> bool:
        """Whether gathered weights are let go behind each pass of a layer (ZeRO-3)."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy == "optim_grads_params"
        return self.torch_fsdp2_reshard_after_forward

    @property
    def dividing_setting(self) -> str:
        """The setting that divides anything over data-parallel processes, "" for none."""
        if not (self.divides_states or self.divides_weights):
            return ""
        if self.use_megatron_fsdp:
            return "use_megatron_fsdp"
        return "use_torch_fsdp2" if self.use_torch_fsdp2 else "use_distributed_optimizer"


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
