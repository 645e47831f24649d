"""Ranks for a short computation on this machine: forks of a warm process, or a pool of a test's, in a group of gloo."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megalith.errors import ConfigError, PeerError


@contextmanager
def joined(
    rank: int, world_size: int, store: str, seconds: float, device: torch.device | None = None
) -> Iterator[None]:
    """Join the ranks that name the same file `store` within the block; on GPU `device` over NCCL, else over gloo."""
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device,
    )
    yield
    dist.barrier()  # one that leaves at once may not yet be known to another
    dist.destroy_process_group()
    gc.collect()  # the threads of a process group end with its last reference, which may be in a cycle


def run_forked(world_size: int, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
    """Return `function(rank, *args)` of each rank of a new world: a fork of this process with one thread.

    Raises:
        ConfigError: As a rank raised it.
        PeerError: A rank raised anything else or ended, or had no answer `seconds` after the others.
    """
    context, pipes, processes = multiprocessing.get_context("fork"), list[Connection](), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world_size, f"{folder}/store", seconds)
            process = context.Process(target=_answer, args=(theirs, place, function, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while missing := {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}:
        ready = wait(list(missing), timeout=seconds)
        if not ready:
            raise PeerError(f"ranks {sorted(missing.values())} gave no answer within {seconds:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                # Written by `_answer` in a fork of this process, over a pipe that nobody else holds.
                error, results[missing[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error = "its process died"
            if isinstance(error, ConfigError):
                raise error
            if error:
                raise PeerError(f"rank {missing[pipe]} of {len(pipes)}: {error}")
    return [results[rank] for rank in range(len(pipes))]


def _answer(
    pipe: Connection, place: tuple[int, int, str, float], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, world_size, store, seconds = place
    torch.set_num_threads(1)
    gc.freeze()  # the collection that ends a process group is of what the rank made, not of all that is imported
    try:
        if world_size == 1:
            result = function(rank, *args)
        else:
            with joined(rank, world_size, store, seconds):
                result = function(rank, *args)
        pipe.send_bytes(pickle.dumps(("", result)))
    except ConfigError as error:
        pipe.send_bytes(pickle.dumps((ConfigError(error.violations), None)))
    except BaseException:  # also an exit: it becomes the PeerError of the caller
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
