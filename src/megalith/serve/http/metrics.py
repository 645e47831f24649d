"""Counters in Prometheus' text format, version 0.0.4, and the lines that the console shows of requests."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from megalith.serve.engine import Stats
from megalith.serve.http.errors import printable

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PATHS = frozenset(
    {"/", "/api", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/openapi.json"}
)
"""Only these become labels: a client that makes paths up must not fill the memory."""


class Histogram:
    """How many values lie at or below each bound."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        below = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """What the server has done. Used from the event loop only."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.finished: defaultdict[str, int] = defaultdict(int)
        self.disconnects = 0
        self.active = 0
        self.seconds, self.first_token = Histogram(), Histogram()

    def served(self, method: str, path: str, status: int, seconds: float) -> None:
        known = path if path in _PATHS else "other"
        self.requests[method if len(method) < 8 else "other", known, status] += 1
        self.seconds.add(seconds)

    def text(self, stats: Stats) -> str:
        lines = ["# TYPE megalith_http_requests_total counter"]
        for (method, path, status), count in sorted(self.requests.items()):
            labels = f'method="{method}",path="{path}",status="{status}"'
            lines.append(f"megalith_http_requests_total{{{labels}}} {count}")
        lines.append("# TYPE megalith_samples_finished_total counter")
        for reason, count in sorted(self.finished.items()):
            lines.append(f'megalith_samples_finished_total{{reason="{reason}"}} {count}')
        for name, kind, value in (
            ("client_disconnects_total", "counter", self.disconnects),
            ("answers_active", "gauge", self.active),
            ("sequences_waiting", "gauge", stats.waiting),
            ("sequences_running", "gauge", stats.running),
            ("cache_blocks_used", "gauge", stats.blocks_used),
            ("cache_blocks", "gauge", stats.blocks),
            ("prompt_tokens_total", "counter", stats.prompt_tokens),
            ("generated_tokens_total", "counter", stats.generated_tokens),
            ("reused_tokens_total", "counter", stats.reused_tokens),
            ("preemptions_total", "counter", stats.preemptions),
        ):
            lines += [f"# TYPE megalith_{name} {kind}", f"megalith_{name} {value}"]
        lines += self.seconds.lines("megalith_http_request_seconds")
        lines += self.first_token.lines("megalith_time_to_first_token_seconds")
        return "\n".join(lines) + "\n"


_LONGEST = 10_000
_QUIET = ("/health", "/v1/health", "/metrics")


class RequestLog:
    """Megatron's lines of `PUT /api`, with the whole requests if `prompts`, and one access line for each request.

    Everything that a client chose is escaped: it cannot add lines or colours. Keys are never shown.
    """

    def __init__(self, say: Callable[[str], None], *, prompts: bool = True) -> None:
        self._say, self._prompts = say, prompts

    def megatron_request(self, client: str, request: Mapping[str, Any]) -> None:
        """Log the client and its request before it is answered, as Megatron prints it."""
        if not self._prompts:
            return
        self._say(f"request IP: {printable(client)}")
        self._say(printable(json.dumps(request), _LONGEST))  # JSON in ASCII: one line, control characters escaped
        self._say(f"start time:  {datetime.now()}")

    def access(self, method: str, path: str, status: int, client: str, seconds: float) -> None:
        """Log a finished request in one line, as Megatron's web server does; health checks only if they fail."""
        if path in _QUIET and status == 200:
            return
        now = datetime.now().strftime("%d/%b/%Y %H:%M:%S")
        shown = printable(path, 200).replace('"', "%22")
        self._say(f'{printable(client)} - - [{now}] "{printable(method)} {shown} HTTP/1.1" {status} {seconds:.3f}s')
