"""From the configuration to the ranks of the run: where this process computes, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from megalith.assemble.facts import facts_of
from megalith.assemble.model import choose_device, require_compiler
from megalith.config import RunConfig
from megalith.distributed.agreement import CollectiveCheck, Observers
from megalith.distributed.board import Board, open_board
from megalith.distributed.context import Axis, Observer, ParallelContext
from megalith.distributed.launch import connect
from megalith.distributed.watch import Watch

_AFTER_THE_WATCH = timedelta(days=1)
"""The watch speaks before torch gives up: it knows which rank is missing, and that a suspended job was not waiting."""


def build_watch(run: RunConfig) -> Watch:
    """Build the watch over the ranks of the run, which `join_ranks` starts."""
    parallel, supervised = run.parallel, run.launch.launcher == "megalith"
    return Watch(parallel.timeout_seconds, 60.0 * parallel.distributed_timeout_minutes, supervised=supervised)


@contextmanager
def join_ranks(
    run: RunConfig,
    watch: Watch | None = None,
    clock: Observer | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Iterator[ParallelContext]:
    """The ranks of the run, connected inside the block; every process of the run enters it.

    Args:
        watch: looks after the ranks; one that hears of collectives only if None.
        asked_to_stop: ends the wait for ranks that have not come.

    Raises:
        ConfigError: there is no such device, or nothing to compile with.
        PeerError: the other ranks cannot be reached, or one of them has ended the block.
    """
    watch = watch or build_watch(run)
    debug = run.parallel.debug_collectives
    launch, device = run.launch, choose_device(run.train.device, run.launch)
    require_compiler(run, device)
    watch.on_gpu = device.type == "cuda"
    join = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    timeout = max(timedelta(seconds=run.parallel.timeout_seconds), join) + _AFTER_THE_WATCH
    boards: list[Board] = []
    with ExitStack() as stack:
        stack.push(lambda kind, *_: _close(boards, failed=kind is not None))  # behind the connections
        backend, facts = run.parallel.distributed_backend, facts_of(run, device) if launch.world_size > 1 else None
        meeting = stack.enter_context(
            connect(launch, device, backend, timeout, join=join, facts=facts, asked_to_stop=asked_to_stop)
        )
        if launch.world_size == 1 and launch.launcher != "megalith":
            yield ParallelContext.solo(device)
            return
        boards.append(open_board(meeting.rank, meeting.size, meeting.store, one_host=meeting.one_host))
        stack.enter_context(watch.attend(boards[0], meeting.rank, meeting.size))
        if launch.world_size == 1:
            yield ParallelContext.solo(device)
            return
        observers: list[Observer] = [watch, *([clock] if clock else []), *([CollectiveCheck(device)] if debug else [])]
        observer = observers[0] if len(observers) == 1 else Observers(observers)
        watch.before("new_group", Axis("all ranks"), None)
        context = ParallelContext.create(run.layout, device, timeout=timeout, observer=observer)
        watch.after("new_group", Axis("all ranks"))
        yield context


def _close(boards: list[Board], *, failed: bool) -> None:
    for board in boards:
        board.close(failed=failed)
