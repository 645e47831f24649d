"""Device, model chunks of this rank, and optimizer from the configuration."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megalith.assemble.nvidia import unused_gpu
from megalith.config import LaunchConfig, PrecisionConfig, RunConfig, check_groups
from megalith.device import capability_of, is_host, other_accelerator, prefer_attention
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.distributed.launch import named_gpu
from megalith.distributed.rng import RandomStreams, Stream
from megalith.errors import ConfigError
from megalith.kernels.torch_private import COMPILE_DISABLERS, cpp_compiler
from megalith.models.families import model_class
from megalith.models.initialise import initialise, initialise_as_megatron_cpu, seeded
from megalith.models.language_model import LanguageModel, Stage
from megalith.models.plain import require_tokens_alone
from megalith.nn.attention import ContextParallelAttention, LocalAttention
from megalith.nn.precision import at_least_fp32
from megalith.nn.region import Region, Solo
from megalith.nn.sink import attach_sink
from megalith.optim.build import build_optimizer
from megalith.optim.gradients import GradientBuffers
from megalith.optim.optimizer import Optimizer
from megalith.parallel.context import RingAttention, UlyssesAttention
from megalith.parallel.experts import TokenPeers
from megalith.parallel.pipeline import DeferredWeightGrads
from megalith.parallel.tensor import SequenceParallel, TensorParallel

if TYPE_CHECKING:
    from megalith.parallel.fsdp import FullyShard


def choose_device(wanted: str, launch: LaunchConfig | None = None) -> torch.device:
    """Return the device for `--device`; "auto" is CUDA if there is a GPU, else another accelerator that torch can use.

    Raises:
        ConfigError: torch cannot use an NVIDIA GPU of this machine, CUDA is requested and missing, or there are more
            processes than GPUs (on all of these processes).
    """
    launch = launch or LaunchConfig()
    if wanted == "cpu":
        return torch.device("cpu")
    processes = max(launch.local_world_size or 1, launch.local_rank + 1)
    if unused := unused_gpu(processes=processes):
        raise ConfigError(f"--device {wanted}: {unused}; --device cpu computes on the CPU")
    kind = "cuda" if torch.cuda.is_available() else other_accelerator() if wanted == "auto" else None
    if kind is None:
        if wanted == "auto":
            return torch.device("cpu")
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    module = torch.get_device_module(kind)
    seen = module.device_count()
    # srun and mpirun may assign one GPU to each process, which is then the only visible one; so may a script between
    # torchrun and this process, by CUDA_VISIBLE_DEVICES (distributed/launch.py checks that it is not the same one).
    bound = seen == 1 and (launch.launcher in ("srun", "mpirun") or bool(named_gpu(launch, os.environ)))
    if processes > seen and not bound:
        raise ConfigError(
            f"{processes} processes were started on {socket.gethostname()} and torch sees {seen} "
            f"GPU{'s' if seen > 1 else ''} there (CUDA_VISIBLE_DEVICES); start at most {seen} on a machine, show each "
            "process a GPU of its own by CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    device = torch.device(kind, 0 if bound else launch.local_rank)
    module.set_device(device)
    return device


def require_compiler(run: RunConfig, device: torch.device) -> None:
    """Check that `--compile` has a compiler.

    Raises:
        ConfigError: on a CPU without a C++ compiler, on a GPU without Triton or older than Volta, or where the
            environment turns compilation off.
    """
    if not run.train.compile:
        return
    if off := next((name for name in COMPILE_DISABLERS if os.environ.get(name) == "1"), None):
        raise ConfigError(f"--compile: {off}=1 in the environment turns it off; unset it, or leave --compile out")
    if is_host(device):
        if shutil.which(compiler := cpp_compiler(os.environ)) is None:
            raise ConfigError(
                f"--compile needs a C++ compiler on a CPU, and {compiler} is not found; install it, name another one "
                "by the environment variable CXX, or leave --compile out"
            )
    elif importlib.util.find_spec("triton") is None:
        raise ConfigError("--compile needs Triton on a GPU; install the package triton or leave it out")
    elif not capability_of(device).compiles:
        raise ConfigError(
            f"--compile: Triton needs a GPU of sm_70 or newer, not {capability_of(device).title}; leave it out"
        )


def choose_attention(run: RunConfig, device: torch.device) -> None:
    """Make torch SDPA prefer the kernel of --attention-backend on a GPU, in this process.

    Raises:
        ConfigError: the GPU has no such kernel.
    """
    backend = run.model.attention_backend
    kernel = {"flash": "flash", "fused": "cudnn"}.get(backend, "auto")
    if kernel != "auto" and not is_host(device) and kernel not in (able := capability_of(device)).attention:
        raise ConfigError(
            f"--attention-backend {backend}: {able.title} has no {kernel} kernel (NVIDIA: from sm_80 on); use auto, "
            f"which chooses among {', '.join([*able.attention, 'math'])}"
        )
    prefer_attention(kernel, device)


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Return the dtype of weights and activations."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[precision.params_dtype]


def build_region(run: RunConfig, context: ParallelContext, stream: Stream | None = None) -> Region:
    """Build the tensor-parallel region of the layers; `stream` is this rank's random stream, for dropout."""
    if context.tp.size == 1:
        return Solo()
    kind = SequenceParallel if run.parallel.sequence_parallel_here else TensorParallel
    return kind(context.tp, stream)


def build_mixer(run: RunConfig, context: ParallelContext) -> ContextParallelAttention:
    """Build the context-parallel attention."""
    if context.cp.size == 1:
        return LocalAttention()
    return UlyssesAttention(context.cp) if run.parallel.cp_comm_type == "a2a" else RingAttention(context.cp)


def build_chunks(
    run: RunConfig,
    vocab_size: int,
    context: ParallelContext,
    stream: Stream | None = None,
    *,
    dtype: torch.dtype | None = None,
    stages: Sequence[Stage] | None = None,
) -> list[LanguageModel]:
    """Build the model chunks of this rank, in the order of their layers, with uninitialized weights.

    Args:
        stream: the random stream of this rank alone, needed for dropout over tensor-parallel ranks.
        dtype: of the weights; that of the run's precision if None.
        stages: of the chunks; those of the layout if None.

    Raises:
        ConfigError: the configuration was changed after `load` and breaks a rule; or from `require_compiler`.
    """
    check_groups(run.model, run.parallel, run.precision, run.train, run.launch)
    require_compiler(run, context.device)
    region, mixer = build_region(run, context, stream), build_mixer(run, context)
    chunks = []
    for stage in stages or _stages(run, context):
        with seeded(run.train.seed, "model", context.device):
            chunk = model_class(run.model)(
                run.model,
                vocab_size,
                region=region,
                mixer=mixer,
                peers=TokenPeers(
                    context,
                    sequence_parallel=region.needs_grad_reduce,
                    exchange=run.model.moe_token_dispatcher_type,
                ),
                stage=stage,
                recompute=run.recompute,
                dtype=dtype or params_dtype(run.precision),
                device=context.device,
            )
        require_tokens_alone(chunk, run.data)
        chunks.append(chunk)
    return chunks


def _stages(run: RunConfig, context: ParallelContext) -> list[Stage]:
    layers, pp = run.stages[context.pp.index], context.pp
    return [
        Stage(part, is_first=pp.is_first and number == 0, is_last=pp.is_last and number == len(layers) - 1)
        for number, part in enumerate(layers)
    ]


def draw_weights(
    run: RunConfig,
    chunks: Sequence[LanguageModel],
    streams: RandomStreams,
    context: ParallelContext,
    *,
    frozen: bool = True,
) -> None:
    """Initialize the weights, or without `frozen` those that are trained.

    `--use-cpu-initialization` draws them from the process's own stream.
    """
    for chunk in chunks:
        if run.model.use_cpu_initialization:
            initialise_as_megatron_cpu(chunk, streams.weights)
        else:
            initialise(chunk, run.train.seed, frozen=frozen)
    copy_shared_weight(chunks, context)


def copy_shared_weight(chunks: Sequence[LanguageModel], context: ParallelContext) -> None:
    """Overwrite the tied embedding of the last stage with that of the first."""
    for chunk in chunks:
        if chunk.shared_weight is not None:
            assert context.ends is not None, "two stages share a weight only where there is a pipeline"
            comm.broadcast(chunk.get_parameter(chunk.shared_weight).data, context.ends)


def fully_shard(run: RunConfig, chunks: Sequence[LanguageModel], context: ParallelContext) -> list[FullyShard]:
    """Shard the weights of each layer, and those outside of layers, over the replicas with FSDP2."""
    from megalith.parallel.fsdp import FullyShard  # imports DTensor and sympy, a third of the time of all imports

    return [
        FullyShard(
            chunk,
            chunk.blocks(),
            context,
            reshard_after_forward=run.parallel.reshard_after_forward,
            reduce_dtype=at_least_fp32(chunk.dtype) if run.precision.grads_in_fp32 else None,
        )
        for chunk in chunks
        if any(True for _ in chunk.parameters())  # a pipeline layout has chunks that only pass on
    ]


def build_run_optimizer(run: RunConfig, chunks: Sequence[LanguageModel], context: ParallelContext) -> Optimizer:
    """Build the optimizer over the weights of all chunks, before or after the weights are loaded.

    With `--compile` this compiles the layers; with `--use-torch-fsdp2` it shards the weights before.
    """
    optimizer = build_optimizer(
        chunks,
        run.optimizer,
        run.precision,
        count_zeros=run.log.log_num_zeros_in_grad,
        context=context,
        zero1=run.parallel.shards_optimizer_only,
        # Registered modules may read a weight without a call of the module that holds it, or of another layer.
        overlap_gather=not run.train.compile and not run.model.registered_layers,
        sharded=fully_shard(run, chunks, context) if run.fully_sharded else (),
        offload=run.optimizer.offloaded if not is_host(context.device) else 0.0,
    )
    if run.train.compile:
        for chunk in chunks:
            chunk.compile_blocks(documents=run.data.masks_documents)
    return optimizer


def defer_weight_gradients(
    run: RunConfig, chunks: Sequence[LanguageModel], optimizer: Optimizer
) -> DeferredWeightGrads | None:
    """Defer the weight gradients of the layers if the pipeline schedule has W operations; else return None."""
    if run.pipeline_schedule != "zb-h1":
        return None
    assert isinstance(optimizer.gradients, GradientBuffers), "a rule of the configuration"
    deferred = DeferredWeightGrads(optimizer.gradients)
    for chunk in chunks:
        attach_sink(chunk, deferred)
    return deferred
