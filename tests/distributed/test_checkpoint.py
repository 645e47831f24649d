"""Checkpoints of several ranks: each writes its own files, one commits, and an error of one is an error of all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.files import commit, hashing
from megalith.checkpoint.store.store import SAVE_STAGES
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError
from megalith.layout import Layout

ROWS = 6


def _context(**sizes: int) -> ParallelContext:
    return ParallelContext.create(Layout(**sizes), torch.device("cpu"))


def whole(seed: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(seed))


def part_of(tensor: Tensor, ctx: ParallelContext) -> list[Chunk]:
    """This rank's equal part of the rows of a global tensor `w`, and on the first rank a tensor of its own."""
    rows = ROWS // ctx.world.size
    start = ctx.rank * rows
    chunks = [Chunk("w", tensor[start : start + rows], (start, 0), tuple(tensor.shape))]
    return [*chunks, Chunk("only", tensor[0], (0,), (5,))] if ctx.rank == 0 else chunks


def content_of(seed: int, ctx: ParallelContext) -> CheckpointContent:
    return CheckpointContent(
        part_of(whole(seed), ctx), {f"object/{ctx.rank}": {"rank": ctx.rank, "seed": seed}}, {"iteration": seed}
    )


def loaded_seed(store: DirectoryStore, iteration: int, ctx: ParallelContext) -> int:
    """The seed of the content that a checkpoint gives back; every byte of this rank's part is compared."""
    chunks = part_of(torch.zeros(ROWS, 5), ctx)
    loaded = store.load(iteration, CheckpointContent(chunks, {f"object/{ctx.rank}": None}))
    state = loaded.objects[f"object/{ctx.rank}"]
    seed = int(state["seed"])
    assert state["rank"] == ctx.rank and loaded.common["iteration"] == seed and loaded.unexpected == ()
    expected = part_of(whole(seed), ctx)
    assert [c.key for c in chunks] == [c.key for c in expected]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(chunks, expected, strict=True))
    return seed


# --- what is written and read back --------------------------------------------------------------------------------


def _round_trip(folder: str) -> dict[str, Any]:
    ctx = _context(dp=torch.distributed.get_world_size())
    store = DirectoryStore(folder, ctx)
    seen: list[str] = []
    report = store.save(10, content_of(10, ctx), {"mark": "x"}, files={"extra.txt": b"e"}, on_stage=seen.append)
    again = DirectoryStore(folder, ctx)
    manifest = again.manifest(10)
    assert manifest is not None
    return {
        "points": tuple(seen),
        "bytes": report.bytes,
        "newest": again.newest_verified(),
        "seed": loaded_seed(again, 10, ctx),
        "layout": (manifest["layout"], manifest["world_size"], manifest["mark"]),
        "files": sorted(manifest["files"]),
        "iterations": (again.iterations(), again.latest()),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_load_restores_what_was_saved(ranks: Any, tmp_path: Path, world_size: int) -> None:
    results = ranks.run(world_size, _round_trip, str(tmp_path / "save"))
    assert all(result == results[0] for result in results)
    result = results[0]
    assert result["points"] == SAVE_STAGES
    assert (result["newest"], result["seed"], result["iterations"]) == ((10, []), 10, ([10], 10))
    assert result["layout"] == ({"tp": 1, "cp": 1, "dp": world_size, "pp": 1, "ep": 1, "etp": None}, world_size, "x")
    data = {f"__{rank}_{i}.distcp" for rank in range(world_size) for i in range(2)}
    assert data - set(result["files"]) <= {f"__{rank}_1.distcp" for rank in range(world_size)}
    assert {name.split("_")[2] for name in result["files"] if name.startswith("__")} == {
        str(rank) for rank in range(world_size)
    }
    assert {".metadata", "common.pt", "metadata.json", "extra.txt"} <= set(result["files"])


def test_one_process_reads_what_several_wrote_and_the_other_way_round(ranks: Any, tmp_path: Path) -> None:
    """Chunks are boxes of global tensors: who holds which does not matter to a load."""
    ranks.run(2, _save_one, str(tmp_path), 10)
    together = torch.zeros(ROWS, 5)
    store = DirectoryStore(tmp_path)
    store.load(10, CheckpointContent([Chunk("w", together, (0, 0), (ROWS, 5))]))
    assert torch.equal(together, whole(10))
    solo = ParallelContext.solo()
    content = content_of(20, solo)
    content.objects["object/1"] = {"rank": 1, "seed": 20}
    store.save(20, content, {})
    assert ranks.run(2, _load_one, str(tmp_path), 20) == [20, 20]


def _save_one(folder: str, seed: int) -> None:
    ctx = _context(tp=torch.distributed.get_world_size())
    DirectoryStore(folder, ctx).save(seed, content_of(seed, ctx), {})


def _load_one(folder: str, iteration: int) -> int:
    ctx = _context(tp=torch.distributed.get_world_size())
    return loaded_seed(DirectoryStore(folder, ctx), iteration, ctx)


# --- an error of one is an error of all ---------------------------------------------------------------------------


class _Fault(Exception):
    """Raised by a test."""


def _names(folder: str, ctx: ParallelContext) -> list[str]:
    """What is there when the first rank has cleaned up."""
    comm.barrier(ctx.world)
    return sorted(path.name for path in Path(folder).iterdir())


def _failing_save(folder: str, failing: int, point: str) -> dict[str, Any]:
    ctx = _context(dp=torch.distributed.get_world_size())
    store = DirectoryStore(folder, ctx)
    store.save(10, content_of(10, ctx), {})

    def raise_at(at: str) -> None:
        if at == point and ctx.rank == failing:
            raise _Fault(f"at {at}")

    message = "no error"
    try:
        store.save(20, content_of(20, ctx), {}, on_stage=raise_at)
    except (CheckpointError, _Fault) as error:
        message = f"{type(error).__name__}: {error}"
    left = _names(folder, ctx)
    newest = store.newest_verified()
    store.save(30, content_of(30, ctx), {})
    return {"message": message, "left": left, "newest": newest, "seed": loaded_seed(store, 30, ctx)}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("point", ["pre_save", "mid_save", "pre_commit"])
def test_a_rank_that_raises_stops_the_save_on_all(ranks: Any, tmp_path: Path, failing: int, point: str) -> None:
    results = ranks.run(2, _failing_save, str(tmp_path), failing, point)
    for rank, result in enumerate(results):
        if rank == failing:
            assert result["message"] == f"_Fault: at {point}"
        else:
            assert result["message"].startswith(f"CheckpointError: rank {failing} on ")
            assert result["message"].endswith(f"_Fault: at {point}")
        assert result["left"] == ["iter_0000010", "latest_checkpointed_iteration.txt"]
        assert (result["newest"], result["seed"]) == ((10, []), 30)


def _save_on_a_filling_disk(folder: str, failing: int, after: int) -> tuple[str, list[str]]:
    """The disk of one rank takes `after` writes of data and no more."""
    ctx = _context(dp=torch.distributed.get_world_size())
    store = DirectoryStore(folder, ctx)
    write, written = os.write, 0

    def filling(fd: int, data: bytes) -> int:
        nonlocal written
        written += 1
        if ctx.rank == failing and written > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing.os, "write", filling)
        with pytest.raises(CheckpointError) as caught:
            store.save(20, content_of(20, ctx), {})
    return str(caught.value), _names(folder, ctx)


@pytest.mark.parametrize(("failing", "after"), [(0, 0), (0, 1), (1, 0)])
def test_a_disk_that_is_full_for_one_rank(ranks: Any, tmp_path: Path, failing: int, after: int) -> None:
    ranks.run(2, _save_one, str(tmp_path), 10)
    for message, left in ranks.run(2, _save_on_a_filling_disk, str(tmp_path), failing, after):
        assert message.startswith(f"rank {failing} on ") and "No space left on device" in message
        assert left == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert DirectoryStore(tmp_path).newest_verified() == (10, [])


def _save_without_space(folder: str) -> str:
    ctx = _context(dp=torch.distributed.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "free_bytes", lambda _: 1000)
        with pytest.raises(CheckpointError) as caught:
            DirectoryStore(folder, ctx).save(1, content_of(1, ctx), {})
    return str(caught.value)


def test_the_space_is_checked_for_all_ranks_together(ranks: Any, tmp_path: Path) -> None:
    (alone,) = ranks.run(1, _save_without_space, str(tmp_path))
    for message in ranks.run(2, _save_without_space, str(tmp_path)):
        assert "1000 bytes" in message
        assert _needed(message) > _needed(alone) + 2**16
    assert list(tmp_path.iterdir()) == []


def _needed(message: str) -> int:
    return int(message.partition("it needs ")[2].partition(" ")[0])


def _save_to_folders_of_their_own(folder: str, claims: bool) -> str:
    ctx = _context(dp=torch.distributed.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_VISIBILITY_TIMEOUT_SECONDS", 0.2)
        store = DirectoryStore(f"{folder}/{ctx.rank}", ctx)
        with pytest.raises(CheckpointError) as caught:
            if claims:
                with store.claim():
                    pass
            else:
                store.save(1, content_of(1, ctx), {})
    return str(caught.value)


@pytest.mark.parametrize("claims", [True, False])
def test_a_folder_that_the_ranks_do_not_share_is_refused_at_the_start(ranks: Any, tmp_path: Path, claims: bool) -> None:
    for message in ranks.run(2, _save_to_folders_of_their_own, str(tmp_path), claims):
        assert message.startswith("rank 1 on ") and "--save" in message and str(tmp_path / "1") in message


def _find_in_folders_of_their_own(folder: str) -> str:
    ctx = _context(dp=torch.distributed.get_world_size())
    with pytest.raises(CheckpointError) as caught:
        DirectoryStore(f"{folder}/{ctx.rank}", ctx).newest_verified()
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_alone_sees_is_refused(ranks: Any, tmp_path: Path, rank: int) -> None:
    DirectoryStore(tmp_path / str(rank)).save(1, content_of(1, ParallelContext.solo()), {})
    for message in ranks.run(2, _find_in_folders_of_their_own, str(tmp_path)):
        assert "share" in message and ("rank 1 on " if rank == 0 else "none on rank 0") in message


def _save_where_folders_are_seen_late(folder: str) -> int:
    """How often this rank had to look again."""
    ctx, exists, looks = _context(dp=torch.distributed.get_world_size()), Path.exists, 0

    def seen_late(path: Path) -> bool:
        nonlocal looks
        if ctx.rank == 1 and path.name.startswith(".saving-") and looks < 3:
            looks += 1
            return False
        return exists(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", seen_late)
        DirectoryStore(folder, ctx).save(1, content_of(1, ctx), {})
    return looks


def test_a_folder_that_is_seen_late_is_waited_for(ranks: Any, tmp_path: Path) -> None:
    """F27: network file systems show a folder that another host has made only after a while."""
    assert ranks.run(2, _save_where_folders_are_seen_late, str(tmp_path)) == [0, 3]
    assert DirectoryStore(tmp_path).newest_verified() == (1, [])


def _save_what_does_not_fit_together(folder: str, wrong: str) -> str:
    ctx = _context(dp=torch.distributed.get_world_size())
    content = content_of(1, ctx)
    if wrong == "gap" and ctx.rank == 1:
        content.chunks = []
    if wrong == "twice" and ctx.rank == 1:
        content.chunks.append(Chunk("only", torch.zeros(5), (0,), (5,)))
    if wrong == "type" and ctx.rank == 1:
        content.objects["path"] = Path("x")
    with pytest.raises((CheckpointError, AssertionError)) as caught:
        DirectoryStore(folder, ctx).save(1, content, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("gap", "w: the chunks to save hold 15 of 30 elements"),
        ("twice", "only at (0,) is to be written by ranks 0 and 1"),
        ("type", "path cannot be saved: it holds a"),
    ],
)
def test_what_the_ranks_hold_must_fit_together(ranks: Any, tmp_path: Path, wrong: str, expected: str) -> None:
    for message in ranks.run(2, _save_what_does_not_fit_together, str(tmp_path / "save"), wrong):
        assert expected in message
    assert not (tmp_path / "save").exists() or list((tmp_path / "save").iterdir()) == []


def _load_something_else(folder: str) -> tuple[str, bool]:
    ctx = _context(dp=torch.distributed.get_world_size())
    chunks = part_of(torch.zeros(ROWS, 5), ctx)
    if ctx.rank == 1:
        chunks.append(Chunk("absent", torch.zeros(2), (0,), (2,)))
    with pytest.raises(CheckpointError) as caught:
        DirectoryStore(folder, ctx).load(10, CheckpointContent(chunks))
    return str(caught.value), all(not chunk.tensor.any() for chunk in chunks)


def test_a_load_that_does_not_fit_one_rank_touches_nothing_on_any(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _save_one, str(tmp_path), 10)
    for message, untouched in ranks.run(2, _load_something_else, str(tmp_path)):
        assert message.startswith("rank 1 on ") and re.search(r"\babsent\b", message)
        assert untouched


# --- damage -------------------------------------------------------------------------------------------------------


def _newest_and_its_seed(folder: str) -> tuple[int | None, list[str], int, str]:
    ctx = _context(dp=torch.distributed.get_world_size())
    store = DirectoryStore(folder, ctx)
    iteration, notes = store.newest_verified()
    assert iteration is not None
    with pytest.raises(CheckpointError) as caught:
        loaded_seed(store, 20, ctx)
    return iteration, notes, loaded_seed(store, iteration, ctx), str(caught.value)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "common.pt", "manifest.json", ".metadata"])
def test_a_flipped_byte_is_found_and_all_take_the_checkpoint_before(ranks: Any, tmp_path: Path, name: str) -> None:
    for seed in (10, 20):
        ranks.run(2, _save_one, str(tmp_path), seed)
    path = DirectoryStore(tmp_path).folder(20) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    for iteration, notes, seed, refusal in ranks.run(2, _newest_and_its_seed, str(tmp_path)):
        assert (iteration, seed) == (10, 10)
        assert len(notes) == 1 and notes[0].startswith(str(path))
        assert "iter_0000020 is damaged" in refusal and str(path) in refusal


# --- the lock of the folder ---------------------------------------------------------------------------------------


def _claim(folder: str) -> str:
    ctx = _context(dp=torch.distributed.get_world_size())
    try:
        with DirectoryStore(folder, ctx).claim():
            return "held"
    except CheckpointError as error:
        return str(error)


def test_the_folder_is_claimed_once_for_all(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _claim, str(tmp_path)) == ["held", "held"]
    assert list(tmp_path.iterdir()) == []
    with DirectoryStore(tmp_path).claim():
        for message in ranks.run(2, _claim, str(tmp_path)):
            assert f"process {os.getpid()}" in message
