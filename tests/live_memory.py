"""Bytes of the live tensors of a training on CPUs, beside which plans are tested."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from megalith.assemble.training import build_run
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.plan.measure import MemoryTrace
from megalith.train.step import train_step


def live_bytes(words: Sequence[str], rank: int = 0, ranks: int = 1) -> tuple[int, int]:
    """Train two steps as a rank of a joined group; return the bytes as the second step begins, and at its peak."""
    host = torch.device("cpu")
    run = load(list(words), {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})
    with MemoryTrace(host) as trace:
        context = ParallelContext.solo() if ranks == 1 else ParallelContext.create(run.layout, host)
        built = build_run(run, context).run
        for _ in range(2):
            start = len(trace.events)
            train_step(built.state, iter(built.train), run.num_micro_batches)
    sizes = [trace.tensors[n].size if n >= 0 else -trace.tensors[~n].size for n in trace.events]
    live = list(accumulate(sizes, initial=0))
    return live[start], max(live[start:])
