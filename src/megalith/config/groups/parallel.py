"""The settings of the ranks: how a run is divided over them, and what their launcher says."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting
from megalith.errors import LayoutError
from megalith.layout import read_parts


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is divided over processes."""

    tensor_model_parallel_size: int = setting(1, help="tensor-parallel size: ranks that shard each layer", at_least=1)
    pipeline_model_parallel_size: int = setting(1, help="pipeline-parallel size: number of stages", at_least=1)
    context_parallel_size: int = setting(1, help="context-parallel size: ranks that shard each sequence", at_least=1)
    expert_model_parallel_size: int = setting(
        1,
        help="expert-parallel size: data- and context-parallel ranks that shard the experts of each layer",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = setting(
        None, help="tensor-parallel size of experts; --tensor-model-parallel-size by default", at_least=1
    )
    sequence_parallel: bool = setting(
        False, help="shard norms and dropout along the sequence over the tensor-parallel ranks"
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, help="layers per virtual pipeline stage", unit="layers", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None, help="virtual pipeline stages per rank", at_least=1
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, help="layers of the first pipeline stage; the rest is divided evenly", unit="layers", at_least=0
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, help="layers of the last pipeline stage; the rest is divided evenly", unit="layers", at_least=0
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, help="count the embedding as a layer when dividing layers into stages"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, help="count the loss as a layer when dividing layers into stages"
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        help="what each stage computes, in the order of the model: E embedding, t layer, m layer of multi-token "
        "prediction, L loss; a vertical bar ends a stage, *N repeats a letter or a (group); a multiple of "
        "--pipeline-model-parallel-size makes virtual stages",
    )
    microbatch_group_size_per_vp_stage: int | None = setting(
        None,
        help="micro-batches that pass a virtual pipeline stage before the next one; --pipeline-model-parallel-size by "
        "default",
        unit="micro-batches",
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
        at_least=1,
    )
    pipeline_schedule: str = setting(
        "auto",
        help="pipeline schedule; auto is interleaved with virtual stages, else 1f1b",
        choices=("auto", "1f1b", "interleaved", "zb-h1"),
        ours=True,
    )
    cp_comm_type: str = setting(
        "p2p",
        per_layer=True,
        help="context-parallel communication: ring (p2p) or Ulysses all-to-all (a2a)",
        choices=("p2p", "a2a"),
        later=("allgather", "a2a+p2p"),
        later_with="further kinds of context parallelism",
    )
    use_distributed_optimizer: bool = setting(False, help="shard optimizer states over data-parallel ranks (ZeRO-1)")
    use_torch_fsdp2: bool = setting(
        False, help="shard weights, gradients and optimizer states over data-parallel ranks with FSDP2 (ZeRO-3)"
    )
    torch_fsdp2_reshard_after_forward: bool = setting(
        True,
        help="with --use-torch-fsdp2: free gathered weights after each forward pass of a layer (off: ZeRO-2)",
        off=("--torch-fsdp2-no-reshard-after-forward",),
    )
    use_megatron_fsdp: bool = setting(
        False,
        help="shard over data-parallel ranks what --data-parallel-sharding-strategy says, by the implementation of "
        "--use-distributed-optimizer or --use-torch-fsdp2",
        aliases=("--use-custom-fsdp",),
    )
    data_parallel_sharding_strategy: str = setting(
        "optim_grads_params",
        help="with --use-megatron-fsdp: shard nothing, optimizer states (ZeRO-1), also gradients (ZeRO-2), or also "
        "weights (ZeRO-3)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    distributed_backend: str = setting(
        "nccl", help="collective backend; nccl becomes gloo without a GPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(
        10, help="timeout of collectives and of the rendezvous", unit="minutes", at_least=1
    )
    distributed_timeout_seconds_after_init: int | None = setting(
        None, help="timeout of collectives after the rendezvous", unit="seconds", at_least=1
    )
    debug_collectives: bool = setting(
        False,
        help="check before each collective that all ranks call the same one with equal shape, dtype and operation",
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
        """True if sequence parallelism has an effect: not without tensor parallelism."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def parts_of_layout(self) -> int:
        """Number of stages, virtual ones included, in `pipeline_model_parallel_layout`; 0 if it cannot be read."""
        try:
            return len(read_parts(self.pipeline_model_parallel_layout or ""))
        except LayoutError:
            return 0

    def virtual_stages(self, num_layers: int) -> int:
        """Return the number of virtual pipeline stages of each process."""
        if self.pipeline_model_parallel_layout is not None:
            return max(1, self.parts_of_layout // self.pipeline_model_parallel_size)
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is None:
            return 1
        return max(1, num_layers // self.pipeline_model_parallel_size // self.num_layers_per_virtual_pipeline_stage)

    @property
    def shards_optimizer_only(self) -> bool:
        """Return whether only optimizer states are sharded over data-parallel ranks (ZeRO-1)."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy == "optim"
        return self.use_distributed_optimizer

    @property
    def fully_shards(self) -> bool:
        """Return whether weights, gradients and optimizer states are sharded over data-parallel ranks (FSDP2)."""
        divided = self.use_megatron_fsdp and self.data_parallel_sharding_strategy in (
            "optim_grads",
            "optim_grads_params",
        )
        return self.use_torch_fsdp2 or divided

    @property
    def reshard_after_forward(self) -> bool:
        """Return whether gathered weights are freed after each forward pass of a layer (ZeRO-3)."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy == "optim_grads_params"
        return self.torch_fsdp2_reshard_after_forward

    @property
    def sharding_setting(self) -> str:
        """Return the name of the setting that shards over data-parallel ranks; "" for none."""
        if not (self.shards_optimizer_only or self.fully_shards):
            return ""
        if self.use_megatron_fsdp:
            return "use_megatron_fsdp"
        return "use_torch_fsdp2" if self.use_torch_fsdp2 else "use_distributed_optimizer"


@dataclass(frozen=True)
class LaunchConfig:
    """What the launcher says about this process. The variables of srun and mpirun are understood too."""

    rank: int = setting(0, help="global rank of this process", at_least=0, from_environment="RANK", flagless=True)
    world_size: int = setting(1, help="number of processes", at_least=1, from_environment="WORLD_SIZE", flagless=True)
    local_rank: int = setting(
        0,
        help="rank of this process on its machine",
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
        help="program that started the processes; detected",
        from_environment="MEGALITH_LAUNCHER",
        flagless=True,
        ours=True,
    )
    nproc: int | None = setting(
        None,
        help="launch and supervise this many processes on this machine, instead of torchrun",
        unit="processes",
        at_least=1,
        ours=True,
    )
    max_restarts: int = setting(
        0,
        help="with --nproc: maximum number of restarts from the last checkpoint after a failure",
        unit="restarts",
        at_least=0,
        ours=True,
    )

    @property
    def one_host(self) -> bool:
        """Return whether all processes are known to run on this machine."""
        return self.local_world_size == self.world_size or self.master_addr in ("127.0.0.1", "localhost", "::1")
