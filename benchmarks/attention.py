"""The blocked attention kernel against torch's SDPA on a CPU: forward and backward, median of paired ratios.

python benchmarks/attention.py --out benchmarks/results/attention-cpu.json
python benchmarks/attention.py --naive --rounds 8 --out benchmarks/results/attention-naive-cpu.json

With --naive: attention step by step, with all its scores in memory, against SDPA, for 512 to 8192 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.kernels.cpu.attention import blocked_causal_attention
from megalith.nn.attend import attend_fused, attend_unfused

KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": lambda q, k, v: attend_fused(q, k, v, 0.0),
    "blocked": blocked_causal_attention,
    "naive": lambda q, k, v: attend_unfused(q, k, v, 0.0, softmax_in_fp32=True),
}


def _milliseconds(kernel: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    started = time.perf_counter()
    out = kernel(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return 1e3 * (middle - started), 1e3 * (time.perf_counter() - middle)


def measure(length: int, batch: int, dtype: torch.dtype, rounds: int, other: str, heads: int) -> dict[str, Any]:
    """SDPA and another kernel in turn, on [length, batch, heads, 64]."""
    inputs = [torch.randn(length, batch, heads, 64).to(dtype).requires_grad_() for _ in "qkv"]
    times: dict[str, list[tuple[float, float]]] = {"sdpa": [], other: []}
    for _ in range(rounds + 1):
        for name, values in times.items():
            values.append(_milliseconds(KERNELS[name], inputs))
    pairs = list(zip(times["sdpa"][1:], times[other][1:], strict=True))
    return {
        "forward_ms": {name: round(statistics.median(t[0] for t in values[1:]), 2) for name, values in times.items()},
        "backward_ms": {name: round(statistics.median(t[1] for t in values[1:]), 2) for name, values in times.items()},
        "speed_over_sdpa_forward": round(statistics.median(a[0] / b[0] for a, b in pairs), 2),
        "speed_over_sdpa_backward": round(statistics.median(a[1] / b[1] for a, b in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--naive", action="store_true", help="attention step by step against SDPA instead")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"what": __doc__, "torch": torch.__version__, "threads": options.threads}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if options.naive:
            for length in (512, 1024, 2048, 4096, 8192):
                rounds = max(1, options.rounds * 512 // length)
                result[f"{name} S={length} B=1 H=2"] = measure(length, 1, dtype, rounds, "naive", heads=2)
            continue
        for length, batch in ((512, 2), (1024, 1), (2048, 1)):
            result[f"{name} S={length} B={batch}"] = measure(length, batch, dtype, options.rounds, "blocked", heads=12)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
