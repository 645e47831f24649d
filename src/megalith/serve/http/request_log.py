"""What the console shows of requests: Megatron's lines of `PUT /api`, and one access line for each request.

Everything that a client chose is escaped: it cannot add lines or colours. Keys are never shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from megalith.serve.http.strict_json import printable

_LONGEST = 10_000
_QUIET = ("/health", "/v1/health", "/metrics")


class RequestLog:
    """Writes the lines.

    Args:
        say: takes one line.
        prompts: whether the requests of `PUT /api` are shown whole.
    """

    def __init__(self, say: Callable[[str], None], *, prompts: bool = True) -> None:
        self._say, self._prompts = say, prompts

    def megatron_request(self, client: str, request: Mapping[str, Any]) -> None:
        """Who asked and what, before it is answered, as Megatron prints it."""
        if not self._prompts:
            return
        self._say(f"request IP: {printable(client)}")
        self._say(printable(json.dumps(request), _LONGEST))  # JSON in ASCII: one line, control characters escaped
        self._say(f"start time:  {datetime.now()}")

    def access(self, method: str, path: str, status: int, client: str, seconds: float) -> None:
        """One line for a request that is done, as Megatron's web server has it; health checks only if they fail."""
        if path in _QUIET and status == 200:
            return
        now = datetime.now().strftime("%d/%b/%Y %H:%M:%S")
        shown = printable(path, 200).replace('"', "%22")
        self._say(f'{printable(client)} - - [{now}] "{printable(method)} {shown} HTTP/1.1" {status} {seconds:.3f}s')
