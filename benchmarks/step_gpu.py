"""A training step of GPTs of 124M, 345M and 1.3B on one GPU: share of the datasheet's peak, memory, where time goes.

    python benchmarks/step_gpu.py --out benchmarks/results/step-gpu.json
    python benchmarks/step_gpu.py --device cpu --models 2x64x4 --lengths 64 --steps 2 --peak-tflops 1     (a trial)

The step is that of `megalith train --bf16`: forward and backward of the micro-batches, norm, clipping and AdamW with
fp32 main parameters, gradients and moments, on random tokens. Each case has a process of its own; its micro-batch is
halved until it fits. Seconds are the median of the steps, the device waited for at both ends. FLOPs are those of
`megalith.train.throughput.step_flops` (attention by half of its square, recomputation not counted); the peak is the
dense bf16 rate of the datasheet, or that of --peak-tflops. A share above 1 is no result but a mistake, and ends the
program. Where the time goes is the device time of one more step under torch's profiler, by kinds of operations. Memory
is the peak of what torch has allocated and reserved.
What offload or recomputation save and cost shows beside a run with --flags=--optimizer-cpu-offload or
--flags='--recompute-granularity full --recompute-method uniform --recompute-num-layers 1'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalith.assemble.model import build_chunks, build_run_optimizer, choose_device, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.config import RunConfig, load
from megalith.datasheet import find_accelerator
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.train.metrics import memory_in_use
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step
from megalith.train.throughput import step_flops

MODELS = {"124M": "12x768x12", "345M": "24x1024x16", "1.3B": "24x2048x16"}
"""Layers x hidden size x heads."""
VOCABULARY, MICRO_BATCHES, OUT_OF_MEMORY = 50304, 2, 3
KINDS = {
    "attention": ("flash", "attention", "fmha", "sdpa"),
    "matrix products": ("gemm", "matmul", "aten::mm", "addmm", "cutlass", "nvjet", "xmma"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy_"),
}
"""A part of the name of an operation, in lower case; the rest is elementwise work, norms and the loss."""


def datasheet_peak(name: str) -> float:
    """FLOP/s of dense bf16 of a device of this name.

    Raises:
        SystemExit: it is not known.
    """
    known = find_accelerator(name)
    if known is not None and "bf16" in known.teraflops:
        return known.teraflops["bf16"] * 1e12
    raise SystemExit(f"the bf16 peak of {name} is not known here; give it by --peak-tflops")


def configure(model: str, length: int, micro_batch: int, device: str, more: list[str]) -> RunConfig:
    """The run whose step is measured."""
    layers, hidden, heads = MODELS.get(model, model).split("x")
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
    flags += f"--max-position-embeddings {length} --micro-batch-size {micro_batch} --lr 1e-4 --train-iters 1000 --bf16 "
    flags += f"--global-batch-size {micro_batch * MICRO_BATCHES} --hidden-dropout 0 --attention-dropout 0 --mock-data "
    flags += f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --device {device}"
    return load([*flags.split(), *more], {}, files=False)


def build(config: RunConfig) -> Callable[[], None]:
    """A step of the run."""
    device = choose_device(config.train.device)
    context = ParallelContext.solo(device)
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, VOCABULARY, context, streams.own)
    draw_weights(config, chunks, streams, context)
    state = TrainState(
        chunks, build_run_optimizer(config, chunks, context), streams, build_schedule(config), context=context
    )
    batches = _batches(config.train.micro_batch_size, config.data.seq_length)

    def step() -> None:
        train_step(state, batches, MICRO_BATCHES)

    return step


def _batches(samples: int, length: int) -> Iterator[MicroBatch]:
    generator, positions = torch.Generator().manual_seed(1), torch.arange(length).expand(samples, length)
    while True:
        ids = torch.randint(0, VOCABULARY, (samples, length + 1), generator=generator)
        mask = torch.ones(samples, length)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def where_time_goes(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Shares of the device's time in one step, by kind of operation."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        _wait(device)
    spent = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # what starts a kernel has the kernel's time too
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")
        spent[kind] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: round(value / total, 3) for kind, value in spent.items()}


def measure(options: argparse.Namespace, model: str, length: int, micro_batch: int) -> dict[str, Any]:
    """One case, in this process."""
    config = configure(model, length, micro_batch, options.device, options.flags.split())
    step, device = build(config), choose_device(config.train.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = options.peak_tflops * 1e12 if options.peak_tflops else datasheet_peak(name)
    for _ in range(3):
        step()
    seconds = statistics.median(_seconds(step, device) for _ in range(options.steps))
    flops = step_flops(config.model, VOCABULARY, length, micro_batch * MICRO_BATCHES)
    share = flops / seconds / peak
    if share > 1:
        raise SystemExit(f"{model} at {length}: {share:.0%} of the peak cannot be; the peak or the clock is wrong")
    return {
        "device": name,
        "micro_batch": micro_batch,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(micro_batch * MICRO_BATCHES * length / seconds),
        "tflops": round(flops / seconds / 1e12, 3),
        "share_of_peak": round(share, 4),
        "memory_mib": {name: round(value / 2**20) for name, value in memory_in_use(device).items()},
        "time": where_time_goes(step, device),
    }


def measure_in_child(options: argparse.Namespace, model: str, length: int) -> dict[str, Any]:
    """One case in a process of its own, with the largest micro-batch that fits."""
    micro_batch = options.micro_batch
    while micro_batch:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", model, str(length), str(micro_batch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
        if done.returncode != OUT_OF_MEMORY:
            raise SystemExit(f"{model} at {length} ended with exit code {done.returncode}")
        micro_batch //= 2
    return {"out_of_memory": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names, or LAYERSxHIDDENxHEADS")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--micro-batch", type=int, default=8, help="samples, halved until they fit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flags", default="", help="more flags of the run: --flags=--compile")
    parser.add_argument("--peak-tflops", type=float, help="of the device, where its name is not known")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, length, micro_batch = options.one
        try:
            print(json.dumps(measure(options, model, int(length), int(micro_batch))))
        except torch.cuda.OutOfMemoryError:
            raise SystemExit(OUT_OF_MEMORY) from None
        return
    cases = {
        f"{model} at {length}": measure_in_child(options, model, length)
        for model in options.models
        for length in options.lengths
    }
    text = json.dumps({"what": __doc__, "torch": torch.__version__, "flags": options.flags, "cases": cases}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
