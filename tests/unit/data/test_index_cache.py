"""The index cache under several builders at once, and after one that was killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.data.index_cache import Arrays, IndexCache, load_or_build

NAMES = ("first", "second")


def arrays() -> Arrays:
    return {"first": np.arange(2000), "second": np.arange(3000) * 2}


def whole(found: Arrays) -> bool:
    return all(np.array_equal(found[name], array) for name, array in arrays().items())


def counted(folder: Path, seconds: float) -> Arrays:
    """Leaves a mark for each build, and takes its time."""
    (folder / f"mark {os.getpid()}").touch()
    time.sleep(seconds)
    return arrays()


def get(folder: Path, build: Callable[[], Arrays]) -> Arrays:
    return load_or_build(folder / "cache", "Kind-train", "what it is", NAMES, build, whole).arrays


def _builder(folder: Path, ready: Any, go: Any) -> None:
    ready.release()
    go.wait()
    found = get(folder, partial(counted, folder, 0.3))
    os._exit(0 if whole(found) else 1)


def _slow_builder(folder: Path, ready: Any) -> None:
    def build() -> Arrays:
        found = arrays()
        (folder / "cache" / ".left-over").touch()
        ready.release()
        time.sleep(60)
        return found

    get(folder, build)


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # nothing of torch is here
    ready, go = fork.Semaphore(0), fork.Event()
    builders = [fork.Process(target=_builder, args=(tmp_path, ready, go)) for _ in range(4)]
    for builder in builders:
        builder.start()
    for _ in builders:
        ready.acquire()
    go.set()
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert len(list(tmp_path.glob("mark *"))) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 3, "no lock and no temporary file is left"


def test_a_killed_builder_holds_no_one_up(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Semaphore(0)
    builder = fork.Process(target=_slow_builder, args=(tmp_path, ready))
    builder.start()
    ready.acquire()
    builder.kill()
    builder.join()
    assert whole(get(tmp_path, arrays))
    names = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert names == {".npy", ".txt", ""}, "the lock of the killed one was taken over and removed"


def test_what_a_killed_builder_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    cache.stem.parent.mkdir()
    old, new, other = (
        cache.stem.with_name(f".{name}.partial")
        for name in (f"{cache.stem.name}-first.npy.0", f"{cache.stem.name}-first.npy.1", "other-first.npy.2")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    get(tmp_path, arrays)
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_without_locks_all_build_and_the_entry_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert whole(get(tmp_path, arrays))
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    loaded = cache.load(NAMES)
    assert loaded is not None and whole(loaded)
    assert len(list((tmp_path / "cache").iterdir())) == 3, "no lock is left"


def test_an_entry_that_is_replaced_is_none_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(tmp_path, arrays)
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    seen = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        replace(source, target)
        seen.append(cache.complete(NAMES))

    monkeypatch.setattr(os, "replace", watched)
    cache.save(arrays())
    assert seen == [False, False, True]
