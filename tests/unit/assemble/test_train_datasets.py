"""The order in which the ranks of a run build and check their datasets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalith.assemble import training
from megalith.data.index_cache import IndexSpec, load_or_build

RECIPE = IndexSpec("Kind-train", "what it is", ("order",), lambda: {"order": np.arange(1000)})


class Barriers:
    """A `RankGroup` of threads."""

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        self._rank, self._barrier = rank, barrier

    def run_on_first(self, act: Callable[[], Any]) -> None:
        if self._rank == 0:
            act()
        self._barrier.wait(30)

    def run_on_all(self, act: Callable[[], Any]) -> None:
        act()
        self._barrier.wait(30)


def test_ranks_of_a_machine_with_its_own_disk_wait_for_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on the second machine keeps size and time of the file, which only the check there finds."""
    for machine in ("a", "b"):
        load_or_build(tmp_path / machine, RECIPE)
    (path,) = (tmp_path / "b").glob("*-order.npy")
    content, times = bytearray(path.read_bytes()), path.stat()
    content[-8] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def build(config: Any, tokenizer: Any, iteration: int, *, cache_is_checked: bool) -> Any:
        if config.launch.local_rank == 0:
            time.sleep(0.2)  # the others would have loaded by then
        return load_or_build(config.folder, RECIPE, is_checked=cache_is_checked).arrays["order"]

    monkeypatch.setattr(training, "build_datasets", build)
    monkeypatch.setattr(training, "RankGroup", lambda world: Barriers(*world))
    barrier, found = threading.Barrier(3), dict[int, Any]()

    def run(rank: int, machine: str, local_rank: int) -> None:
        config: Any = SimpleNamespace(
            data=SimpleNamespace(has_data_source=True, data_cache_path=None),
            launch=SimpleNamespace(local_rank=local_rank),
            folder=tmp_path / machine,
        )
        state: Any = SimpleNamespace(context=SimpleNamespace(world=(rank, barrier)), iteration=0)
        found[rank] = training._datasets(config, SimpleNamespace(), state)  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=place) for place in ((0, "a", 0), (1, "b", 0), (2, "b", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        np.testing.assert_array_equal(found[rank], np.arange(1000))
