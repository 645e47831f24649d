"""Looking after the ranks that share a served model: one that is stopped hangs every step without an error.

A broken connection is an error of the step that meets it. A process that is stopped (SIGSTOP, a debugger, a frozen
container) keeps its connections, and a machine that is cut off says nothing: of these the first rank learns here, long
before the timeout of a collective, and clients are told instead of left waiting.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from megalith.distributed.watch import Watch

_SECONDS_BETWEEN_LOOKS = 0.5
_PATIENCE_SECONDS = 3.0
"""How long a process may be stopped: Ctrl-Z stops all of a terminal, and `fg` does not wake them at once."""

_FOR_GOOD = ("dead", "left")


class Fallible(Protocol):
    """Whoever cannot answer without the other ranks."""

    def fail(self, message: str) -> None:
        """Tell all who wait."""
        ...


async def look_after(watch: Watch, worker: Fallible, patience: float = _PATIENCE_SECONDS) -> None:
    """Have a worker fail when a rank is gone, or has been stopped or silent for long; returns then.

    Args:
        watch: of this rank.
        worker: fails.
        patience: seconds that a rank may be stopped or silent.
    """
    since: float | None = None
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        found = await asyncio.to_thread(watch.absent)
        if found is None:
            since = None
            continue
        view, cause = found
        since = since or time.monotonic()
        if view.state in _FOR_GOOD or time.monotonic() - since >= patience:
            worker.fail(cause)
            watch.dismiss(view)
            return
