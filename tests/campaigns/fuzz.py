"""Requests made from the API's description, spoiled ones and broken connections: no 5xx, no crash, health answers."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis.errors import Unsatisfiable

from ..e2e.test_serve import started
from ..e2e.warm import WarmProcess
from .material import TRAIN, prepare_data

VALID: list[tuple[str, str, dict[str, Any]]] = [
    ("PUT", "/api", {"prompts": ["bat bow"], "tokens_to_generate": 3, "logprobs": True, "top_k": 2}),
    ("POST", "/v1/completions", {"model": "c", "prompt": ["bat", "bow"], "max_tokens": 3, "n": 2, "logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": "bat bow", "max_tokens": 3, "stream": True, "stop": ["x"], "seed": 1}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "bat bow"}], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9},
    ),
]
NASTY: list[Any] = [
    *(None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "\ud800", "\0", "x" * 20_000, [], {}, [[]]),
    *([None] * 2000, {"a": {"a": {"a": 1}}}, "\u202e<script>", "../../etc/passwd", 0.1, "1", ["bat", 3], [1, 2, 3]),
]
_DEEP = b"[" * 100_000
_PATIENCE_SECONDS = 20.0
_HEALTH_SECONDS = 10.0


@dataclass
class Record:
    """What was asked and answered, by all threads."""

    port: int
    deadline: float
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, status: int | str, request: object, answer: str = "") -> None:
        """Count an answer; one of 500 and above is a finding."""
        self.counts[kind, str(status)] += 1
        if isinstance(status, int) and status >= 500:
            text = f"{kind}: {status} {answer[:200]}"
            self.findings.setdefault(text, f"{text} to {str(request)[:1000]}")

    @property
    def runs(self) -> bool:
        return time.monotonic() < self.deadline


def run(minutes: float, seed: int, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Fuzz a server for that long; returns the table and the findings."""
    prepare_data(folder)
    warm = WarmProcess(folder)
    made = warm.run([*TRAIN, "--train-iters", 4, "--save", "c", "--save-interval", 4], folder)
    assert made.code == 0, made.text
    serve = [folder / "c", "--port", 0, "--max-batch", 4, "--max-queue", 32]
    with started(warm, serve) as server:
        record = Record(server.port, time.monotonic() + 60 * minutes)
        workers: list[Callable[[Record, int], None]] = [_described, _spoiled, _raw]
        threads = [threading.Thread(target=_guarded, args=(worker, record, seed)) for worker in workers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not server.process.ended:
            _health(record)
            time.sleep(0.5)
        record.deadline = 0.0
        for thread in threads:
            thread.join()
        if not server.process.ended:
            server.process.send(signal.SIGTERM)
        code = server.end()
        if code != 0:
            record.findings["end"] = f"the server ended with {code}: {server.text[-2000:]}"
        for trace in server.text.split("Traceback (most recent call last)")[1:]:
            record.findings.setdefault(trace[-200:], f"a traceback on the console: {trace[:3000]}")
    warm.close()
    statuses = sorted({status for _, status in record.counts})
    kinds = sorted({kind for kind, _ in record.counts})
    table = [[kind, *(str(record.counts[kind, status]) for status in statuses)] for kind in kinds]
    return [["requests", *statuses], *table], list(record.findings.values())


def _guarded(worker: Callable[[Record, int], None], record: Record, seed: int) -> None:
    try:
        worker(record, seed)
    except Exception as error:
        record.findings[repr(error)] = f"{worker.__name__} of the campaign failed: {error!r}"


def _health(record: Record) -> None:
    began = time.monotonic()
    try:
        answer = httpx.get(f"http://127.0.0.1:{record.port}/health", timeout=_HEALTH_SECONDS)
        record.note("health", answer.status_code, "/health", answer.text)
        if answer.status_code != 200:
            record.findings["health"] = f"/health answered {answer.status_code}"
    except httpx.HTTPError as error:
        waited = time.monotonic() - began
        record.findings["health"] = f"/health did not answer within {waited:.1f} s: {error!r}"


def _described(record: Record, seed: int) -> None:
    """Requests made from the description of the API, good and bad."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{record.port}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    chance = random.Random(f"described {seed}")
    while record.runs:
        _ask_described(record, chance.choice(operations), chance.choice(["positive", "negative"]), chance)


def _ask_described(record: Record, operation: Any, mode: str, chance: random.Random) -> None:
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @with_seed(chance.randrange(2**32))
    @settings(
        max_examples=20, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        if record.runs:
            _send(record, f"described, {mode}", case)

    with suppress(Unsatisfiable):  # a GET without parameters has no bad requests
        ask()


def _send(record: Record, kind: str, case: Any) -> None:
    try:
        answer = case.call(base_url=f"http://127.0.0.1:{record.port}", timeout=_PATIENCE_SECONDS)
    except Exception as error:  # the client's own: a header that it cannot send, its patience
        record.note(kind, f"not sent or left ({type(error).__name__})", case)
        return
    record.note(kind, answer.status_code, f"{case.method} {case.path} {case.body!r}", answer.text)


def _spoiled(record: Record, seed: int) -> None:
    """Valid requests with a value, a key or bytes changed; some clients leave in the middle of a stream."""
    chance = random.Random(f"spoiled {seed}")
    with httpx.Client(base_url=f"http://127.0.0.1:{record.port}", timeout=_PATIENCE_SECONDS) as client:
        while record.runs:
            method, path, valid = chance.choice(VALID)
            body = json.loads(json.dumps(valid))
            for _ in range(chance.randint(0, 2)):
                _spoil(body, chance)
            content = _spoil_bytes(json.dumps(body).encode("utf-8", "surrogatepass"), chance)
            kinds = ["application/json"] * 8 + ["text/plain", "", "application/json; charset=utf-16"]
            headers = {"Content-Type": chance.choice(kinds)}
            try:
                with client.stream(method, path, content=content, headers=headers) as answer:
                    if chance.random() < 0.2:
                        record.note("spoiled, left", answer.status_code, content)
                        continue
                    record.note("spoiled", answer.status_code, content, answer.read().decode("utf-8", "replace"))
            except httpx.HTTPError as error:
                record.note("spoiled", type(error).__name__, content)


def _spoil(body: Any, chance: random.Random) -> None:
    """Change, remove or add a value somewhere in an object."""
    while True:
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(body[key], (dict, list)) and body[key] and chance.random() < 0.5:
            body = body[key]
            continue
        act = chance.random()
        if act < 0.15:
            del body[key]
        elif act < 0.3 and isinstance(body, dict):
            body[chance.choice(["n", "best_of", "echo", "logit_bias", "tools", "\0", "stop", "suffix"])] = _nasty(
                chance
            )
        else:
            body[key] = _nasty(chance)
        return


def _nasty(chance: random.Random) -> Any:
    return json.loads(json.dumps(chance.choice(NASTY)))


def _spoil_bytes(content: bytes, chance: random.Random) -> bytes:
    act = chance.random()
    if act < 0.7:
        return content
    if act < 0.8:
        return content[: chance.randrange(len(content) + 1)]
    if act < 0.82:
        return _DEEP
    changed = bytearray(content)
    for _ in range(chance.randint(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _raw(record: Record, seed: int) -> None:
    """Connections that break the protocol, or off."""
    chance = random.Random(f"raw {seed}")
    body = json.dumps(VALID[1][2]).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    requests = [
        head + length + b"\r\n" + body,
        head + b"Content-Length: 1000000\r\n\r\n" + body,
        head + b"Content-Length: -1\r\n\r\n" + body,
        head + length + b"Transfer-Encoding: chunked\r\n\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body,
        head + b"X: y\r\n" * 5000 + length + b"\r\n" + body,
        head + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        (head + length + b"\r\n" + body) * 20,
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ]
    while record.runs:
        request = chance.choice([*requests, chance.randbytes(chance.randint(0, 2000))])
        if chance.random() < 0.3:
            request = request[: chance.randrange(len(request) + 1)]
        answer = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", record.port), timeout=2) as connection:
            connection.sendall(request)
            if chance.random() < 0.7:
                answer = connection.recv(65536)
        words = answer.split(b" ", 2)
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else "none"
        record.note("raw", status, request[:300], answer.decode("utf-8", "replace"))
