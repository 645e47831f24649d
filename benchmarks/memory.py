"""What saves memory, and what it costs: recomputation and the fused loss, each beside off and beside theory.

    python benchmarks/memory.py --out benchmarks/results/memory-cpu.json

Every contender runs in processes of its own: a few steps (forward and backward, no optimizer) of a small GPT in fp32
without dropout, or of the loss alone in bf16. Memory is the peak resident size of a process (VmHWM) whose allocator
gives back what is freed; time is measured in others, whose allocator is as it is. `saved_mib` is the peak of the
contender it is compared with less its own. The theory counts what is kept between the passes, with T tokens
a micro-batch, D hidden, H heads, S sequence, V vocabulary, 4 bytes a number:

    a layer with fused attention     17 T D      both inputs and outputs of norms 4, q k v 3, context 2, inside MLP 8
    a layer with unfused attention   + T H S     the weights
    recomputed core_attn             - T H S     in each layer but the one that is under way
    recomputed mlp                   - 8 T D     likewise; the output of its norm stays
    recomputed layernorm             - 2 T D     in each layer; with mlp - 2 T D more than that alone
    recomputed whole layers          - 16 T D    in each recomputed layer but the one that is under way
    fused loss, bf16                 - 12 T V    bytes: fp32 logits, their log-softmax, and the gradient of the logits

The optimizer's CPU offload moves what is on a GPU to the host; on a CPU there is nothing to move.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.nn.recompute import Recompute
from megalith.optim import build_optimizer

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY = 8, 256, 4, 1024, 512
LOSS_TOKENS, LOSS_VOCABULARY = 2048, 32768
MIB = 1024.0 * 1024.0
_TD, _THS = 4 * LENGTH * HIDDEN / MIB, 4 * LENGTH * HEADS * LENGTH / MIB


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        off: what it is compared with; empty for those.
        theory: MiB that it keeps less than that.
        recompute: what is recomputed.
        unfused: attention step by step.
    """

    off: str = ""
    theory: float = 0.0
    recompute: Recompute | None = None
    unfused: bool = False


def _parts(*names: str) -> Recompute:
    return Recompute(parts=frozenset(names))


CONTENDERS = {
    "unfused": Contender(unfused=True),
    "unfused, core_attn": Contender("unfused", (LAYERS - 1) * _THS, _parts("core_attn"), unfused=True),
    "fused": Contender(),
    "fused, layernorm": Contender("fused", 2 * LAYERS * _TD, _parts("layernorm")),
    "fused, mlp": Contender("fused", 8 * (LAYERS - 1) * _TD, _parts("mlp")),
    "fused, mlp and layernorm": Contender("fused", (10 * LAYERS - 8) * _TD, _parts("mlp", "layernorm")),
    "fused, half of the layers": Contender("fused", 16 * (LAYERS // 2 - 1) * _TD, Recompute("block", LAYERS // 2)),
    "fused, all layers": Contender("fused", 16 * (LAYERS - 1) * _TD, Recompute("uniform", 1)),
}
LOSSES = ("plain loss", "fused loss")


def _training(contender: Contender) -> Callable[[], None]:
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend="unfused" if contender.unfused else "fused",
    )
    model = GPT(config, VOCABULARY, recompute=contender.recompute)
    initialise(model, seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels_BS=tokens).mean().backward()

    return step


def _loss(name: str) -> Callable[[], None]:
    hidden = torch.randn(LOSS_TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(LOSS_VOCABULARY, HIDDEN).bfloat16())
    targets, buffer = torch.randint(0, LOSS_VOCABULARY, (LOSS_TOKENS,)), LogitsBuffer()

    def step() -> None:
        if name == "fused loss":
            losses = vocabulary_loss(hidden, weight, targets, None, buffer)
        else:
            losses = nn.functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")
        losses.mean().backward()
        hidden.grad = weight.grad = None

    return step


def _peak_resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark measures memory on Linux only")


def run_one(name: str, steps: int) -> dict[str, Any]:
    """Peak resident MiB and the seconds of each step but the first, in this process."""
    step = _loss(name) if name in LOSSES else _training(CONTENDERS[name])
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {"peak_mib": _peak_resident_mib(), "seconds": seconds[1:]}


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def _in_child(name: str, threads: int, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads), "--steps"]
    environment = {**os.environ, **environment}
    done = subprocess.run([*command, str(steps)], check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All contenders in turn, `--rounds` times; time over that of off is the median of the rounds' quotients."""
    names = [*CONTENDERS, *LOSSES]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            found[name].append(_in_child(name, options.threads, options.steps, {}))
    seconds = {name: [statistics.median(one["seconds"]) for one in runs] for name, runs in found.items()}
    peaks = {name: _in_child(name, options.threads, 1, GIVES_BACK)["peak_mib"] for name in names}
    theory = {name: (c.off, c.theory) for name, c in CONTENDERS.items()}
    theory["plain loss"] = ("", 0.0)
    theory["fused loss"] = ("plain loss", 12 * LOSS_TOKENS * LOSS_VOCABULARY / MIB)
    result: dict[str, Any] = {}
    for name, (off, wanted) in theory.items():
        result[name] = {"peak_mib": round(peaks[name]), "seconds": [round(value, 3) for value in seconds[name]]}
        if off:
            over = statistics.median(a / b for a, b in zip(seconds[name], seconds[off], strict=True))
            result[name] |= {
                "off": off,
                "saved_mib": round(peaks[off] - peaks[name]),
                "saved_mib_in_theory": round(wanted),
                "time_over_off": round(over, 2),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(run_one(options.one, options.steps)))
        return
    result = {
        "what": __doc__,
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "threads": options.threads,
        "contenders": measure(options),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
