"""Ranks that share a served model and are missing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from megalith.distributed.board import Identity, Status
from megalith.distributed.watchdog import RankView
from megalith.serve import worker as workers


@dataclass
class _Watch:
    """Sees one state after the other; the last one for ever."""

    states: list[str]
    dismissed: list[str] = field(default_factory=list)

    def find_absent(self) -> tuple[RankView, str] | None:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return (RankView(Identity(1, "here", 1), Status(), state), f"rank 1 is {state}") if state else None

    def kill_stopped(self, view: RankView) -> None:
        self.dismissed.append(view.state)


class _Worker:
    def __init__(self) -> None:
        self.said: list[str] = []

    def fail(self, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize(
    ("states", "patience", "said"),
    [
        (["", "", "dead"], 60.0, "rank 1 is dead"),
        (["left"], 60.0, "rank 1 is left"),
        (["stopped"], 0.02, "rank 1 is stopped"),
        (["stopped", "", "stopped", "", "silent"], 0.02, "rank 1 is silent"),
    ],
)
def test_a_worker_fails_when_a_rank_is_gone(
    states: list[str], patience: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_SECONDS_BETWEEN_LOOKS", 0.005)
    watch, worker = _Watch(states), _Worker()
    asyncio.run(asyncio.wait_for(workers.look_after(cast("Any", watch), worker, patience), 30))
    assert worker.said == [said] and watch.dismissed == [said.rpartition(" ")[2]]


def test_a_rank_that_was_stopped_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SECONDS_BETWEEN_LOOKS", 0.001)
    watch, worker = _Watch(["stopped", "stopped", ""]), _Worker()

    async def run() -> None:
        looking = asyncio.ensure_future(workers.look_after(cast("Any", watch), worker, 3600.0))
        deadline = time.monotonic() + 30
        while len(watch.states) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        looking.cancel()

    asyncio.run(run())
    assert not worker.said
