"""Fetching is a help and no more: it ends when it is told to, and damage is left to the load."""

from __future__ import annotations

import threading
from pathlib import Path

from megalith.checkpoint import prefetch
from megalith.checkpoint.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_it_reads_to_the_end_and_passes_over_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    Prefetch([tmp_path / "file", tmp_path / "none", tmp_path])
    Prefetch([])
    for thread in threads():
        thread.join(30.0)
    assert threads() == []


def test_it_stops(tmp_path: Path) -> None:
    """A file that never ends."""
    before = prefetch._SHARE_OF_MEMORY
    assert before >= 8
    reading = Prefetch([Path("/dev/zero")])
    reading.stop()
    for thread in threads():
        thread.join(30.0)
    assert threads() == []
