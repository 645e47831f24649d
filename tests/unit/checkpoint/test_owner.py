"""Two runs never save into one folder, and a dead run never keeps one (F12)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint.store import owner
from megalith.checkpoint.store.owner import LOCK_FILE, Owner, claim
from megalith.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from megalith.checkpoint.store.owner import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def write_lock(folder: Path, who: Owner, text: str | None = None) -> None:
    body: dict[str, Any] = {"owner": who.__dict__, "token": "x", "since": "2026-01-01"}
    (folder / LOCK_FILE).write_text(json.dumps(body) if text is None else text)


def test_a_claim_excludes_others_while_it_lasts(tmp_path: Path) -> None:
    with claim(tmp_path / "new"):
        with (
            pytest.raises(CheckpointError, match=f"{os.getpid()} "),
            claim(tmp_path / "new"),
        ):
            pass
        assert (tmp_path / "new" / LOCK_FILE).exists()
    assert not (tmp_path / "new" / LOCK_FILE).exists()
    with claim(tmp_path / "new"):
        pass


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=f"{first.pid} .*--save.*megalith checkpoint"), claim(tmp_path):
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with claim(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["owner"]["pid"] == os.getpid()


def test_a_number_that_went_to_another_process_is_no_owner(tmp_path: Path) -> None:
    me = Owner.this_process()
    write_lock(tmp_path, replace(me, born="1"))
    with claim(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"owner": {}}'])
def test_a_torn_lock_is_no_claim(tmp_path: Path, text: str) -> None:
    write_lock(tmp_path, Owner.this_process(), text)
    with claim(tmp_path):
        pass


def test_another_machine_without_signs_of_life_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    write_lock(tmp_path, Owner("far", "00000000", 1, "1"))
    started = time.monotonic()
    with claim(tmp_path):
        assert time.monotonic() - started >= 0.14


def test_another_machine_that_lives_is_respected_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.2)
    write_lock(tmp_path, Owner("far", "00000000", 77, "1"))
    stop = threading.Event()

    def beat() -> None:
        moment = 1_000_000.0  # 1970: its clock is far off
        while not stop.wait(0.02):
            moment += 1
            os.utime(tmp_path / LOCK_FILE, (moment, moment))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="77 .*far"), claim(tmp_path):
            pass
    finally:
        stop.set()
        thread.join()


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.02)
    with claim(tmp_path):
        before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 5
        while (tmp_path / LOCK_FILE).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)
    release = threading.Event()

    def contend() -> None:
        barrier.wait()
        try:
            with claim(tmp_path):
                outcomes.append("held")
                release.wait(20)
        except CheckpointError:
            outcomes.append("refused")

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(outcomes) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["refused"] * 7


def test_liveness() -> None:
    me = Owner.this_process()
    assert me.is_here() and not me.is_dead()
    process = subprocess.Popen([sys.executable, "-c", ""])
    child = Owner(me.host, me.place, process.pid, owner._born(process.pid))
    process.wait()
    assert child.is_dead()
    assert not replace(child, place="elsewhere").is_dead(), "what cannot be asked is not called dead"
