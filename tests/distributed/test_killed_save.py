"""A rank that is killed in a save costs nothing that was there before (F02, F03), whichever rank and wherever."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.store.store import SAVE_STAGES

WHOLE = {"w": (4, 3), "embedding.word_embeddings.weight": (8, 4)}
WAYS = ("at once", "beside", "per rank")
"""Of saving: two files of the one tensor `w`, at once or beside; a small model in a per-rank file that both fill."""

# Imports once what saves need and forks the ranks of each: a kill must end a whole process.
SERVER = """
import datetime, json, os, signal, sys, traceback
from argparse import Namespace
import torch
import torch.distributed as dist
import megalith.checkpoint.store.saving
from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore, Staging
from megalith.checkpoint.formats.torch_dist import LocalTensor, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.distributed.context import ParallelContext
from megalith.layout import Layout

torch.set_num_threads(1)

def half_of_a_tensor(rank, number):
    return CheckpointContent([Chunk("w", torch.full((2, 3), float(number)), (2 * rank, 0), (4, 3))])

def half_of_a_model(rank, number):
    args = dict(num_layers=1, hidden_size=4, num_attention_heads=1, seq_length=4, max_position_embeddings=4)
    args |= dict(padded_vocab_size=8, params_dtype="float32")
    params = GlobalParameters.from_args(args, "test")
    boxes = [LocalTensor(name, torch.full(shape, float(number))) for name, shape in params.shapes.items()]
    chunks = weight_chunks(boxes[rank::2], params.placements, params.stacking)
    return CheckpointContent(chunks, {}, {"args": Namespace(**args)})

def save(rank, folder, rendezvous, number, point, killed, way):
    store = dist.FileStore(rendezvous, 2)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    ctx = ParallelContext.create(Layout(dp=2), torch.device("cpu"))
    content = half_of_a_model(rank, number) if way == "per rank" else half_of_a_tensor(rank, number)
    content.common["iteration"] = number
    def die(at):
        if at == point and rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
    store = DirectoryStore(folder, ctx, save_format="torch" if way == "per rank" else "torch_dist")
    if way == "beside":
        pending = store.schedule(number, content, {}, staging=Staging(), on_stage=die)
        pending.wait_for_copies()
        content.chunks[0].tensor.zero_()
        while pending.advance() is None:
            pass
    else:
        store.save(number, content, {}, on_stage=die)

for line in sys.stdin:
    arguments = json.loads(line)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                save(rank, *arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
"""

SaveByTwo = Callable[..., list[int]]


@pytest.fixture(scope="module")
def save_by_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaveByTwo]:
    """Save from two ranks, of which one may be killed at a point; returns the wait statuses."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rendezvous = tmp_path_factory.mktemp("rendezvous")
    count = 0

    def save(folder: Path, number: int, point: str = "", killed: int = -1, way: str = "at once") -> list[int]:
        nonlocal count
        count += 1
        arguments = [str(folder), str(rendezvous / str(count)), number, point, killed, way]
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(arguments), file=server.stdin, flush=True)
        statuses: list[int] = json.loads(server.stdout.readline())
        return statuses

    yield save
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(30) == 0


def loaded(store: DirectoryStore, iteration: int) -> Any:
    """The one value that the whole tensor of a checkpoint has."""
    (key,) = WHOLE.keys() & store.contents(iteration).tensors.keys()
    tensor = torch.zeros(WHOLE[key])
    common = store.load(iteration, CheckpointContent([Chunk(key, tensor, (0, 0), WHOLE[key])])).common
    (value,) = set(tensor.flatten().tolist())
    assert common["iteration"] == value
    return value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("point", SAVE_STAGES)
def test_a_killed_rank_leaves_the_checkpoint_before(
    tmp_path: Path, save_by_two: SaveByTwo, point: str, killed: int, way: str
) -> None:
    """Killed when all is written and the first rank is committing, another rank is needed no more."""
    assert save_by_two(tmp_path, 10, way=way) == [0, 0]
    statuses = save_by_two(tmp_path, 20, point, killed, way)
    assert statuses[killed] == signal.SIGKILL
    if point != "post_commit":
        assert statuses[1 - killed] == 1 << 8, "the other rank went on as if nothing had happened"
    store = DirectoryStore(tmp_path)
    iteration, notes = store.newest_verified()
    assert iteration == (20 if point == "post_commit" or (point, killed) == ("mid_commit", 1) else 10)
    if (point, killed) == ("mid_commit", 0):
        assert re.search(r"\b10\b.*\biter_0000020\b", notes[0])
    else:
        assert notes == []
    assert loaded(store, iteration) == iteration
    assert save_by_two(tmp_path, 30) == [0, 0]
    assert store.newest_verified() == (30, []) and loaded(store, 30) == 30
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir()), "a leftover survived the next save"
