"""The supervisor of ranks: who failed first, what is passed on, that no process is left. The ranks need no torch."""

from __future__ import annotations

import os
import re
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith.cli import launch
from megalith.cli.launch import _command, _Failure, package_environment
from megalith.config import load
from megalith.distributed.board import Status, process_state
from megalith.distributed.supervise import Attempt, FailureCause, Signals
from megalith.train.signals import STOP_SIGNALS

PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
from megalith.distributed.board import FolderBoard, Status
rank, board = int(os.environ["RANK"]), FolderBoard(Path(os.environ["MEGALITH_BOARD"]), int(os.environ["RANK"]))
def at(step, phase):
    board.post(Status(step, phase).encode())
def fail(text, kind="ValueError", ours=False, step=3):
    failure = dict(rank=rank, who=f"rank {rank} (h, process 1)", step=step, place="at step 3 in forward", kind=kind)
    document = json.dumps({**failure, "text": text, "ours": ours, "at": time.monotonic()})
    board.write(f"failure-{rank}", document), board.write("failure", document)
"""


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals(STOP_SIGNALS) as signals:
        yield signals


def attempt(script: str, signals: Signals, count: int = 2) -> Attempt:
    return Attempt([sys.executable, "-c", PREAMBLE + script], count, 0, os.environ, signals)


def run(script: str, signals: Signals, count: int = 2) -> tuple[Attempt, FailureCause | None]:
    """Run the script on each rank; the cause if it was no success."""
    ranks = attempt(script, signals, count)
    try:
        ranks.wait(signals, lambda text: None)
        return ranks, None if ranks.stopped is not None else ranks.cause()
    finally:
        ranks.board.remove()


def test_a_success(signals: Signals) -> None:
    ranks, cause = run("assert os.environ['WORLD_SIZE'] == '2'", signals)
    assert (ranks.stopped, cause) == (0, None)
    assert not ranks.board.folder.exists()


def test_a_killed_rank_is_the_cause_though_the_other_ends_too(signals: Signals) -> None:
    script = """
at(7, "bwd")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3)
sys.exit(6)
"""
    _, cause = run(script, signals)
    assert cause is not None and (cause.exit_code, cause.kind, cause.step) == (137, "signal 9", 7)
    assert re.match(r"rank 1 \(.*\) of 2\b.*\bSIGKILL\b.*\bstep 7\b.*\bbackward\b", cause.text)
    assert re.search(r"RSS \d+\.\d\d GiB of \d+\.\d\d GiB$", cause.text)


def test_a_rank_that_held_most_of_the_memory_was_out_of_memory(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.distributed.supervise.memory_limit", lambda: 24 << 20)
    _, cause = run("os.kill(os.getpid(), signal.SIGKILL)", signals, 1)
    assert cause is not None and re.search(r"\bout of memory\b.*\bRSS \S+ GiB of 0\.02 GiB$", cause.text)


@pytest.mark.parametrize(("kills_of_kernel", "outside"), [((0, 0), True), ((3, 4), False)])
def test_a_kill_from_outside_is_no_fault_of_the_program(
    signals: Signals, monkeypatch: pytest.MonkeyPatch, kills_of_kernel: tuple[int, int], outside: bool
) -> None:
    counts = iter((*kills_of_kernel, *[kills_of_kernel[1]] * 9))
    monkeypatch.setattr("megalith.distributed.supervise.oom_kills", lambda: next(counts))
    _, cause = run("os.kill(os.getpid(), signal.SIGKILL)", signals, 1)
    assert cause is not None and cause.external is outside
    assert ("likely" in cause.text) is not outside
    failed = _Failure(cause, saved=None)
    assert failed.repeats(failed) is not outside


def test_a_crash_is_a_fault_of_the_program(signals: Signals) -> None:
    _, cause = run("os.kill(os.getpid(), signal.SIGSEGV)", signals, 1)
    assert cause is not None and not cause.external
    assert _Failure(cause, saved=2).repeats(_Failure(cause, saved=2))


def test_the_others_get_little_time_after_a_rank_has_died(signals: Signals) -> None:
    """They may still be starting, and know nothing of it."""
    ranks, cause = run("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", signals)
    assert cause is not None and cause.exit_code == 137 and cause.text.startswith("rank 1 ")
    first, second = ranks.ended
    assert second.killed_by_supervisor and second.at - first.at < 2.0


def test_the_first_failure_is_the_cause(signals: Signals) -> None:
    script = """
if rank == 1:
    fail("boom")
    sys.exit(1)
time.sleep(0.3)
fail("lost a peer")
sys.exit(1)
"""
    _, cause = run(script, signals)
    assert cause is not None and cause.exit_code == 1 and not cause.permanent
    assert re.match(r"rank 1 \(h, process 1\) of 2\b.*\bstep 3\b.*\bforward: boom$", cause.text)


def test_an_error_of_all_ranks_names_none(signals: Signals) -> None:
    _, cause = run("fail('the loss is nan', 'MegalithError', ours=True); sys.exit(4)", signals)
    assert cause is not None and (cause.text, cause.exit_code, cause.permanent) == ("the loss is nan", 4, True)


def test_memory_of_a_gpu_is_not_that_of_the_host(signals: Signals) -> None:
    _, of_gpu = run("fail('CUDA out of memory', 'DeviceError'); sys.exit(1)", signals, 1)
    _, of_host = run("fail('out of memory'); sys.exit(1)", signals, 1)
    assert of_gpu is not None and of_gpu.text.endswith("in forward: CUDA out of memory")
    assert of_host is not None and "RSS" in of_host.text


def test_a_hang_is_the_cause_though_a_stopped_rank_had_to_be_killed(signals: Signals) -> None:
    script = """
at(4, "fwd")
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.3)
board.write("alarm", "1"), board.write("cause", "rank 0 is stopped")
sys.exit(6)
"""
    before = time.monotonic()
    ranks = attempt(script, signals)
    ranks_pids = {rank: process.pid for rank, process in ranks._running.items()}
    time.sleep(0.8)
    os.kill(ranks_pids[0], signal.SIGKILL)  # as the rank that reports does
    ranks.wait(signals, lambda text: None)
    assert ranks.cause() == FailureCause("rank 0 is stopped", 6, "hang", 4)
    ranks.board.remove()
    assert time.monotonic() - before < 5.0


def test_a_rank_that_outlives_a_failure_is_killed(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.distributed.supervise._GRACE_SECONDS", 0.3)
    ranks, cause = run("sys.exit(9) if rank else time.sleep(60)", signals)
    assert cause is not None and cause.exit_code == 9 and "rank 1" in cause.text
    assert [(end.rank, end.code, end.killed_by_supervisor) for end in ranks.ended] == [(1, 9, False), (0, -9, True)]


def test_what_a_rank_has_started_does_not_stay(signals: Signals, tmp_path: Path) -> None:
    script = f"""
import subprocess
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path("{tmp_path}/worker").write_text(str(worker.pid))
os._exit(3)
"""
    run(script, signals, 1)
    deadline = time.monotonic() + 5.0
    while process_state(int((tmp_path / "worker").read_text())) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_are_passed_on_and_the_save_is_waited_for(signals: Signals, number: signal.Signals) -> None:
    script = """
def save(number, frame):
    time.sleep(0.3)
    sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, save)
at(1, "fwd")
time.sleep(60)
"""
    ranks = attempt(script, signals)
    said: list[str] = []
    while any(Status.decode(ranks.board.status(rank)) is None for rank in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), number)
    ranks.wait(signals, said.append)
    ranks.board.remove()
    assert (ranks.stopped, [end.code for end in ranks.ended]) == (75, [75, 75])
    assert len(said) == 1 and number.name in said[0]


def test_the_second_signal_ends_ranks_that_do_not_answer(signals: Signals) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: None)
at(1, "fwd")
while True:
    time.sleep(1)
"""
    ranks = attempt(script, signals)
    while any(Status.decode(ranks.board.status(rank)) is None for rank in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM), os.kill(os.getpid(), signal.SIGTERM)
    before = time.monotonic()
    ranks.wait(signals, lambda text: None)
    ranks.board.remove()
    assert ranks.stopped == 130 and time.monotonic() - before < 2.5  # 1.6 on a quiet machine


def test_a_signal_before_the_first_step_promises_no_save(signals: Signals) -> None:
    ranks = attempt("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nat(0, 'start')\ntime.sleep(60)", signals)
    said: list[str] = []
    while any(Status.decode(ranks.board.status(rank)) is None for rank in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    ranks.wait(signals, said.append)
    ranks.board.remove()
    assert len(said) == 1 and "SIGTERM" in said[0] and not re.search("sav(e|ing)", said[0])


@pytest.mark.parametrize("early", ["signal.signal(signal.SIGTERM, signal.SIG_DFL)", "code = 143"])
@pytest.mark.parametrize("step", [0, 3])
def test_ranks_that_a_signal_meets_while_they_start_have_not_failed(signals: Signals, early: str, step: int) -> None:
    """One rank ends by the signal, the other misses it: no failure, unless there were steps already."""
    script = f"""
code = 6
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
if rank == 1:
    {early}
at({step}, 'start')
time.sleep(60)
"""
    ranks = attempt(script, signals)
    while any(Status.decode(ranks.board.status(rank)) is None for rank in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    ranks.wait(signals, lambda line: None)
    stopped = ranks.stopped
    ranks.board.remove()
    assert stopped == (None if step else 143)


FORKED = """
import os, signal, sys
from megalith.distributed.supervise import Attempt, ForkedRank, Signals
sys.stdout.write("said before the fork. ")
shared = ["imported before the fork"]
earlier = signal.signal(signal.SIGUSR1, lambda number, frame: None)
with Signals((signal.SIGUSR1, signal.SIGTERM)) as signals:
    try:
        ranks = Attempt(None, 3, 2, {"OF_THE_RUN": "set"}, signals)
    except ForkedRank:
        rank = int(os.environ["RANK"])
        assert shared and os.environ["OF_THE_RUN"] == "set" and os.environ["MEGALITH_ATTEMPT"] == "2"
        assert os.getsid(0) == os.getpid() and os.getppid() == int(os.environ["MEGALITH_SUPERVISOR"])
        assert os.read(0, 1) == b"" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert ("MEGALITH_STORE_FD" in os.environ) == (rank == 0)
        if rank == 0:
            import socket
            assert socket.socket(fileno=int(os.environ["MEGALITH_STORE_FD"])).getsockname()[1] > 0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    ranks.wait(signals, print)
    print(sorted((end.rank, end.code) for end in ranks.ended), ranks.cause().text)
    ranks.board.remove()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_forked_ranks_are_processes_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.count("said before the fork") == 1
    assert re.search(r"\[\(0, 0\), \(1, -9\), \(2, 0\)\] rank 1 \(.*\bSIGKILL\b", done.stdout)


@pytest.mark.parametrize(
    ("flags", "gpu_files", "program", "forks"),
    [
        ([], [], "megalith", True),
        ([], ["/*"], "megalith", False),
        (["--device", "cpu"], ["/*"], "megalith", True),
        ([], [], "mine.py", False),
    ],
)
def test_ranks_are_forks_where_there_is_no_gpu_and_the_program_is_ours(
    flags: list[str],
    gpu_files: list[str],
    program: str,
    forks: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "megalith").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / program)])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(launch, "_GPU_FILES", [pattern.lstrip("/") for pattern in gpu_files])
    before = dict(os.environ)
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
    words += " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer"
    config = load([*words.split(), "--vocab-size", "10", "--nproc", "2", *flags], {}, files=False)
    monkeypatch.setattr(launch, "_IMPORTED_BY_RANKS", ())
    monkeypatch.setattr(launch.gc, "freeze", lambda: None)
    assert launch._import_for_ranks(config) is forks
    assert dict(os.environ) == before


SUSPENDED = """
import os, sys
from megalith.distributed.supervise import Attempt, Signals
from megalith.train.signals import STOP_SIGNALS
with Signals(STOP_SIGNALS) as signals:
    ranks = Attempt([sys.executable, "-c", "import time; time.sleep(60)"], 2, 0, os.environ, signals)
    print(*[process.pid for process in ranks._running.values()], flush=True)
    ranks.wait(signals, print)
"""


@pytest.fixture(params=["with a shell", "without"])
def suspended(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int], bool]]:
    """A supervisor, the processes of it and its ranks, and whether there is a shell of its session to continue it."""
    has_shell = request.param == "with a shell"
    apart = os.setpgrp if has_shell else os.setsid
    command = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=apart) as supervisor:
        assert supervisor.stdout
        yield supervisor, [supervisor.pid, *map(int, supervisor.stdout.readline().split())], has_shell
        supervisor.send_signal(signal.SIGCONT)
        supervisor.send_signal(signal.SIGTERM)


def test_ctrl_z_stops_the_ranks_too(suspended: tuple[subprocess.Popen[str], list[int], bool]) -> None:
    supervisor, pids, has_shell = suspended

    def wait_until(stopped: bool) -> None:
        deadline = time.monotonic() + 20.0
        while [process_state(pid) == "T" for pid in pids] != [stopped] * 3:
            assert time.monotonic() < deadline, [process_state(pid) for pid in pids]
            time.sleep(0.01)

    for _ in range(2):
        supervisor.send_signal(signal.SIGTSTP)
        if has_shell:
            wait_until(stopped=True)
            supervisor.send_signal(signal.SIGCONT)
        else:
            time.sleep(0.3)
        wait_until(stopped=False)


def test_a_data_file_that_shrinks(tmp_path: Path) -> None:
    from megalith.cli.launch import _shrunk_files

    file = tmp_path / "text.bin"
    file.write_bytes(b"x" * 100)
    before = {file: 100}
    assert _shrunk_files(before) == ""
    file.write_bytes(b"x" * 40)
    assert all(part in _shrunk_files(before) for part in (str(file), "100", "40"))


def test_ranks_import_what_their_launcher_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "megalith"
    installed.touch()
    monkeypatch.setattr(sys, "argv", [str(installed), "train", "--nproc", "2"])
    assert _command(["--x"]) == [sys.executable, str(installed), "train", "--x"], "-m puts the working folder first"
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    assert _command(["--x"]) == [sys.executable, "-m", "megalith", "train", "--x"]

    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    source = Path(launch.__file__).resolve().parents[2]
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/usr/lib"])
    assert package_environment()["PYTHONPATH"] == f"{source}{os.pathsep}/of/the/user"
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(source)])
    assert package_environment()["PYTHONPATH"] == "/of/the/user", "packages that it replaces stay replaced"
