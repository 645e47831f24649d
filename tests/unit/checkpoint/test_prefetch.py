"""Fetching is a help and no more: it ends when it is told to, and damage is left to the load."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megalith.checkpoint.files import hashing
from megalith.checkpoint.files.hashing import Prefetch

ASKED = "posix_fadvise"


def wait_for_the_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join(60.0)
            assert not thread.is_alive()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the system was asked for: first byte and number of bytes of each call."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, ASKED, lambda _fd, start, length, _advice: calls.append((start, length)))
    monkeypatch.setattr(hashing, "_ASKED_AT_ONCE", 1000)
    return calls


def test_it_asks_for_all_and_passes_over_what_cannot_be_read(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    (tmp_path / "file").write_bytes(bytes(2500))
    Prefetch([tmp_path / "file", tmp_path / "none", tmp_path])
    Prefetch([])
    wait_for_the_end()
    assert [call for call in asked if call[0] > 0] == [(1000, 1000), (2000, 1000)]


def test_it_asks_for_no_more_than_its_share_of_memory(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PAGE_SIZE": hashing._SHARE_OF_MEMORY, "SC_PHYS_PAGES": 3000}  # 3000 bytes for two files
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(hashing, "_PREFETCH_THREADS", 1)
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(2500))
    Prefetch([tmp_path / "a", tmp_path / "b"])
    wait_for_the_end()
    assert asked == [(0, 1000), (1000, 1000), (2000, 1000), (0, 1000)]


def test_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(2500))
    calls, begun, stopped = [], threading.Event(), threading.Event()

    def ask(_fd: int, start: int, _length: int, _advice: int) -> None:
        calls.append(start)
        begun.set()
        assert stopped.wait(60.0)

    monkeypatch.setattr(os, ASKED, ask)
    monkeypatch.setattr(hashing, "_ASKED_AT_ONCE", 1000)
    reading = Prefetch([tmp_path / "file"])
    assert begun.wait(60.0)
    reading.stop()
    stopped.set()
    wait_for_the_end()
    assert calls == [0]


def test_where_the_system_cannot_be_asked_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, ASKED)
    Prefetch([tmp_path])
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
