"""A checkpoint saved and loaded by Megalith's store and by torch.distributed.checkpoint, in turns in one program.

    torchrun --nproc-per-node 2 benchmarks/peers/checkpoint.py FOLDER --size 350M --seconds 60

A GPT with its Adam state in fp32, its tensors sharded over the ranks (tensor parallelism). Both bring their files to
the disk (fsync) and load files that are not in the system's cache. Megalith hashes the files and verifies them; the
peer does not. The peer saves each rank's tensors under names of its own, so that it has nothing to agree on.

A line of JSON per round: seconds until the last rank is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint import SIZES, build_state, configuration, forget

from megalith.checkpoint import DirectoryStore
from megalith.distributed.context import ParallelContext
from megalith.train.checkpoint_fit import Identity, find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.checkpoint_saver import CheckpointSaver


class Contest:
    """The state of this rank, and both ways to save and load it."""

    def __init__(self, size: str, folder: Path, rank: int, world: int) -> None:
        self.world, self.first = world, rank == 0
        self.ours, self.theirs = folder / "megalith", folder / "dcp"
        self.run = configuration(size, self.ours, rank, world)
        self.context = ParallelContext.solo()
        if world > 1:
            self.context = ParallelContext.create(self.run.layout, torch.device("cpu"))
        self.state = build_state(self.run, self.context)
        self.state.iteration = 1
        boxes = [*self.state.optimizer.weight_boxes(), *self.state.optimizer.state_boxes()]
        self.plain = {f"rank{rank}.{number}.{box.name}": box.tensor for number, box in enumerate(boxes)}
        self.nbytes = sum(tensor.nbytes for tensor in self.plain.values())

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def seconds(self, work: Callable[[], Any], *, removed: Path | None = None, cold: Path | None = None) -> float:
        """Return the seconds of all ranks together, with a folder removed or out of the cache before."""
        self.barrier()
        if self.first and removed:
            shutil.rmtree(removed, ignore_errors=True)
            os.sync()
        if self.first and cold:
            forget(cold)
        self.barrier()
        began = time.perf_counter()
        work()
        self.barrier()
        return time.perf_counter() - began

    def save(self) -> None:
        CheckpointSaver(DirectoryStore(self.ours, self.context), self.run, Identity({}, {}, {})).save(self.state)

    def load(self) -> None:
        store = DirectoryStore(self.ours, self.context)
        found = find_checkpoint(store)
        assert found is not None
        restore(store, found, self.state, self.run)

    def dcp_save(self) -> None:
        """Save with two threads a process, which with one rank is as many as there are cores."""
        writer = dcp.FileSystemWriter(self.theirs, thread_count=2)
        dcp.save(self.plain, storage_writer=writer, no_dist=self.world == 1)

    def dcp_load(self) -> None:
        dcp.load(self.plain, checkpoint_id=self.theirs, no_dist=self.world == 1)

    def round(self, *, reverse: bool) -> dict[str, float]:
        saves = {
            "megalith save": lambda: self.seconds(self.save, removed=self.ours),
            "dcp save": lambda: self.seconds(self.dcp_save, removed=self.theirs),
        }
        loads = {
            "megalith load": lambda: self.seconds(self.load, cold=self.ours),
            "dcp load": lambda: self.seconds(self.dcp_load, cold=self.theirs),
        }
        return {
            name: turns[name]() for turns in (saves, loads) for name in (reversed(turns) if reverse else list(turns))
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="350M")
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins that would end later")
    parser.add_argument("--rounds", type=int, nargs=2, default=(2, 9), help="least and most")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    began, took, number = time.perf_counter(), 0.0, 0
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    if world > 1:
        dist.init_process_group("gloo")
    contest = Contest(options.size, options.folder, rank, world)
    while True:
        another = torch.tensor([number < options.rounds[0] or time.perf_counter() + took < began + options.seconds])
        if world > 1:
            dist.broadcast(another, 0)
        if not another or number >= options.rounds[1]:
            break
        round_began = time.perf_counter()
        found = contest.round(reverse=bool(number % 2))
        number, took = number + 1, time.perf_counter() - round_began
        if rank == 0:
            print(json.dumps({"bytes": contest.nbytes * world, "seconds": found}), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
