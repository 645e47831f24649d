"""What parallelism costs: step time, communication volume, overhead and bubble, on the processes of one machine.

    python benchmarks/parallel.py --out benchmarks/results/parallel-cpu.json

Step time: the same global batch, one thread per process, by one process and by TP2, TP2 with sequence parallelism, DP2,
DP2 with ZeRO-1, PP2 by 1F1B and by ZB-H1, and CP2. The contenders take turns, round by round; a ratio is the median
over rounds of the ratio to one process within the round. With as many cores as processes the ideal is one half.

Volume: bytes that each rank hands to collectives in one step, counted by an observer of every axis, against the least
that the parallelism needs (formulas in `minimum_volume`).

Overhead: Python and framework time per layer of a model so small that its arithmetic is nothing, TP2 against one
process; the collectives of a machine's memory are included.

Bubble: idle share of the two pipeline stages as measured (1 - ideal time / step time, ideal = one process / 2) beside
what the schedule simulator says for equal stages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LENGTH, VOCABULARY = 256, 8192
SIZES = "--num-layers 8 --hidden-size 512 --num-attention-heads 8"
TINY = "--num-layers 8 --hidden-size 16 --num-attention-heads 4"
BASE = (
    f"--max-position-embeddings {LENGTH} --seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 100 --lr 1e-4 --hidden-dropout 0 --attention-dropout 0 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}"
)
CONTENDERS = {
    "one process": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2": (2, ""),
    "DP2 ZeRO-1": (2, "--use-distributed-optimizer"),
    "PP2 1f1b": (2, "--pipeline-model-parallel-size 2"),
    "PP2 zb-h1": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "CP2": (2, "--context-parallel-size 2"),
}


@dataclass
class Volume:
    """Counts the bytes that this rank hands to each kind of collective."""

    sent: Counter[str] = field(default_factory=Counter)

    def before(self, operation: str, axis: Any, tensor: Any, detail: str = "") -> None:
        if tensor is not None:
            self.sent[f"{axis.name} {operation}"] += tensor.numel() * tensor.element_size()

    def after(self, operation: str, axis: Any) -> None:
        """Nothing to do."""

    def waiting(self, peer: int | None = None) -> None:
        """Nothing to do."""

    def waited(self) -> None:
        """Nothing to do."""


def _batches(loader_seed: int, replica: int, replicas: int) -> Iterator[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(loader_seed)
    positions, mask = torch.arange(LENGTH)[None], torch.ones(1, LENGTH)
    number = 0
    while True:
        ids = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)
        if number % replicas == replica:
            yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}
        number += 1


def measure(rank: int, world: int, store: str, flags: str, steps: int, answers: Any) -> None:
    """One process of a contender: sends (seconds of each step, bytes by collective of the last) from rank 0."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
    from megalith.config import load
    from megalith.distributed import comm
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.rng import RandomStreams
    from megalith.schedules.learning_rate import LearningRateSchedule
    from megalith.schedules.parameters import ParameterSchedule
    from megalith.schedules.weight_decay import WeightDecaySchedule
    from megalith.train.state import TrainState
    from megalith.train.step import train_step

    torch.set_num_threads(1)
    words = [word for word in flags.split(" ") if word]
    config = load(words, {"RANK": str(rank), "WORLD_SIZE": str(world)}, files=False)
    volume = Volume()
    context = ParallelContext.solo()
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        context = ParallelContext.create(config.layout, torch.device("cpu"), observer=volume)
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, VOCABULARY, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    rates = LearningRateSchedule(1e-4, 1e-4, 1000, "constant")
    state = TrainState(
        chunks, optimizer, streams, ParameterSchedule(rates, WeightDecaySchedule(0, 0, 1000)), context=context
    )
    batches = _batches(1, context.dp.index, context.dp.size)
    seconds = []
    for _ in range(steps + 1):
        comm.barrier(context.world)
        volume.sent.clear()
        started = time.perf_counter()
        train_step(state, batches, config.num_micro_batches, schedule=config.pipeline_schedule)
        comm.barrier(context.world)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        answers.put((seconds[1:], dict(volume.sent)))
    if world > 1:
        dist.destroy_process_group()


def run(world: int, flags: str, steps: int) -> tuple[list[float], dict[str, int]]:
    """A contender in fresh processes; the first step is not counted."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world, f"{folder}/store", flags, steps, answers) for rank in range(world)]
        processes = [spawn.Process(target=measure, args=argument) for argument in arguments]
        for process in processes:
            process.start()
        while True:
            try:
                answer: tuple[list[float], dict[str, int]] = answers.get(timeout=1)
                break
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise SystemExit(f"a process of {flags} has failed") from None
        for process in processes:
            process.join()
    return answer


def minimum_volume(name: str) -> dict[str, int]:
    """Bytes that one rank must hand over in a step of the model of `SIZES`, in fp32, by kind of collective.

    Tensor parallelism sums [S, B, D] twice forward and twice backward in each layer (arXiv:1909.08053), once for the
    embedding and once for the input gradient of the logits; data parallelism sums every gradient once.
    """
    layers, hidden, micro_batches = 8, 512, 8
    states = LENGTH * hidden * 4 * micro_batches
    parameters = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + (VOCABULARY + LENGTH) * hidden
    return {
        "TP2": {"tp all_reduce of hidden states": (4 * layers + 2) * states},
        "DP2": {"cp+dp all_reduce": parameters * 4},
        "DP2 ZeRO-1": {"cp+dp reduce_scatter": parameters * 4, "cp+dp all_gather": parameters * 4 // 2},
        "PP2 1f1b": {"activations and gradients": states},
    }.get(name, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in arguments.only}
    volumes: dict[str, dict[str, int]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.only:
            world, flags = CONTENDERS[name]
            times, volumes[name] = run(world, f"{SIZES} {BASE} {flags}", arguments.steps)
            seconds[name].append(min(times))
    alone = seconds["one process"]
    ratios = {
        name: statistics.median(mine / one for mine, one in zip(times, alone, strict=True))
        for name, times in seconds.items()
    }
    tiny = {
        name: min(run(world, f"{TINY} {BASE} {flags}", 10)[0]) for name, (world, flags) in list(CONTENDERS.items())[:2]
    }
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": SIZES,
        "seconds": {name: [round(value, 4) for value in times] for name, times in seconds.items()},
        "ratio_to_one_process": {name: round(value, 3) for name, value in ratios.items()},
        "bytes_sent_by_rank_0": volumes,
        "bytes_needed": {name: minimum_volume(name) for name in volumes if minimum_volume(name)},
        "milliseconds_per_layer_and_micro_batch_of_a_tiny_model": {
            name: round(value * 1e3 / 8 / 8, 4) for name, value in tiny.items()
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
