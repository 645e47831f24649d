"""A server in a process of its own and its clients, for `benchmarks/serve.py`: what HTTP adds, and latency under load.

The server is the real one (uvicorn, FastAPI, the engine's thread), with the model of the benchmark. The clients are
coroutines of the calling process that stream `/v1/completions` and note when each token comes. What HTTP adds is told
from an engine without it, in a process that was started just like the server's: the threads of tensor operations wait
alike in both. In the benchmark's own process they spin, as the peer's do, which alone is worth more than all of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from megalith.cli.threads import limit_spinning
from megalith.kernels.cpu.process import keep_freed_memory

if TYPE_CHECKING:
    from megalith.serve.engine import Engine
    from megalith.serve.request import Request

_SECONDS_TO_START = 120.0
_SECONDS_BETWEEN_THREADS = 0.001  # as `megalith serve` sets it


@dataclass
class Served:
    """When a request came and when each of its tokens did, in seconds since the start.

    Attributes:
        came: when it was due; a client that was late has the delay counted.
    """

    came: float
    tokens: list[float] = field(default_factory=list)


def _serve(build: Callable[[], Engine], context_length: int, connection: Any) -> None:
    """The process of the server."""
    from megalith.serve.http.app import build_app
    from megalith.serve.http.metrics import RequestLog
    from megalith.serve.http.server import bind, serve
    from megalith.serve.http.service import Service
    from megalith.serve.http.settings import Limits, ServerSettings
    from megalith.serve.worker import Worker

    keep_freed_memory(1)  # as `megalith serve` does
    engine = build()
    settings = ServerSettings(port=0, log_prompts=False, limits=Limits(drain_seconds=0.0))
    listener = bind(settings)
    sys.setswitchinterval(_SECONDS_BETWEEN_THREADS)

    async def run() -> None:
        worker = Worker(engine).start()
        silent = RequestLog(lambda _: None, prompts=False)
        service = Service(worker, engine.tokenizer, context_length, settings, silent)
        app, ready = build_app(service), [str(listener.getsockname()[1])]  # it is said when clients can connect
        await serve(app, service, listener, failed=worker.failed, say=connection.send, greeting=ready)
        worker.close()

    asyncio.run(run())


Found = TypeVar("Found")


def _compute(build: Callable[[], Engine], direct: Callable[[Engine, Sequence[Request]], Any], connection: Any) -> None:
    """The process of an engine without a server."""
    keep_freed_memory(1)
    engine = build()
    connection.send("ready")
    while True:
        connection.send(direct(engine, connection.recv()))


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process like that of `megalith serve`; yields the connection to it."""
    limit_spinning(1, "10000")  # the process inherits it
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, there))
    process.start()
    try:
        assert here.poll(_SECONDS_TO_START), "the process does not start"
        yield here
    finally:
        process.terminate()
        process.join(10)
        process.kill()


@contextmanager
def server(build: Callable[[], Engine], context_length: int) -> Iterator[int]:
    """A server with the engine that `build` makes in its process; yields its port."""
    with _process(_serve, build, context_length) as connection:
        yield int(connection.recv())


@contextmanager
def engine_apart(
    build: Callable[[], Engine], direct: Callable[[Engine, Sequence[Request]], Found]
) -> Iterator[Callable[[Sequence[Request]], Found]]:
    """The same engine in such a process without a server; yields what does `direct` there."""

    def ask(requests: Sequence[Request]) -> Found:
        connection.send(requests)
        found: Found = connection.recv()
        return found

    with _process(_compute, build, direct) as connection:
        connection.recv()
        yield ask


async def _ask(port: int, request: Request, due: float, began: float) -> Served:
    """Stream one answer."""
    await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    served = Served(due)
    while line := await reader.readline():
        if line.startswith(b'data: {"') and b'"finish_reason":null' in line:
            served.tokens.append(time.perf_counter() - began)
    writer.close()
    assert len(served.tokens) == request.max_new_tokens, f"{len(served.tokens)} of {request.max_new_tokens} tokens came"
    return served


def ask_all(port: int, requests: Sequence[Request], dues: Sequence[float]) -> list[Served]:
    """Ask each request when it is due, whatever became of the others."""

    async def run() -> list[Served]:
        began = time.perf_counter()
        asked = (_ask(port, request, due, began) for request, due in zip(requests, dues, strict=True))
        return list(await asyncio.gather(*asked))

    return asyncio.run(run())


async def _exchange(port: int, method: str, path: str, body: bytes = b"") -> int:
    """One request on a connection of its own; its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


def crowd(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """So many clients at once, each of which comes again every half second until it is served; `/health` meanwhile.

    After so many seconds those who were not served go away.
    """
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
    statuses, health = list[int](), list[float]()

    async def one(end: float) -> None:
        while time.perf_counter() < end:
            statuses.append(await _exchange(port, "POST", "/v1/completions", body))
            if statuses[-1] == 200:
                return
            await asyncio.sleep(0.5)

    async def look() -> None:
        while True:
            began = time.perf_counter()
            assert await _exchange(port, "GET", "/health") == 200
            health.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    async def run() -> float:
        began = time.perf_counter()
        looking = asyncio.ensure_future(look())
        await asyncio.gather(*(one(began + seconds) for _ in range(clients)))
        looking.cancel()
        return time.perf_counter() - began

    took = asyncio.run(run())
    return {
        "clients": clients,
        "served": statuses.count(200),
        "refused": statuses.count(429),
        "others": len(statuses) - statuses.count(200) - statuses.count(429),
        "seconds": round(took, 2),
        "looks": len(health),
        "health_seconds": percentiles(health, (50, 99, 100)),
    }


def poisson(count: int, per_second: float, seed: int) -> list[float]:
    """When so many clients come who know nothing of one another."""
    chance, now, dues = Random(seed), 0.0, list[float]()
    for _ in range(count):
        dues.append(now)
        now += chance.expovariate(per_second)
    return dues


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Of the values, those below which so many percent of them are."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 5) for p in wanted}


def latencies(served: Sequence[Served]) -> dict[str, list[float]]:
    """Seconds to the first token, between tokens, and to the last one."""
    return {
        "first_token_seconds": [row.tokens[0] - row.came for row in served],
        "between_tokens_seconds": [b - a for row in served for a, b in zip(row.tokens, row.tokens[1:], strict=False)],
        "whole_answer_seconds": [row.tokens[-1] - row.came for row in served],
    }


def draw(path: Path, loads: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Percentiles of the latencies, a row of pictures for each size of model, a line for each load.

    Args:
        loads: size -> load -> kind of latency -> seconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = {"first_token_seconds": "to the first token", "between_tokens_seconds": "between tokens"}
    figure = Figure(figsize=(9, 3.2 * len(loads)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(loads), len(kinds), squeeze=False)
    for row, (size, by_load) in zip(grid, loads.items(), strict=True):
        for axes, (kind, title) in zip(row, kinds.items(), strict=True):
            for load, found in by_load.items():
                ordered = sorted(found[kind])
                shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
                axes.plot(shares, [1000 * value for value in ordered], label=load, drawstyle="steps-pre")
            axes.set(title=f"{size}: {title}", xlabel="percentile", ylabel="milliseconds", yscale="log", xlim=(0, 100))
            axes.grid(alpha=0.3)
            axes.legend(title="load", fontsize=8)
    figure.savefig(path, dpi=110)
