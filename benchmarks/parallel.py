"""What parallelism costs: step time, communication volume, overhead and bubble, on the processes of one machine.

    python benchmarks/parallel.py --out benchmarks/results/parallel-cpu.json

Step time: the same global batch, one thread per process, by one process and by TP2, TP2 with sequence parallelism, DP2,
DP2 with ZeRO-1, PP2 by 1F1B and by ZB-H1, and CP2. The contenders take turns, round by round; a ratio is the median
over rounds of the ratio to one process within the round. With as many cores as processes the ideal is one half.

Volume: bytes that each rank hands to collectives in one step, counted by an observer of every axis, against the least
that the parallelism needs (formulas in `minimum_volume`).

Overhead: Python and framework time per layer of a model so small that its arithmetic is nothing, TP2 against one
process; the collectives of a machine's memory are included.

Bubble: the share of a step that the two pipeline stages wait for each other, mean over the stages, beside what the
schedule simulator says for equal stages; of a model with a vocabulary so small that its stages are equal.
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

LENGTH, VOCABULARY, MICRO_BATCHES = 256, 8192, 8
EQUAL_STAGES = 64  # a vocabulary that costs next to nothing
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
    idle: float = 0.0
    since: float = 0.0

    def before(self, operation: str, axis: Any, tensor: Any, detail: str = "") -> None:
        if tensor is not None:
            self.sent[f"{axis.name} {operation}"] += tensor.numel() * tensor.element_size()

    def after(self, operation: str, axis: Any) -> None:
        """Nothing to do."""

    def waiting(self, peer: int | None = None) -> None:
        """A receive begins to wait."""
        self.since = time.perf_counter()

    def waited(self) -> None:
        """It has what it waited for."""
        self.idle += time.perf_counter() - self.since


@dataclass
class Measured:
    """What the ranks of a contender say, by rank: best step in seconds, share of it spent waiting, bytes sent."""

    seconds: list[float]
    idle: list[float]
    sent: list[dict[str, int]]


def _batches(loader_seed: int, replica: int, replicas: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(loader_seed)
    positions, mask = torch.arange(LENGTH)[None], torch.ones(1, LENGTH)
    number = 0
    while True:
        ids = torch.randint(0, vocabulary, (1, LENGTH + 1), generator=generator)
        if number % replicas == replica:
            yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}
        number += 1


def measure(rank: int, world: int, store: str, flags: str, vocabulary: int, steps: int, answers: Any) -> None:
    """One process of a contender: sends (rank, seconds and idle share of its best step, bytes by collective)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
    from megalith.config import load
    from megalith.distributed import comm
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.rng import RandomStreams
    from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule
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
    chunks = build_chunks(config, vocabulary, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    rates = LearningRateSchedule(1e-4, 1e-4, 1000, "constant")
    state = TrainState(
        chunks,
        optimizer,
        streams,
        ParameterSchedule(rates, WeightDecaySchedule(0, 0, 1000)),
        context=context,
        deferred=defer_weight_gradients(config, chunks, optimizer),
    )
    batches = _batches(1, context.dp.index, context.dp.size, vocabulary)
    steps_done = []
    for _ in range(steps + 1):
        comm.barrier(context.world)
        volume.sent.clear()
        volume.idle, started = 0.0, time.perf_counter()
        train_step(state, batches, config.num_micro_batches, pipeline_schedule=config.pipeline_schedule)
        took, idle = time.perf_counter() - started, volume.idle
        comm.barrier(context.world)
        steps_done.append((took, idle / took))
    best, idle = min(steps_done[1:])
    answers.put((rank, best, idle, dict(volume.sent)))
    if world > 1:
        dist.destroy_process_group()


def run(world: int, flags: str, steps: int, vocabulary: int = VOCABULARY) -> Measured:
    """A contender in fresh processes; the first step is not counted."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world, f"{folder}/store", flags, vocabulary, steps, answers) for rank in range(world)]
        processes = [spawn.Process(target=measure, args=argument) for argument in arguments]
        for process in processes:
            process.start()
        found: list[Any] = []
        while len(found) < world:
            try:
                found.append(answers.get(timeout=1))
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise SystemExit(f"a process of {flags} has failed") from None
        for process in processes:
            process.join()
    found.sort(key=lambda answer: int(answer[0]))
    return Measured([item[1] for item in found], [item[2] for item in found], [item[3] for item in found])


def bubbles(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Idle share of a pipeline of two equal stages, measured and simulated."""
    from megalith.schedules.pipeline import make_schedule
    from megalith.schedules.simulator import Costs, simulate

    found = {}
    for name in ("1f1b", "zb-h1"):
        flags = CONTENDERS[f"PP2 {name}"][1]
        idle = [run(2, f"{SIZES} {BASE} {flags}", steps, EQUAL_STAGES).idle for _ in range(rounds)]
        simulated = simulate(make_schedule(name, 2, 1, MICRO_BATCHES), Costs())
        found[name] = {
            "measured": round(statistics.median(statistics.mean(ranks) for ranks in idle), 4),
            "simulated": round(float(simulated.bubble), 4),
        }
    return found


def minimum_volume(name: str) -> dict[str, int]:
    """Bytes that rank 0 must hand over in a step of the model of `SIZES`, in fp32, by kind of collective.

    Tensor parallelism sums [S, B, D] twice forward and twice backward in each layer (arXiv:1909.08053), once for the
    embedding and once for the input gradient of the logits; sequence parallelism divides each of these sums into a
    gather of what a rank has and a scatter of the whole (arXiv:2205.05198). Data parallelism sums every gradient once,
    ZeRO-1 scatters the sum and gathers the weights. A pipeline hands on the states of each micro-batch, and sums the
    gradient of a tied embedding. Ring attention passes keys and values on once forward and once backward, and their
    gradients back.
    """
    layers, hidden = 8, 512
    states = LENGTH * hidden * 4 * MICRO_BATCHES
    parameters = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + (VOCABULARY + LENGTH) * hidden
    embedding = VOCABULARY * hidden * 4
    return {
        "TP2": {"tp all_reduce": (4 * layers + 2) * states},
        "DP2": {"cp+dp all_reduce": parameters * 4},
        "DP2 ZeRO-1": {"cp+dp reduce_scatter": parameters * 4, "cp+dp all_gather": parameters * 4 // 2},
        "PP2 1f1b": {"pp send": states, "ends all_reduce": embedding},
        "PP2 zb-h1": {"pp send": states, "ends all_reduce": embedding},
        "CP2": {"cp send": 3 * layers * states, "cp+dp all_reduce": parameters * 4},
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
            found = run(world, f"{SIZES} {BASE} {flags}", arguments.steps)
            volumes[name] = found.sent[0]
            seconds[name].append(max(found.seconds))
    alone = seconds["one process"]
    ratios = {
        name: statistics.median(mine / one for mine, one in zip(times, alone, strict=True))
        for name, times in seconds.items()
    }
    tiny = {
        name: max(run(world, f"{TINY} {BASE} {flags}", 10).seconds)
        for name, (world, flags) in list(CONTENDERS.items())[:2]
    }
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": SIZES,
        "seconds": {name: [round(value, 4) for value in times] for name, times in seconds.items()},
        "ratio_to_one_process": {name: round(value, 3) for name, value in ratios.items()},
        "bytes_sent_by_rank_0": volumes,
        "bytes_needed": {name: minimum_volume(name) for name in volumes if minimum_volume(name)},
        "idle_share_of_two_equal_stages": bubbles(arguments.rounds, arguments.steps),
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
