"""Ranks of a run: device, rendezvous, process groups and watchdog from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

from megalith.assemble.facts import facts_of
from megalith.assemble.model import choose_attention, choose_device, require_compiler
from megalith.config import RunConfig
from megalith.device import is_host
from megalith.distributed.board import Board, open_board
from megalith.distributed.consistency import CollectiveCheck, Observers
from megalith.distributed.context import Axis, Observer, ParallelContext
from megalith.distributed.launch import connect
from megalith.distributed.watchdog import Watchdog
from megalith.models.compiled import compile_errors_named

_TORCH_TIMEOUT_MARGIN = timedelta(days=1)
"""Added to torch's timeout, so that the watchdog reports first: it names the missing rank and ignores suspensions."""


def build_watchdog(run: RunConfig, *, trains: bool = False) -> Watchdog:
    """Build the watchdog of the run, which `join_ranks` starts; with `trains` it names flags that need less memory."""
    parallel, supervised = run.parallel, run.launch.launcher == "megalith"
    watchdog = Watchdog(parallel.timeout_seconds, 60.0 * parallel.distributed_timeout_minutes, supervised=supervised)
    if trains:
        watchdog.memory_flags = partial(memory_flags, run)
    return watchdog


def memory_flags(run: RunConfig, in_step: bool) -> list[str]:
    """Return flags with which a training run needs less memory on each GPU, those that cost least first.

    Args:
        in_step: whether a step has begun; before it only weights and optimizer states count.
    """
    train, batch = run.train, run.train.micro_batch_size
    flags = []
    if in_step and batch > 1:
        flags.append(f"--micro-batch-size {max(size for size in range(1, batch) if batch % size == 0)} (now {batch})")
    if in_step and train.recompute_granularity != "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if run.layout.dp * run.layout.cp > 1 and not run.fully_sharded:
        zero_1, zero_3 = "--use-distributed-optimizer (ZeRO-1)", "--use-torch-fsdp2 (ZeRO-3)"
        instead = f"{zero_3} instead of --{run.parallel.sharding_setting.replace('_', '-')}"
        flags.append(instead if run.parallel.shards_optimizer_only else f"{zero_1} or {zero_3}")
    return [*flags, "more GPUs and a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"]


@contextmanager
def join_ranks(
    run: RunConfig,
    watchdog: Watchdog | None = None,
    clock: Observer | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[ParallelContext]:
    """Connect the ranks of the run within the block; every process of the run enters it.

    Args:
        watchdog: detects hangs; if None, one that only receives collectives.
        stop_requested: polled during the rendezvous; PeerError if it returns True.

    Raises:
        ConfigError: the device, a compiler or an attention kernel is missing.
        PeerError: other ranks are unreachable, or one of them has failed.
        DeviceError: in place of an error of a GPU or of NCCL that the block raises.
    """
    watchdog = watchdog or build_watchdog(run)
    debug = run.parallel.debug_collectives
    launch, device = run.launch, choose_device(run.train.device, run.launch)
    require_compiler(run, device)
    choose_attention(run, device)
    watchdog.on_gpu = not is_host(device)
    join = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    timeout = max(timedelta(seconds=run.parallel.timeout_seconds), join) + _TORCH_TIMEOUT_MARGIN
    boards: list[Board] = []
    with ExitStack() as stack:
        stack.push(lambda kind, *_: _close(boards, failed=kind is not None))  # after the connections
        backend, facts = run.parallel.distributed_backend, facts_of(run, device) if launch.world_size > 1 else None
        rendezvous = stack.enter_context(
            connect(launch, device, backend, timeout, join=join, facts=facts, stop_requested=stop_requested)
        )
        if launch.world_size > 1 or launch.launcher == "megalith":
            boards.append(open_board(rendezvous.rank, rendezvous.size, rendezvous.store, one_host=rendezvous.one_host))
            stack.enter_context(watchdog.guard(boards[0], rendezvous.rank, rendezvous.size))
        stack.enter_context(watchdog.name_device_errors())
        if run.train.compile:
            stack.enter_context(compile_errors_named())
        if launch.world_size == 1:
            yield ParallelContext.solo(device)
            return
        observers: list[Observer] = [
            watchdog,
            *([clock] if clock else []),
            *([CollectiveCheck(device)] if debug else []),
        ]
        observer = observers[0] if len(observers) == 1 else Observers(observers)
        watchdog.before("new_group", Axis("all ranks"), None)
        context = ParallelContext.create(run.layout, device, timeout=timeout, observer=observer)
        watchdog.after("new_group", Axis("all ranks"))
        yield context


def _close(boards: list[Board], *, failed: bool) -> None:
    for board in boards:
        board.close(failed=failed)
