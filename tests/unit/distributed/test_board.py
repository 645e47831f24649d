"""Where the board of the ranks of one machine lies."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
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
    monkeypatch.setattr(board, "_MIN_FREE_BYTES", room)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    assert Path(board.make_board_folder()).parent == tmp_path / place


def test_the_board_is_elsewhere_without_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(board.make_board_folder()).parent == tmp_path


HOLD = "import sys, time, pathlib; from megalith.distributed.board import FolderBoard; "
HOLD += "board = FolderBoard(pathlib.Path(sys.argv[1]), 0); print('held', flush=True); time.sleep(60)"


def test_what_a_killed_process_leaves_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_MEMORY", tmp_path)
    folder = Path(board.make_board_folder())
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout and holding.stdout.readline() == "held\n"
        an_hour_ago = time.time() - 3600.0
        os.utime(folder, (an_hour_ago, an_hour_ago))
        another = Path(board.make_board_folder())
        assert (folder / "rank-0").exists(), "a process uses it"
        holding.kill()
    third = Path(board.make_board_folder())
    assert not folder.exists()
    assert another.exists() and third.exists(), "those are new"


def test_a_board_whose_process_did_not_live_to_mark_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_MEMORY", tmp_path)
    old, young = Path(board.make_board_folder()), Path(board.make_board_folder())
    (old / "rank-0").touch()
    an_hour_ago = time.time() - 3600.0
    os.utime(old, (an_hour_ago, an_hour_ago))
    board.make_board_folder()
    assert not old.exists() and young.exists()
