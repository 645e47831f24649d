"""A save beside the training: what is written is the state as it was, and a failure costs nothing else (F25)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megalith.checkpoint import (
    CheckpointContent,
    Chunk,
    DirectoryStore,
    PendingSave,
    SaveReport,
    Staging,
)
from megalith.checkpoint.files import hashing
from megalith.errors import CheckpointError

MakeContent = Callable[..., CheckpointContent]
Same = Callable[[CheckpointContent, CheckpointContent], bool]


def complete(pending: PendingSave) -> SaveReport:
    while True:
        report = pending.advance()
        if report is not None:
            return report


def copied(staging: Staging, chunks: list[Chunk]) -> list[Chunk]:
    copies = staging.plan(chunks)
    staging.begin()
    staging.wait_for_copies()
    return copies


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


class SlowDisk:
    """Writes of data files wait until the disk is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes = threading.Event()
        self._write = os.write
        monkeypatch.setattr(hashing.os, "write", self._wait)

    def _wait(self, fd: int, data: bytes) -> int:
        assert self.goes.wait(30.0)
        return self._write(fd, data)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


def test_what_is_written_is_what_was_scheduled(
    store: DirectoryStore, make_content: MakeContent, same_tensors: Same
) -> None:
    staging = Staging()
    for iteration in (10, 20):
        content = make_content(iteration)
        pending = store.schedule(iteration, content, {"k": "v"}, staging=staging, files={"vocab.json": b"{}"})
        pending.wait_for_copies()
        for chunk in content.chunks:
            chunk.tensor.fill_(-1.0)
        content.common["iteration"] = -1
        report = complete(pending)
        assert report.bytes > 0 and report.seconds > 0
        target = make_content(0)
        assert store.load(iteration, target).common["iteration"] == iteration
        assert same_tensors(target, make_content(iteration))
        assert (store.folder(iteration) / "vocab.json").read_bytes() == b"{}"
    assert store.newest_verified() == (20, [])


def test_tensors_may_change_when_the_copies_are_there_and_not_before(
    tmp_path: Path, make_content: MakeContent, same_tensors: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are made under the next step: it goes on at once, and waits where it would change what is copied."""
    store, content, goes = DirectoryStore(tmp_path), make_content(10), threading.Event()
    copyto = np.copyto

    def slowly(target: np.ndarray, source: np.ndarray) -> None:
        assert goes.wait(30.0)
        copyto(target, source)

    monkeypatch.setattr("megalith.checkpoint.store.staging.np.copyto", slowly)
    pending = store.schedule(10, content, {}, staging=Staging())
    waiting = threading.Thread(target=pending.wait_for_copies)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and pending.busy
    goes.set()
    waiting.join(30.0)
    for chunk in content.chunks:
        chunk.tensor.fill_(-1.0)
    complete(pending)
    target = make_content(0)
    store.load(10, target)
    assert same_tensors(target, make_content(10))


def test_a_copy_that_fails_is_told(tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr("megalith.checkpoint.store.staging.np.copyto", fail)
        pending = DirectoryStore(tmp_path).schedule(10, make_content(10), {}, staging=Staging())
        for wait in (pending.wait_for_copies, pending.advance):
            with pytest.raises(RuntimeError, match="the device is lost"):
                wait()
    assert names(tmp_path) == set()


def test_the_files_are_those_of_a_save_at_once(tmp_path: Path, make_content: MakeContent) -> None:
    at_once, beside = DirectoryStore(tmp_path / "at_once"), DirectoryStore(tmp_path / "beside")
    at_once.save(1, make_content(1), {})
    complete(beside.schedule(1, make_content(1), {}, staging=Staging()))
    assert names(at_once.folder(1)) == names(beside.folder(1))
    for name in ("__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json"):
        assert (at_once.folder(1) / name).read_bytes() == (beside.folder(1) / name).read_bytes(), name


def test_it_counts_only_when_it_is_complete(tmp_path: Path, make_content: MakeContent, slow_disk: SlowDisk) -> None:
    store = DirectoryStore(tmp_path)
    pending = store.schedule(10, make_content(10), {}, staging=Staging())
    assert pending.busy and not pending.failed
    assert store.iterations() == [] and store.latest() is None
    slow_disk.goes.set()
    assert pending.advance() is None  # all have written
    assert complete(pending).waited_seconds > 0
    assert store.newest_verified() == (10, [])


def test_the_copies_take_no_more_than_the_tensors_and_are_used_again(make_content: MakeContent) -> None:
    staging, content = Staging(), make_content(1)
    staging.reserve(content.chunks)
    held = staging.nbytes
    assert content.nbytes <= held <= content.nbytes + 4096 + 64 * len(content.chunks)
    copies = copied(staging, content.chunks)
    assert all(torch.equal(copy.tensor, chunk.tensor) for copy, chunk in zip(copies, content.chunks, strict=True))
    again = copied(staging, make_content(2).chunks)
    assert staging.nbytes == held
    assert [copy.tensor.data_ptr() for copy in again] == [copy.tensor.data_ptr() for copy in copies]


def test_memory_that_is_refused_is_told_with_a_remedy(
    make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("megalith.checkpoint.store.staging.mmap.mmap", refuse)
    with pytest.raises(CheckpointError, match=r"--async-save .*\d+ bytes"):
        Staging().reserve(make_content(1).chunks)


def test_copies_of_every_kind_of_tensor() -> None:
    staging = Staging()
    tensors = [
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(3),
        torch.zeros(0, 5),
        torch.ones(3, 3, dtype=torch.bfloat16)[:, 1:],
        torch.tensor([True, False]),
    ]
    chunks = [Chunk(str(n), t, (0,) * t.dim(), tuple(t.shape)) for n, t in enumerate(tensors)]
    copies = copied(staging, chunks)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.tensor.dtype == tensor.dtype and torch.equal(copy.tensor, tensor)
        assert copy.tensor.is_contiguous()
        assert tensor.numel() == 0 or copy.tensor.data_ptr() != tensor.data_ptr()


def test_a_full_disk_is_told_at_the_next_stage(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, staging = DirectoryStore(tmp_path), Staging()
    store.save(10, make_content(10), {})

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(hashing.os, "write", full)
        pending = store.schedule(20, make_content(20), {}, staging=staging)
        while pending.busy:
            time.sleep(0.001)
        assert pending.failed
        with pytest.raises(CheckpointError, match=r"No space left on device.*\d+ bytes .*\d+ bytes"):
            pending.advance()
    assert names(tmp_path) == {"iter_0000010", "latest_checkpointed_iteration.txt"}
    complete(store.schedule(20, make_content(20), {}, staging=staging))
    assert store.newest_verified() == (20, [])


@pytest.mark.parametrize("point", ["mid_save", "pre_commit", "mid_commit"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), MemoryError()])
def test_a_thread_that_dies_is_an_error_and_not_silence(
    tmp_path: Path, make_content: MakeContent, point: str, error: BaseException
) -> None:
    store = DirectoryStore(tmp_path)
    store.save(10, make_content(10), {})

    def fail(at: str) -> None:
        if at == point:
            raise error

    pending = store.schedule(20, make_content(20), {}, staging=Staging(), on_stage=fail)
    expected = type(error) if isinstance(error, Exception) else CheckpointError
    with pytest.raises(expected):
        complete(pending)
    assert store.newest_verified()[0] == 10
    assert not any(name.startswith(".saving") for name in names(tmp_path))


def test_an_abandoned_save_stops_soon_and_leaves_nothing(
    tmp_path: Path, make_content: MakeContent, slow_disk: SlowDisk
) -> None:
    store = DirectoryStore(tmp_path)
    pending = store.schedule(10, make_content(10), {}, staging=Staging())
    threading.Timer(0.1, slow_disk.goes.set).start()
    pending.abandon()
    assert not pending.busy and pending.failed
    assert names(tmp_path) == set()
    store.save(20, make_content(20), {})
    assert store.newest_verified() == (20, [])


def test_too_little_space_is_an_error_of_the_scheduling(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.checkpoint.files.commit.free_bytes", lambda _: 1000)
    with pytest.raises(CheckpointError, match=r"\d+ bytes .* 1000 bytes"):
        DirectoryStore(tmp_path).schedule(1, make_content(1), {}, staging=Staging())
    assert names(tmp_path) == set()


PEAK = """
import sys
from pathlib import Path
import torch
from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore, Staging

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

tensors = [torch.full((2**20,), float(n)) for n in range(32)]
content = CheckpointContent([Chunk(f"w{n}", t, (0,), (2**20,)) for n, t in enumerate(tensors)])
store, staging = DirectoryStore(sys.argv[1]), Staging()
small = CheckpointContent([Chunk("w", torch.ones(8), (0,), (8,))])
pending = store.schedule(1, small, {}, staging=Staging())  # what the first save imports
while pending.advance() is None:
    pass
before = resident("VmRSS:")
for iteration in (2, 3, 4):
    pending = store.schedule(iteration, content, {}, staging=staging)
    while pending.advance() is None:
        pass
print((resident("VmHWM:") - before) / content.nbytes)
"""


def test_the_memory_of_the_host_is_bounded(tmp_path: Path) -> None:
    """F25: at most 1.2 times what is saved, over several saves."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= 1.2
