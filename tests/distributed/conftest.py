"""`ranks`: a warm pool of processes that tests send functions to, in a group of gloo, or of NCCL on GPUs."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120.0
RUNS = 15
"""Of a process before a new one takes its place: gloo's threads of a group that something still refers to stay busy."""
PRELOADED = [
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo",  # FSDP2 imports it in its first step
    "megalith.checkpoint.store.saving",
    "megalith.assemble.model",
    "megalith.train.loop",
]
"""What processes need, imported once for all of them: each is a fork of a server that has no threads and no groups."""


class Ranks:
    """Processes that wait for work. Each `run` gets a fresh process group; after a failure all are replaced.

    Args:
        device: "cpu", or "cuda": each rank has the GPU of its number, and is no fork, which CUDA does not survive.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._workers: list[tuple[Any, Connection]] = []
        self._runs = 0
        # As long as there are processes: a FileStore whose folder vanishes while it is destroyed waits for it, until
        # its timeout, and the next run with it.
        self._folder = tempfile.TemporaryDirectory()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """`function(*args)` on each rank of a new world; returns the results by rank (picklable values only).

        `function` is at the top of a test module; torch.distributed is initialised around it, one thread per rank.
        The first failure of a rank is raised here with its traceback.
        """
        self._runs += 1
        if self._runs % RUNS == 0:
            self.close()
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        store = f"{self._folder.name}/{self._runs}"
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            task = (function.__code__.co_filename, function.__qualname__, args)
            pipe.send((rank, world_size, store, seconds, task))
        return self._collect(world_size, seconds)

    def _start(self) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("forkserver" if self._device == "cpu" else "spawn")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._device), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, world_size: int, seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                self.close()
                pytest.fail(f"ranks {sorted(waiting.values())} gave no answer within {seconds} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    succeeded, results[rank] = False, "the process died"
                if not succeeded:
                    self.close()
                    pytest.fail(f"rank {rank} of {world_size}: {results[rank]}")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def serve(pipe: Connection, device: str) -> None:
    """What a process of the pool does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from megalith.distributed.forked import joined

    torch.set_num_threads(1)
    gc.freeze()  # each run ends in a collection: of what it made, and not of all that is imported
    while True:
        try:
            rank, world_size, store, seconds, (file, name, args) = pipe.recv()
        except EOFError:
            return
        try:
            own = torch.device(device, rank) if device == "cuda" else None
            if own is not None:
                torch.cuda.set_device(own)
            with joined(rank, world_size, store, seconds, own):
                result = getattr(_module(file), name)(*args)
            pipe.send_bytes(_packed(True, result))
        except BaseException:
            pipe.send_bytes(_packed(False, traceback.format_exc()))
            return


def _packed(succeeded: bool, result: Any) -> bytes:
    """Bytes by pickle itself: what multiprocessing has for tensors is a file and a dialogue for each of them."""
    return pickle.dumps((succeeded, result))


def _module(file: str) -> Any:
    """The test module of this file, under the name by which pytest knows it."""
    root = Path(__file__).resolve().parents[2]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(".".join(Path(file).resolve().relative_to(root).with_suffix("").parts))
