"""Memory of mapped files is given back, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.files.safe_loading import map_tensors
from megalith.checkpoint.sources.per_rank import MappedFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the maps of a process are read from /proc")


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssFile:")).split()[1])


def test_pages_of_a_file_that_was_read_are_given_back(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4_000_000)}, tmp_path / "a.pt")
    tensor = map_tensors(tmp_path / "a.pt")["a"]
    total = int(tensor.sum())
    before = resident_file_bytes()
    MappedFolder(tmp_path).release(tensor[1000:].view(-1, 3000).t()[:2000])
    assert before - resident_file_bytes() > 15_000_000
    assert int(tensor.sum()) == total


def test_other_memory_is_not_touched(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4_000_000)}, tmp_path / "a.pt")
    mapped = map_tensors(tmp_path / "a.pt")["a"]
    own = torch.ones(4_000_000)
    folder = MappedFolder(tmp_path)
    folder.release(own)
    MappedFolder(tmp_path / "elsewhere").release(mapped)
    assert own.eq(1).all() and mapped.eq(torch.arange(4_000_000)).all()
