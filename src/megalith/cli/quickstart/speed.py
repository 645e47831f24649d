"""Measures this machine: the rate of a matrix product, and the time of a real training step. Imports torch."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, choose_device, draw_weights
from megalith.cli.quickstart.sizing import Machine, ModelSize, choose_precision
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.language_model import LanguageModel
from megalith.optim.optimizer import Optimizer
from megalith.train.throughput import measure_peak

PEAK_SECONDS = 2.0  # for each precision: one noisy moment must not decide how large the model is
PROBE_SECONDS = 3.0
FEWEST_PROBES = 5  # so that a pause of the machine does not pass for a slow step


def measure_machine(wanted: str = "auto") -> Machine:
    """Multiply matrices in each precision and pick the one to train in.

    Args:
        wanted: as of `--device`.

    Raises:
        ConfigError: there is no such device, or there is a GPU that torch cannot use.
    """
    device = choose_device(wanted)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        dtypes["fp16"] = torch.float16
    flops = {name: measure_peak(device, dtype, PEAK_SECONDS) for name, dtype in dtypes.items()}
    precision = choose_precision(flops)
    return Machine(device_name(device), precision, flops[precision])


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cores = torch.get_num_threads()
    return f"{cores} CPU core{'s' if cores > 1 else ''} ({platform.machine()})"


def measure_step(size: ModelSize, train_arguments: Sequence[str]) -> float:
    """Seconds of one training step of a run, the median of a few.

    Args:
        train_arguments: flags of `megalith train`, whose files need not exist yet.
    """
    run = load(train_arguments, os.environ, files=False)
    device = choose_device(run.train.device, run.launch)
    context = ParallelContext.solo(device)
    (model,) = chunks = build_chunks(run, size.padded_vocab_size, context)
    draw_weights(run, chunks, RandomStreams(run.train.seed), context)
    optimizer = build_run_optimizer(run, chunks, context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.seq_length + 1), generator=generator).to(device)
    seconds: list[float] = []
    while len(seconds) < FEWEST_PROBES or sum(seconds) < PROBE_SECONDS:
        seconds.append(time_step(model, optimizer, tokens))
    return statistics.median(seconds)


def time_step(model: LanguageModel, optimizer: Optimizer, tokens: Tensor) -> float:
    """Take one step on the tokens [B, S + 1]; the loss is read at the end, which waits for the device."""
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = model(tokens[:, :-1].contiguous(), labels_BS=tokens[:, 1:].contiguous()).mean()
    (loss * optimizer.loss_scale).backward()
    optimizer.step(1e-4, 0.1)
    loss.item()
    return time.perf_counter() - started
