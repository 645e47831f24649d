"""From the configuration to the device, the model and its optimizer."""

from __future__ import annotations

import shutil

import torch

from megalith.config import PrecisionConfig, RunConfig
from megalith.distributed.rng import RandomStreams
from megalith.errors import ConfigError
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, initialise_as_megatron_cpu
from megalith.optim.optimizer import Optimizer, build_optimizer

_COMPILERS = ("g++", "clang++", "c++")


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Where to compute: what `--device` says, CUDA under "auto" where there is one.

    Raises:
        ConfigError: CUDA is asked for and not there, or has no device of this number.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK={local_rank} (or --local-rank) is a process without a GPU: torch sees "
            f"{torch.cuda.device_count()} here, counted from 0; start fewer processes, or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The torch dtype of weights and activations."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[precision.params_dtype]


def build_model(run: RunConfig, vocab_size: int, device: torch.device) -> GPT:
    """The model with unset weights.

    Args:
        run: its architecture, precision and `--compile`.
        vocab_size: padded.
        device: where the weights are.

    Raises:
        ConfigError: `--compile` on a CPU without a C++ compiler.
    """
    if run.train.compile and device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise ConfigError(
            f"--compile needs a C++ compiler on a CPU; install one of {', '.join(_COMPILERS)} or leave it out"
        )
    return GPT(run.model, vocab_size, dtype=params_dtype(run.precision), device=device)


def draw_weights(run: RunConfig, model: GPT, streams: RandomStreams) -> None:
    """Give the model its initial weights; `--use-cpu-initialization` draws them from the process's own stream."""
    if run.model.use_cpu_initialization:
        initialise_as_megatron_cpu(model, streams.weights)
    else:
        initialise(model, run.train.seed)


def build_run_optimizer(run: RunConfig, model: GPT) -> Optimizer:
    """The optimizer over the model's weights; made after these have their values or before a checkpoint fills both.

    With `--compile` the blocks are compiled here, since the optimizer first attaches its gradient sink to them.
    """
    optimizer = build_optimizer(model, run.optimizer, run.precision, count_zeros=run.log.log_num_zeros_in_grad)
    if run.train.compile:
        model.compile_blocks()
    return optimizer
