"""Where the board of the ranks of one machine lies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megalith.distributed import board


@pytest.mark.parametrize(("room", "place"), [(0, "memory"), (2**62, "disk")], ids=["memory", "memory is full"])
def test_the_board_is_in_memory_where_there_is_room(
    room: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(board, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(board, "_ROOM", room)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    assert Path(board.make_folder()).parent == tmp_path / place


def test_the_board_is_elsewhere_without_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(board.make_folder()).parent == tmp_path
