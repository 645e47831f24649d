"""From the configuration to the ranks of the run: where this process computes, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megalith.assemble.model import choose_device
from megalith.config import RunConfig
from megalith.distributed.context import Observer, ParallelContext
from megalith.distributed.launch import connect


@contextmanager
def join_ranks(run: RunConfig, observer: Observer | None = None) -> Iterator[ParallelContext]:
    """The ranks of the run, connected inside the block; every process of the run enters it.

    Args:
        run: layout, device, backend, timeout and what the launcher said.
        observer: is told of each collective.

    Raises:
        ConfigError: there is no such device.
        MegalithError: the other ranks cannot be reached.
    """
    device = choose_device(run.train.device, run.launch.local_rank)
    if run.launch.world_size == 1:
        yield ParallelContext.solo(device)
        return
    timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    with connect(run.launch, device, run.parallel.distributed_backend, timeout):
        yield ParallelContext.create(run.layout, device, timeout=timeout, observer=observer)
