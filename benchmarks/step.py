"""Speed and memory of one training step of a GPT-2 124M-like model, against the machine and against Hugging Face.

    python benchmarks/step.py --out benchmarks/results/step-cpu.json     (make bench)

Contenders, on the same threads, dtype and token ids:
  megalith             `megalith.models.gpt.GPT` and `megalith.optim` as `megalith train` uses them: norm, clipping and
                       AdamW included; bf16 with fp32 main parameters, gradients and moments
  megalith-compiled    the same after `model.compile_blocks()` (only with --compile)
  huggingface          transformers' GPT2LMHeadModel with SDPA and torch's fused AdamW, without clipping; bf16 by
                       autocast over fp32 parameters (the same state as ours)
  huggingface-pure     (bf16 only) parameters, gradients and moments all in bf16: less state and less precision

On a processor without fast bf16 products a step of Hugging Face's in bf16 takes minutes: there it does not contend.

Each contender has a process of its own, as users run them, and they take their steps in turns.

The machine's peak is the best square matmul of 1024, 2048 and 4096 in the dtype. FLOPs of a step, counted once:
6 x non-embedding parameters x tokens + 6 x hidden x vocabulary x tokens (logits) + 12 x layers x hidden x sequence x
tokens (attention over the full square). Each round measures the peak and one step of each contender; a ratio is the
median over rounds of the ratio within a round. Memory is the peak resident set of a process of its own, less what the
process had before the model was built.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from turns import in_processes

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.kernels.cpu.process import keep_freed_memory
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.precision import product_dtype_on
from megalith.optim import build_optimizer

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 12, 768, 12, 512, 2, 50304
TOKENS = SEQUENCE * BATCH
STEP_FLOPS = (
    6 * LAYERS * 12 * HIDDEN**2 * TOKENS + 6 * HIDDEN * VOCABULARY * TOKENS + 12 * LAYERS * HIDDEN * SEQUENCE * TOKENS
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[], object]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50257, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def megalith_step(dtype: str, *, compiled: bool = False) -> Step:
    keep_freed_memory(1)  # as `megalith train` does
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPT(config, VOCABULARY, dtype=DTYPES[dtype])
    initialise(model, 1)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=dtype == "bf16"))
    if compiled:
        model.compile_blocks()
    tokens, labels = _batch()

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, labels_BS=labels).mean()
        loss.backward()
        optimizer.step(1e-4, 0.1)
        return float(loss.detach())

    return step


def huggingface_step(dtype: str, *, pure: bool = False) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    if pure:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens, _ = _batch()
    autocast = dtype == "bf16" and not pure

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def contenders(dtype: str, *, compiled: bool) -> dict[str, Callable[[], Step]]:
    table: dict[str, Callable[[], Step]] = {"megalith": functools.partial(megalith_step, dtype)}
    if compiled:
        table["megalith-compiled"] = functools.partial(megalith_step, dtype, compiled=True)
    if product_dtype_on("cpu", DTYPES[dtype]) != DTYPES[dtype]:
        return table
    table["huggingface"] = functools.partial(huggingface_step, dtype)
    if dtype == "bf16":
        table["huggingface-pure"] = functools.partial(huggingface_step, dtype, pure=True)
    return table


def build(contender: Callable[[], Step], threads: int) -> Step:
    """The step of a contender, in a process that has done nothing yet."""
    torch.set_num_threads(threads)
    return contender()


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak_flops(dtype: str, repeats: int = 3) -> float:
    """Best FLOP/s of square matmuls in the dtype, or in the one that Megalith multiplies it in."""
    best, multiplied = 0.0, product_dtype_on("cpu", DTYPES[dtype])
    for size in (1024, 2048, 4096):
        a, b = (torch.randn(size, size).to(multiplied) for _ in "ab")
        out = torch.empty_like(a)
        seconds = min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats + 1))  # noqa: B023
        best = max(best, 2 * size**3 / seconds)
    return best


def measure(dtype: str, rounds: int, threads: int, *, compiled: bool) -> dict[str, Any]:
    builders = {
        name: functools.partial(build, contender, threads)
        for name, contender in contenders(dtype, compiled=compiled).items()
    }
    with in_processes(builders) as steps:
        for step in steps.values():
            step(), step()  # warm up
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        peaks: list[float] = []
        for _ in range(rounds):
            peaks.append(peak_flops(dtype))
            for name, step in steps.items():
                seconds[name].append(_seconds(step))
    best = {name: STEP_FLOPS / min(values) / max(peaks) for name, values in seconds.items()}
    of_peak = {
        name: statistics.median(STEP_FLOPS / value / peak for value, peak in zip(values, peaks, strict=True))
        for name, values in seconds.items()
    }
    ours = min(
        (name for name in steps if name.startswith("megalith")), key=lambda name: statistics.median(seconds[name])
    )
    return {
        "peak_gflops": [round(peak / 1e9, 1) for peak in peaks],
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "share_of_peak": {name: round(value, 3) for name, value in of_peak.items()},
        "share_of_peak_best": {name: round(value, 3) for name, value in best.items()},
        "best_mode": ours,
        "speed_over": {
            name: round(statistics.median(b / a for a, b in zip(seconds[ours], values, strict=True)), 3)
            for name, values in seconds.items()
            if name.startswith("huggingface")
        },
    }


def _peak_resident_mib() -> float:
    """From /proc: what getrusage says of a child begins with the peak of its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark measures memory on Linux only")


def memory_of(dtype: str, name: str) -> float:
    """Peak resident MiB of building the contender and taking three steps, in this process."""
    before = _peak_resident_mib()
    step = contenders(dtype, compiled="compiled" in name)[name]()
    for _ in range(3):
        step()
    return _peak_resident_mib() - before


def _memory_in_child(dtype: str, name: str, threads: int) -> float:
    command = [sys.executable, __file__, "--memory-of", dtype, name, "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return round(float(done.stdout.strip().splitlines()[-1]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--compile", action="store_true", help="measure the compiled mode too (needs a C++ compiler)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--memory-of", nargs=2, metavar=("DTYPE", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory_of(*options.memory_of))
        return
    result: dict[str, Any] = {
        "what": __doc__,
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "threads": options.threads,
        "step_tflop": round(STEP_FLOPS / 1e12, 4),
    }
    for dtype in options.dtypes:
        result[dtype] = measure(dtype, options.rounds, options.threads, compiled=options.compile)
        result[dtype]["peak_memory_mib"] = {
            name: _memory_in_child(dtype, name, options.threads) for name in contenders(dtype, compiled=options.compile)
        }
        print(json.dumps({dtype: result[dtype]}, indent=1))
    result["load_after"] = os.getloadavg()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
