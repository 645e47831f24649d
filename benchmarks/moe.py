"""A mixture of experts beside its dense twin: time of a training step, and what its dispatchers move.

    python benchmarks/moe.py --out benchmarks/results/moe-cpu.json

The mixture has 8 experts, of which each token goes to 2, and a balancing loss; the dense twin has feed-forward layers
of the width of two experts, so that a token meets equally many parameters. Both are `GPT` with `megalith.optim` as
`megalith train` uses them (norm, clipping and AdamW included: the mixture has more parameters to update), on the same
token ids. Each round takes one step of each, the order changing; the ratio is the median over rounds of the ratio
within a round. `--profile` prints where the time of a step of the mixture goes.

Volume: hidden states that the ranks receive in the dispatch of one layer and on the way home, forward, counted at
torch.distributed, against the least: of each token one row to each other rank that has experts of it, and one back.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from turns import seconds_in_turns

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer
from megalith.parallel.experts import DISPATCHERS
from megalith.train.moe import begin_step

LAYERS, HIDDEN, HEADS, EXPERT_SIZE, EXPERTS, CHOICES, VOCABULARY = 4, 512, 8, 1024, 8, 2, 8192
SEQUENCE, BATCH = 512, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = (2, 4, 8)
TOKENS_OF_A_RANK = 512


def _step(dtype: str, *, mixture: bool) -> Callable[[], float]:
    """A step of training and its loss."""
    experts: dict[str, Any] = {
        "num_experts": EXPERTS,
        "moe_ffn_hidden_size": EXPERT_SIZE,
        "moe_router_topk": CHOICES,
        "moe_aux_loss_coeff": (0.01,),
    }
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        ffn_hidden_size=CHOICES * EXPERT_SIZE,
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(experts if mixture else {}),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(config, VOCABULARY, dtype=DTYPES[dtype], device=device)
    initialise(model, 1)
    model.train()
    precision = PrecisionConfig(bf16=dtype == "bf16")
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> float:
        optimizer.zero_grad(1)
        begin_step([model], 1.0)
        loss = model(ids[:, :-1].contiguous(), labels_BS=ids[:, 1:].contiguous()).mean()
        loss.backward()
        optimizer.step(1e-4, 0.1)
        return float(loss.detach())

    return step


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """The two models in turns."""
    steps = {"mixture": _step(dtype, mixture=True), "dense": _step(dtype, mixture=False)}
    times = seconds_in_turns(steps, rounds)
    ratios = [mine / dense for mine, dense in zip(times["mixture"], times["dense"], strict=True)]
    return {
        "seconds": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def profile(dtype: str) -> str:
    """A table of where the time of a step of the mixture goes."""
    step = _step(dtype, mixture=True)
    step()
    with torch.profiler.profile() as profiled:
        step()
    table: str = profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
    return table


def _count_rows(rank: int, size: int, kind: str, store: str, found: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    received = 0
    exchange, gather, scatter = comm.all_to_all_rows, comm.start_all_gather, comm.reduce_scatter

    def rows(number: int, x: Tensor) -> None:
        nonlocal received
        received += number if x.shape[-1] == HIDDEN else 0

    def exchanged(x: Tensor, axis: Any, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        rows(sum(receive_counts) - receive_counts[axis.index], x)
        return exchange(x, axis, send_counts, receive_counts)

    def gathered(x: Tensor, axis: Any, *more: Any) -> Any:
        rows((axis.size - 1) * x.shape[0], x)
        return gather(x, axis, *more)

    def scattered(x: Tensor, axis: Any, *more: Any) -> Tensor:
        rows((axis.size - 1) * x.shape[0] // axis.size, x)
        return scatter(x, axis, *more)

    comm.all_to_all_rows, comm.start_all_gather, comm.reduce_scatter = exchanged, gathered, scattered
    axis = ParallelContext.create(Layout(dp=size, ep=size), torch.device("cpu")).ep
    generator = torch.Generator().manual_seed(rank)
    choices_TK = torch.rand(TOKENS_OF_A_RANK, EXPERTS, generator=generator).topk(CHOICES, dim=-1).indices
    ranks_TK = choices_TK // (EXPERTS // size)
    least = sum(int(((ranks_TK == other).any(-1)).sum()) for other in range(size) if other != rank)
    delivery = DISPATCHERS[kind](axis).deliver(
        torch.ones(TOKENS_OF_A_RANK, HIDDEN), choices_TK, torch.ones(TOKENS_OF_A_RANK, CHOICES), EXPERTS
    )
    delivery.home(delivery.rows_ND)
    found.put((received, 2 * least))
    dist.destroy_process_group()


def volume(kind: str, size: int) -> dict[str, Any]:
    """Rows that all ranks receive, and the least that they could."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_count_rows, args=(rank, size, kind, f"{folder}/store", found))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    received, least = (sum(values) for values in zip(*(found.get() for _ in ranks), strict=True))
    return {"ranks": size, "dispatcher": kind, "rows": received, "least": least, "ratio": round(received / least, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-volume", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    # Before anything computes in this process: its threads would not be in the forks.
    volumes = [] if arguments.no_volume else [volume(kind, size) for size in SIZES for kind in DISPATCHERS]
    torch.set_num_threads(arguments.threads)
    if arguments.profile:
        print(profile(arguments.dtypes[0]))
        return
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "threads": arguments.threads,
        "tokens": SEQUENCE * BATCH,
        "steps": {dtype: measure(dtype, arguments.rounds) for dtype in arguments.dtypes},
        "volume": volumes,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
