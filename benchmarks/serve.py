"""Latency of `megalith serve` under load, and a crowd of clients that comes at once; started and asked as users do.

    python benchmarks/serve.py --out benchmarks/results/serve-load.json --plot benchmarks/results/serve-load.png

  load    32 clients who come at random (Poisson) with 0.5, 0.7 and 0.9 of the tokens per second that 16 who come
          together get: percentiles of the time to the first token, between tokens, and to the last; --plot
  crowd   500 clients who come at once, and again every half second until they are served, to a server of the 1M model
          that works on 4 and lets 8 wait: what `/health` takes meanwhile; those who are not served leave after a minute

Weights are the initial ones, answers greedy without an end, clients on the same cores. Tokens per second against other
programs: `benchmarks/commands.py decode`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from commands import train_command
from contender import run_seconds

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from generate import Asked, Server, requests, stream

SIZES = {
    "1M": (2, 16, 2, 64, 1, 50304),
    "10M": (6, 128, 4, 64, 1, 50304),
    "124M": (12, 768, 12, 64, 1, 50304),
}
LOADS, CLIENTS = (0.5, 0.7, 0.9), 32
CROWD, CROWD_SECONDS = 500, 60.0

Latencies = dict[str, list[float]]
"""Kind of latency -> seconds."""


def save_checkpoint(size: str, folder: Path) -> Path:
    """Write a checkpoint of a context of 1024 by one short step of `megalith train`."""
    saved = folder / size
    command = train_command(SIZES[size], "fp32", "--save", str(saved), "--save-interval", "1", "--no-save-optim")
    command[command.index("--train-iters") + 1] = "1"
    command[command.index("--max-position-embeddings") + 1] = "1024"
    run_seconds(command)
    return saved


async def at(due: float, began: float, port: int, asked: Asked) -> tuple[float, list[float]]:
    """Stream one answer from when it is due; a client that was late has the delay counted."""
    await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
    return began + due, await stream(port, asked)


async def at_all(dues: Sequence[float], port: int, asked: Sequence[Asked]) -> list[tuple[float, list[float]]]:
    began = time.perf_counter()
    return await asyncio.gather(*(at(due, began, port, one) for due, one in zip(dues, asked, strict=True)))


def poisson(count: int, per_second: float, seed: int) -> list[float]:
    """Return when so many clients come who know nothing of one another."""
    chance, now, dues = Random(seed), 0.0, list[float]()
    for _ in range(count):
        dues.append(now)
        now += chance.expovariate(per_second)
    return dues


def load(port: int) -> dict[str, Latencies]:
    """Return the latencies of each load."""
    together = requests(16, 1)
    for _ in range(2):  # the first round warms up
        began = time.perf_counter()
        asyncio.run(at_all([0.0] * 16, port, together))
        seconds = time.perf_counter() - began
        together = requests(16, 2)
    per_second = sum(count for _, count in together) / seconds
    found = {}
    for number, share in enumerate(LOADS):
        asked = requests(CLIENTS, 3 + number)
        dues = poisson(CLIENTS, share * per_second / statistics.mean(count for _, count in asked), number)
        rows = asyncio.run(at_all(dues, port, asked))
        found[f"{share:g}"] = {
            "first_token_seconds": [times[0] - came for came, times in rows],
            "between_tokens_seconds": [b - a for _, times in rows for a, b in zip(times, times[1:], strict=False)],
            "whole_answer_seconds": [times[-1] - came for came, times in rows],
        }
    return found


async def exchange(port: int, method: str, path: str, body: bytes = b"") -> int:
    """Send one request on a connection of its own; return its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def crowd(port: int) -> dict[str, Any]:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
    statuses, health, began = list[int](), list[float](), time.perf_counter()

    async def come() -> None:
        while time.perf_counter() < began + CROWD_SECONDS:
            statuses.append(await exchange(port, "POST", "/v1/completions", body))
            if statuses[-1] == 200:
                return
            await asyncio.sleep(0.5)

    async def look() -> None:
        while True:
            since = time.perf_counter()
            assert await exchange(port, "GET", "/health") == 200
            health.append(time.perf_counter() - since)
            await asyncio.sleep(0.05)

    looking = asyncio.ensure_future(look())
    await asyncio.gather(*(come() for _ in range(CROWD)))
    looking.cancel()
    return {
        "clients": CROWD,
        "served": statuses.count(200),
        "refused": statuses.count(429),
        "others": len(statuses) - statuses.count(200) - statuses.count(429),
        "seconds": round(time.perf_counter() - began, 2),
        "looks": len(health),
        "health_seconds": percentiles(health, (50, 99, 100)),
    }


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 5) for p in wanted}


def draw(path: Path, loads: dict[str, dict[str, Latencies]]) -> None:
    """Draw the percentiles of the latencies, a row of pictures for each size of model, a line for each load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = {"first_token_seconds": "to the first token", "between_tokens_seconds": "between tokens"}
    figure = Figure(figsize=(9, 3.2 * len(loads)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(loads), len(kinds), squeeze=False)
    for row, (size, by_load) in zip(grid, loads.items(), strict=True):
        for axes, (kind, title) in zip(row, kinds.items(), strict=True):
            for share, found in by_load.items():
                ordered = sorted(found[kind])
                shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
                axes.plot(shares, [1000 * value for value in ordered], label=share, drawstyle="steps-pre")
            axes.set(title=f"{size}: {title}", xlabel="percentile", ylabel="milliseconds", yscale="log", xlim=(0, 100))
            axes.grid(alpha=0.3)
            axes.legend(title="load", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="may be repeated; 10M and 124M by default")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", choices=("load", "crowd"), help="one part of it")
    parser.add_argument("--out", type=Path, help="the figures")
    parser.add_argument("--plot", type=Path, help="a PNG of the latencies under load")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "load_before": os.getloadavg()[0]}
    latencies: dict[str, dict[str, Latencies]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "load":
            few = ("--max-batch", "4", "--max-queue", "8")
            with Server(save_checkpoint("1M", folder), options.precision, *few) as port:
                results["crowd"] = asyncio.run(crowd(port))
            print("crowd", json.dumps(results["crowd"], indent=1), flush=True)
        for size in (options.size or ["10M", "124M"]) if options.only != "crowd" else ():
            with Server(save_checkpoint(size, folder), options.precision) as port:
                latencies[size] = load(port)
            rounded = {share: {k: percentiles(v) for k, v in row.items()} for share, row in latencies[size].items()}
            results[size] = {"load": rounded}
            print(size, json.dumps(rounded, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot and latencies:
        draw(options.plot, latencies)


if __name__ == "__main__":
    main()
