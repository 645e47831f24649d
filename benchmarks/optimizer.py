"""The optimizer's step against the memory: bytes that it must move over its time, as a share of a plain copy's speed.

    python benchmarks/optimizer.py --out benchmarks/results/optimizer-cpu.json

A step reads and writes each number once at best. Per parameter in fp32 AdamW reads gradient, weight and two moments and
writes weight and two moments: 28 bytes; with bf16 weights the rounded weight is written too: 30. What comes before the
update reads the gradients twice more (the norm; clipping reads and writes): those are counted as they are needed, one
read for the norm and one read and write for clipping, so that the whole step in fp32 moves 40 bytes per parameter.

Each round measures a copy of as many bytes (`Tensor.copy_` between two arrays larger than the caches) and one step of
each optimizer; the share is the median over rounds of the quotient within a round. Muon is bound by its products, not
by memory: its time is given beside AdamW's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.optim import build_optimizer
from megalith.optim.optimizer import Optimizer

LAYERS, HIDDEN, VOCABULARY = 6, 768, 8192
COPY_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Contender:
    """An optimizer over the same parameters.

    Attributes:
        config, precision: of it.
        moved: bytes per parameter of the whole step, gradient norm and clipping included.
    """

    config: OptimizerConfig
    precision: PrecisionConfig
    moved: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.bf16 else torch.float32


ROUNDED = OptimizerConfig(
    use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
)
BF16 = PrecisionConfig(bf16=True)
CONTENDERS = {
    "adamw fp32": Contender(OptimizerConfig(), PrecisionConfig(), moved=28 + 12),
    "adamw bf16": Contender(OptimizerConfig(), BF16, moved=30 + 12),
    "adamw bf16, rounded states": Contender(
        ROUNDED, PrecisionConfig(bf16=True, grad_reduce_in_bf16=True), moved=2 + 8 + 8 + 2 + 6
    ),
    "sgd fp32": Contender(OptimizerConfig(optimizer="sgd"), PrecisionConfig(), moved=20 + 12),
    "lion fp32": Contender(OptimizerConfig(optimizer="lion"), PrecisionConfig(), moved=20 + 12),
    "muon fp32": Contender(OptimizerConfig(optimizer="muon"), PrecisionConfig(), moved=20 + 12),
}


def _model(dtype: torch.dtype) -> nn.Module:
    """The matrices of a small GPT-2, with names that tell tables from layers."""
    torch.manual_seed(0)
    layers = {
        str(number): nn.ModuleDict(
            {
                "linear_qkv": nn.Linear(HIDDEN, 3 * HIDDEN),
                "linear_proj": nn.Linear(HIDDEN, HIDDEN),
                "linear_fc1": nn.Linear(HIDDEN, 4 * HIDDEN),
                "linear_fc2": nn.Linear(4 * HIDDEN, HIDDEN),
                "norm": nn.LayerNorm(HIDDEN),
            }
        )
        for number in range(LAYERS)
    }
    table = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCABULARY, HIDDEN)})
    return nn.ModuleDict({"embedding": table, "layers": nn.ModuleDict(layers)}).to(dtype)


def _prepared(contender: Contender) -> tuple[Optimizer, int]:
    """The optimizer with gradients in its memory, and the number of parameters."""
    model = _model(contender.dtype)
    optimizer = build_optimizer(model, contender.config, contender.precision)
    size = sum(parameter.numel() for parameter in model.parameters())
    return optimizer, size


def _seconds_of_a_step(optimizer: Optimizer) -> float:
    gradients: Any = optimizer.gradients
    gradients.begin()
    gradients._written.update(gradients._grad_of)  # as if every layer had written its gradient
    gradients.flat.fill_(1e-3)
    began = time.perf_counter()
    optimizer.step(1e-4, 0.1)
    return time.perf_counter() - began


def _copy_speed(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes per second that a copy reads and writes."""
    began = time.perf_counter()
    target.copy_(source)
    return 2 * source.numel() * source.element_size() / (time.perf_counter() - began)


def measure(rounds: int) -> dict[str, Any]:
    """Every contender beside a copy in each round; Muon, whose products take seconds, in two rounds."""
    source, target = torch.ones(COPY_ELEMENTS), torch.zeros(COPY_ELEMENTS)
    speeds: list[float] = []
    found: dict[str, dict[str, float]] = {}
    for name, contender in CONTENDERS.items():
        optimizer, size = _prepared(contender)
        times, shares = [], []
        _seconds_of_a_step(optimizer)  # warm-up
        for _ in range(2 if contender.config.optimizer == "muon" else rounds):
            speeds.append(max(_copy_speed(source, target) for _ in range(3)))
            times.append(_seconds_of_a_step(optimizer))
            shares.append(contender.moved * size / times[-1] / speeds[-1])
        found[name] = {
            "parameters": size,
            "milliseconds": round(1e3 * statistics.median(times), 2),
            "bytes_per_parameter": contender.moved,
            "share_of_copy": round(statistics.median(shares), 3),
        }
    return {"copy_gigabytes_per_second": round(statistics.median(speeds) / 1e9, 2), "optimizers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        **measure(arguments.rounds),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
