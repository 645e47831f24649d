"""A save folder has one owner: a frozen one keeps it on its machine, and elsewhere loses it without doing harm."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint import CheckpointContent, DirectoryStore, Retention
from megalith.checkpoint.files.commit import claimed
from megalith.checkpoint.store import owner
from megalith.checkpoint.store.owner import LOCK_FILE, Owner, claim
from megalith.errors import CheckpointError

MakeContent = Callable[..., CheckpointContent]
Same = Callable[[CheckpointContent, CheckpointContent], bool]

# Imports what saves need and forks for each script; a child that stops itself is reported, and continued on request.
SERVER = """
import errno, fcntl, json, os, signal, sys, time, traceback
sys.path.insert(0, sys.argv[1])
from conftest import build_content
import megalith.checkpoint.store.saving
from megalith.checkpoint import DirectoryStore, Retention, Staging
from megalith.checkpoint.store import owner
from megalith.errors import CheckpointError

def without_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

for line in sys.stdin:
    script, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            exec(script)
            os._exit(0)
        except CheckpointError as error:
            print(json.dumps(["said", str(error)]), flush=True)
            os._exit(error.exit_code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        print(json.dumps(["stopped", child]), flush=True)
        sys.stdin.readline()
        os.kill(child, signal.SIGCONT)
    print(json.dumps(["ended", status]), flush=True)
"""

# Two saves by a run on "another machine" without locks, frozen before the Nth change of the save folder.
FROZEN_RUN = """
folder, at, keep_last, beside = arguments
owner._place = lambda: "elsewhere"
fcntl.flock = without_locks
count = 0
def freezing(act):
    def frozen(*paths, **more):
        global count
        if str(paths[0]).startswith(folder):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.1)  # another thread than this one may take the signal
        return act(*paths, **more)
    return frozen
store = DirectoryStore(folder, retention=Retention(keep_last), claimed=True)
with store.claim():
    os.rename, os.replace, os.mkdir = freezing(os.rename), freezing(os.replace), freezing(os.mkdir)
    for iteration in (8, 9):
        if beside:
            pending = store.schedule(iteration, build_content(100 + iteration), {"by": "a"}, staging=Staging())
            while pending.advance() is None:
                pass
        else:
            store.save(iteration, build_content(100 + iteration), {"by": "a"})
"""

HOLD = """
import signal
folder, = arguments
with owner.claim(__import__("pathlib").Path(folder)):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@dataclass
class Server:
    """The process that forks for each script."""

    process: subprocess.Popen[str]

    def run(self, script: str, *arguments: Any) -> None:
        print(json.dumps([script, arguments]), file=self.process.stdin, flush=True)

    def next(self) -> tuple[str, Any]:
        assert self.process.stdout is not None
        kind, value = json.loads(self.process.stdout.readline())
        return kind, value

    def resume(self) -> None:
        print("", file=self.process.stdin, flush=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield Server(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of several machines without locks, with heartbeats that need not be waited for."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(owner.fcntl, "flock", refuse)
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)


def assert_whole(store: DirectoryStore, make_content: MakeContent, same_tensors: Same, mine: set[int]) -> None:
    """Every checkpoint is sound and belongs to one run, and those of this one are as they were saved."""
    for iteration in store.iterations():
        assert store.verify(iteration) == []
        manifest, target = store.manifest(iteration), make_content(0)
        assert manifest is not None
        store.load(iteration, target)
        assert same_tensors(target, make_content((100 if manifest["by"] == "a" else 200) + iteration))
    owners = {iteration: (store.manifest(iteration) or {})["by"] for iteration in store.iterations()}
    assert mine <= {iteration for iteration, by in owners.items() if by == "b"}, owners


@pytest.mark.parametrize("beside", [False, True], ids=["", "beside"])
def test_a_frozen_owner_that_wakes_up_does_no_harm(
    tmp_path: Path,
    server: Server,
    make_content: MakeContent,
    same_tensors: Same,
    monkeypatch: pytest.MonkeyPatch,
    *,
    beside: bool,
) -> None:
    """Frozen before each rename and each new folder in turn, while another run takes the folder over and saves."""
    without_locks(monkeypatch)
    points = 0
    for at in range(1, 100):
        folder = tmp_path / str(at)
        before = DirectoryStore(folder)
        for iteration in (2, 8):  # the latter is replaced
            before.save(iteration, make_content(100 + iteration), {"by": "a"})
        server.run(FROZEN_RUN, str(folder), at, 1, beside)
        kind, value = server.next()
        if kind == "ended":
            assert value == 0, "a run that nobody disturbs ends well"
            break
        points += 1
        assert kind == "stopped"
        store = DirectoryStore(folder, retention=Retention(keep_last=3), claimed=True)
        with store.claim():
            for iteration in (8, 10):
                store.save(iteration, make_content(200 + iteration), {"by": "b"})
            server.resume()
            kind, value = server.next()
            assert kind == "said" and f"process {os.getpid()} on" in value, value
            kind, value = server.next()
            assert kind == "ended" and os.waitstatus_to_exitcode(value) == 4
            assert store.latest() == 10
            assert_whole(store, make_content, same_tensors, {8, 10})
            store.save(12, make_content(212), {"by": "b"})
            assert store.newest_verified() == (12, [])
            assert_whole(store, make_content, same_tensors, {10, 12})
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        shutil.rmtree(folder)
    assert points >= 8, "each save makes a folder and renames at least three times"


def test_who_woke_up_after_the_other_had_ended(
    tmp_path: Path, server: Server, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    server.run(FROZEN_RUN, str(tmp_path), 2, 1, False)
    assert server.next()[0] == "stopped"
    store = DirectoryStore(tmp_path, claimed=True)
    with store.claim():
        store.save(10, make_content(210), {})
    server.resume()
    kind, value = server.next()
    assert kind == "said" and str(tmp_path) in value
    assert os.waitstatus_to_exitcode(server.next()[1]) == 4
    assert (store.iterations(), store.latest()) == ([10], 10)


def test_a_frozen_owner_keeps_the_folder_on_its_machine(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another container its process cannot be asked for; the kernel knows of its lock."""
    server.run(HOLD, str(tmp_path))
    kind, pid = server.next()
    assert kind == "stopped"
    monkeypatch.setattr(owner, "_place", lambda: "another container")
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)
    with pytest.raises(CheckpointError, match=f"process {pid} on"), claim(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    server.resume()
    assert server.next() == ("ended", signal.SIGKILL)
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 30.0)
    with claim(tmp_path):
        assert time.monotonic() - began < 10, "the lock of a killed run is free at once"


def test_a_child_does_not_keep_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from megalith.checkpoint.store.owner import claim
with claim(Path(sys.argv[1])):
    if os.fork() == 0:
        print("child", flush=True)
        time.sleep(30)
        os._exit(0)
    time.sleep(60)
"""
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "child\n"
    run.kill()
    run.wait()
    with claim(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_locks(monkeypatch)
    with claim(tmp_path):
        assert str(tmp_path) in caplog.text and "locks" in caplog.text
        assert json.loads((tmp_path / LOCK_FILE).read_text())["domain"] == ""
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), claim(tmp_path):
            pass


def test_locks_that_lock_nobody_out_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner.fcntl, "flock", lambda *_: None)
    with claim(tmp_path):
        assert "locks" in caplog.text
        assert json.loads((tmp_path / LOCK_FILE).read_text())["domain"] == ""


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside"])
def test_a_folder_that_goes_away_is_not_made_again(
    tmp_path: Path, make_content: MakeContent, how: str, *, beside: bool
) -> None:
    folder = tmp_path / "save"
    store = DirectoryStore(folder, claimed=True)
    with store.claim():
        store.save(1, make_content(1), {})
        folder.rename(tmp_path / "elsewhere") if how == "renamed" else shutil.rmtree(folder)
        if how == "replaced":
            folder.mkdir()
        with pytest.raises(CheckpointError, match=str(folder)) as caught:
            store.save(2, make_content(2), {})
    assert caught.value.exit_code == 4
    assert not folder.exists() or not any(folder.iterdir())


def test_a_machine_that_gets_another_name_keeps_its_claim(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, claimed=True)
    with store.claim():
        store.save(1, make_content(1), {})
        monkeypatch.setattr(owner.socket, "gethostname", lambda: "named-by-dhcp")
        store.save(2, make_content(2), {})
    assert {path.name for path in tmp_path.iterdir()} == {
        "iter_0000001",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    }


def test_a_file_server_that_does_not_answer_is_named(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    store = DirectoryStore(tmp_path, claimed=True)
    with store.claim():
        store.save(1, make_content(1), {})
        monkeypatch.setattr(Path, "is_dir", stale)
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*{os.strerror(errno.ESTALE)}"):
            store.save(2, make_content(2), {})
        monkeypatch.undo()
        store.save(2, make_content(2), {})


def test_a_claim_by_an_older_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)
    body = {"owner": Owner("far", "00000000", 1, "1").__dict__, "token": "x", "since": "2026-01-01"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(body))
    with claim(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["owner"]["pid"] == os.getpid()


def test_the_workspace_of_a_killed_run_is_cleared_by_the_next(tmp_path: Path, make_content: MakeContent) -> None:
    store = DirectoryStore(tmp_path)
    store.save(1, make_content(1), {})
    here = Owner.this_process()
    dead = tmp_path / f".claimed-run.{here.place}.{2**22 - 1}.1"
    (dead / f".saving-iter_0000002.{here.place}.{2**22 - 1}.1" / "sub").mkdir(parents=True)
    (tmp_path / "iter_0000001").rename(dead / f".replaced-iter_0000001.{here.place}.{2**22 - 1}.1")
    (dead / "anything").write_text("")
    assert store.newest_verified() == (1, []), "what was being replaced is put back by a reader already"
    with claimed(tmp_path):
        assert not dead.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}
