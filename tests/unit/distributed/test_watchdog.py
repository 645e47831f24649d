"""What the watchdog says of ranks that it sees on the board; the board in memory and in a store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megalith.distributed.board import (
    MESSAGE,
    BoardUnavailable,
    FolderBoard,
    Identity,
    Status,
    StoreBoard,
    read_identity,
    write_identity,
)
from megalith.distributed.watchdog import RankView, Watchdog

from ...e2e.warm import WarmProcess


def view(rank: int, state: str = "running", *, waits: bool = True, phase: str = "bwd", since: float = 0.0) -> RankView:
    return RankView(Identity(rank, "h", 1), Status(7, phase, waits, "all_reduce", "tp", 5, since), state)


@pytest.mark.parametrize(
    ("views", "named"),
    [
        ([view(0), view(1, "dead")], ["rank 1 (h, process 1) of 2 died", "step 7", "backward"]),
        ([view(0, "stopped"), view(1)], ["rank 0 (h, process 1) of 2 ", "stopped", "step 7", "backward"]),
        ([view(0, "left", phase="left"), view(1)], ["rank 0 (h, process 1) of 2 left", "step 7"]),
        ([view(0), view(1, "silent")], ["rank 1 (h, process 1) of 2 ", "answer", "step 7", "backward"]),
        ([view(0), view(1, waits=False, phase="data")], ["rank 1 (h, process 1) of 2 ", "step 7", "data"]),
        # A dead rank goes before one that waits for it without having said so, and before one that failed for it.
        ([view(0, waits=False), view(1, "dead")], ["rank 1 (h, process 1) of 2 died"]),
        ([view(0, "failed", phase="failed", waits=False), view(1, waits=False)], ["rank 1 (h, process 1) of 2 "]),
        # Of two that are busy elsewhere, the one that has been so for longer.
        ([view(0, waits=False, since=5.0), view(1, waits=False, since=2.0)], ["rank 1 (h, process 1) of 2 "]),
        ([view(0), view(1)], ["all 2 ranks", "step 7", "all_reduce over tp (collective 5)"]),
        ([view(0), view(1, phase="fwd")], ["2 ranks", "--debug-collectives"]),
    ],
)
def test_the_cause_of_a_hang(views: list[RankView], named: list[str]) -> None:
    watchdog = Watchdog(1.0)
    watchdog._size = len(views)
    assert [part for part in named if part not in watchdog._cause(views)] == []


def test_a_status_survives_its_text() -> None:
    status = Status(3, "pre_save", True, "all_gather", "cp+dp", 12, 4.25, 2)
    assert Status.decode(status.encode()) == status
    assert Status.decode(b"") is None and Status.decode(status.encode()[:9]) is None
    assert "step 3" in status.place and "sav" in status.place
    activity = Status(3, "fwd", True, MESSAGE, "4").activity
    assert "step 3" in activity and "forward" in activity and "rank 4" in activity


def test_the_longest_status_has_room_on_the_board(tmp_path: Path) -> None:
    status = Status(10**9, "mid_commit", True, "all_gather_objects", "tp+cp+dp+pp", 10**12, 1e9, 10**9)
    board = FolderBoard(tmp_path, 3)
    board.post(status.encode())
    assert Status.decode(FolderBoard(tmp_path).status(3)) == status
    board.post(Status(1).encode())
    assert Status.decode(board.status(3)) == Status(1)


def test_of_several_writers_of_a_document_the_first_wins(tmp_path: Path) -> None:
    boards = [FolderBoard(tmp_path, rank) for rank in range(8)]
    won: list[int] = []

    def write(rank: int) -> None:
        if boards[rank].write("cause", f"text of {rank}"):
            won.append(rank)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and boards[0].read("cause") == f"text of {won[0]}"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


class Values:
    """The methods of a store that a board uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])


def test_a_board_in_a_store() -> None:
    store = Values()
    zero, one = StoreBoard(store, 0), StoreBoard(store, 1)
    write_identity(one, Identity(1, "other", 77))
    assert read_identity(zero, 1) == Identity(1, "other", 77) and read_identity(zero, 0).host == "?"
    one.post(Status(4, "fwd").encode())
    assert Status.decode(zero.status(1)) == Status(4, "fwd")
    assert (zero.write("cause", "a"), one.write("cause", "b"), one.read("cause"), one.read("none")) == (
        True,
        False,
        "a",
        None,
    )


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.distributed.board.STORE_SECONDS", 0.1)

    class Frozen(Values):
        def check(self, keys: list[str]) -> bool:
            time.sleep(1.0)
            return False

    with pytest.raises(BoardUnavailable):
        StoreBoard(Frozen(), 0).read("cause")


def test_ranks_of_other_machines_are_told_by_their_beats() -> None:
    store = Values()
    watchdog, board = Watchdog(4.0), StoreBoard(store, 0)
    watchdog._size, watchdog._identity = 3, Identity(0, os.uname().nodename, os.getpid())
    for rank in (1, 2):
        other = StoreBoard(store, rank)
        write_identity(other, Identity(rank, "other", 77))
        other.post(Status(4, "fwd", beat=1).encode())
    beating = threading.Timer(0.1, lambda: StoreBoard(store, 2).post(Status(4, "fwd", beat=2).encode()))
    beating.start()
    assert [view.state for view in watchdog._view_ranks(board)] == ["running", "silent", "running"]


def test_the_first_step_may_wait_longer() -> None:
    watchdog = Watchdog(1.0, 60.0)
    states = []
    for point, step in (("load", 6), ("data", 7), ("fwd", 7), ("opt", 7), ("data", 8)):
        watchdog.at(point, step)
        states.append(watchdog._starting)
    assert states == [True, True, True, True, False]


@pytest.mark.parametrize("fate", ["dead", "failed", "alive"])
def test_the_rank_that_broke_a_connection_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    monkeypatch.setattr("megalith.distributed.watchdog._SECONDS_FOR_CAUSE", 0.2)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    watchdog, other = Watchdog(4.0), FolderBoard(tmp_path, 1)
    watchdog._size, watchdog._identity = 2, Identity(0, os.uname().nodename, os.getpid())
    watchdog._board = FolderBoard(tmp_path, 0)
    culprit = Identity(1, os.uname().nodename, ended.pid if fate == "dead" else os.getpid())
    write_identity(other, culprit)
    other.post(Status(0, "serve").encode())
    if fate == "failed":
        other.write("failure", json.dumps({"who": str(culprit), "place": "while serving", "text": "no memory"}))
    said = watchdog.find_lost_peer()
    if fate == "alive":
        assert said is None
    else:
        verb = "died while serving" if fate == "dead" else "failed first, while serving: no memory"
        assert said is not None and said.startswith(f"{culprit} of 2 {verb}")


WAIT = """
import os, signal, time
from pathlib import Path
from megalith.distributed.board import FolderBoard
from megalith.distributed.context import Axis
from megalith.distributed.watchdog import Watchdog
class Board(FolderBoard):
    stops = os.environ["AT"] != "any time"
    def read(self, name):
        if os.environ["AT"] == "starting":
            while not watchdog.status().waits:
                time.sleep(0.01)
        if self.stops and watchdog.status().waits:
            self.stops = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().read(name)
watchdog = Watchdog(2.0)
with watchdog.guard(Board(Path("board"), 0), 0, 1):
    watchdog.at("fwd", 1), watchdog.at("fwd", 2)
    watchdog.before("all_reduce", Axis("dp"), None)
    for _ in range(10):
        print("waiting", flush=True)
        time.sleep(0.1)
    watchdog.after("all_reduce", Axis("dp"))
"""


def test_time_in_which_the_process_was_stopped_is_no_wait(warm: WarmProcess, tmp_path: Path) -> None:
    """A suspended job: the others were stopped too, and could not have answered."""
    waiting = {}
    for at in ("any time", "looking", "starting"):
        (tmp_path / at / "board").mkdir(parents=True)
        waiting[at] = warm.start_script(WAIT, tmp_path / at, AT=at)
    waiting["any time"].wait_for("waiting")
    waiting["any time"].send(signal.SIGSTOP)
    time.sleep(4.5)
    for at, process in waiting.items():
        assert not process.ended, f"{at}: {process.text}"
        process.send(signal.SIGCONT)
        assert process.finish().code == 0, f"{at}: {process.text}"


NO_ROOM = """
import os
from pathlib import Path
from megalith.distributed import watchdog
from megalith.distributed.board import FolderBoard
from megalith.distributed.context import Axis
class Board(FolderBoard):
    calls = 0
    def read(self, name):
        self.calls += 1
        if self.calls == 3 or self.calls > 3 and os.environ["OFTEN"] == "always":
            raise RuntimeError("can't start new thread")
        return super().read(name)
os.dup2(1, 2)
looks = watchdog.Watchdog(1.0)
with looks.guard(Board(Path("board"), 0), 0, 1):
    looks.at("data", 1), looks.at("data", 2)
    looks.before("all_reduce", Axis("dp"), None)
    watchdog.time.sleep(60)
"""


def test_the_watch_survives_a_look_that_fails(warm: WarmProcess, tmp_path: Path) -> None:
    """Nobody else ends a hang: torch's own timeout is far behind."""
    running = []
    for how_often in ("once", "always"):
        (tmp_path / how_often / "board").mkdir(parents=True)
        running.append(warm.start_script(NO_ROOM, tmp_path / how_often, OFTEN=how_often))
    for process in running:
        assert process.finish().code == 6, process.text
        assert "can't start new thread" in process.text and "all_reduce" in process.text
