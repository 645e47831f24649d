"""Saves beside the training by several ranks: what one cannot do is told to all at the end of the same step (F25)."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore, PendingSave, Staging
from megalith.checkpoint.files import commit
from megalith.distributed.context import ParallelContext
from megalith.errors import MegalithError
from megalith.layout import Layout
from megalith.train.consensus import NeverStop, RankConsensus

ROWS = 4


def two() -> ParallelContext:
    return ParallelContext.create(Layout(dp=2), torch.device("cpu"))


def half(ctx: ParallelContext, value: float) -> CheckpointContent:
    tensor = torch.full((2, 3), value)
    return CheckpointContent([Chunk("w", tensor, (2 * ctx.world.index, 0), (ROWS, 3))], {}, {"iteration": 20})


def steps_until(pending: PendingSave, ctx: ParallelContext, wanted: Callable[[RankConsensus], bool]) -> int:
    """Steps of a training that does nothing, until all agree on what is wanted; their number."""
    consensus, steps = RankConsensus(NeverStop(), ctx, async_saver=pending), 0
    while steps == 0 or not wanted(consensus):
        time.sleep(0.01)
        consensus.sum_over_ranks(torch.zeros(2))
        steps += 1
    return steps


def fail_on_rank_1(folder: str, point: str) -> tuple[str, int]:
    ctx = two()

    def full(at: str) -> None:
        if at == point and ctx.world.index == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if at == "mid_save" and ctx.world.index == 0:
            time.sleep(0.3)  # it need not be waited for

    pending = DirectoryStore(folder, ctx).schedule(20, half(ctx, 20.0), {}, staging=Staging(), on_stage=full)
    steps = steps_until(pending, ctx, lambda agreed: agreed.save_failed)
    try:
        pending.advance(failed=True)
    except MegalithError as error:
        return str(error), steps
    raise AssertionError("nothing was said")


@pytest.mark.parametrize("point", ["mid_save", "pre_commit"])
def test_a_full_disk_of_one_rank_is_told_by_all_at_the_same_step(ranks: Any, tmp_path: Path, point: str) -> None:
    (first, steps), (second, other_steps) = ranks.run(2, fail_on_rank_1, str(tmp_path), point)
    assert first == second and steps == other_steps
    assert first.startswith("rank 1 on ") and re.search(r"No space left on device.*\d+ bytes .*\d+ bytes", first)
    assert list(tmp_path.iterdir()) == []


def no_room_on_rank_1(folder: str, beside: bool) -> str:
    ctx = two()
    store, content = DirectoryStore(folder, ctx), half(ctx, 20.0)
    room, rank = commit.free_bytes, ctx.world.index
    commit.free_bytes = lambda path: 1000 if rank == 1 else room(path)
    try:
        if beside:
            pending = store.schedule(20, content, {}, staging=Staging())
            while pending.advance() is None:
                pass
        else:
            store.save(20, content, {})
    except MegalithError as error:
        return str(error)
    finally:
        commit.free_bytes = room
    raise AssertionError("nothing was said")


@pytest.mark.parametrize("beside", [False, True])
def test_too_little_space_on_another_host_is_told_by_all(ranks: Any, tmp_path: Path, beside: bool) -> None:
    first, second = ranks.run(2, no_room_on_rank_1, str(tmp_path), beside)
    assert first == second and first.startswith("rank 1 on ") and "1000 bytes (0.00 GiB) are free" in first
    assert list(tmp_path.iterdir()) == []


def slow_rank_1(folder: str) -> tuple[int, bool, int]:
    ctx = two()

    def slow(at: str) -> None:
        if at == "mid_save" and ctx.world.index == 1:
            time.sleep(0.5)

    content = half(ctx, 20.0)
    store = DirectoryStore(folder, ctx)
    pending = store.schedule(20, content, {}, staging=Staging(), on_stage=slow)
    content.chunks[0].tensor.fill_(-1.0)
    steps = steps_until(pending, ctx, lambda agreed: not agreed.save_in_progress)
    hidden = store.iterations() == []
    assert pending.advance() is None
    steps_until(pending, ctx, lambda agreed: not agreed.save_in_progress)
    report = pending.advance()
    assert report is not None and report.write_seconds > 0.0 and report.waited_seconds < 0.4
    return steps, hidden, report.bytes


def test_a_slow_rank_stops_no_step(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, slow_rank_1, str(tmp_path))
    assert first == second
    steps, hidden, _ = first
    assert steps >= 10 and hidden
    tensor = torch.zeros(ROWS, 3)
    DirectoryStore(tmp_path).load(20, CheckpointContent([Chunk("w", tensor, (0, 0), (ROWS, 3))]))
    assert torch.equal(tensor, torch.full((ROWS, 3), 20.0))
