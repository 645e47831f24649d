"""Any stop signal at any moment: finish the step, save, say how to go on, exit 75; the second leaves at once (F04)."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.checkpoint import DirectoryStore

from .checkpoints import assert_same, state_of
from .small_run import on_text
from .test_resume import MODEL, command
from .warm import Finished, Running, WarmProcess

ENDLESS = ["--train-iters", 100000, "--eval-interval", 100000, "--save-interval", 100000]


def stopped_at(finished: Finished, save: Path) -> int:
    """Check that the run stopped as promised; returns the iteration that it saved."""
    assert finished.code == 75, finished.text
    assert "Traceback" not in finished.text
    match = re.search(
        r"stopped at iteration (\d+); resume( \(.*\))? with:\n  python pretrain_gpt.py .*--load", finished.text
    )
    assert match, finished.text
    iteration = int(match[1])
    assert DirectoryStore(save).latest() == (iteration or None)
    return iteration


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_between_steps(warm: WarmProcess, tmp_path: Path, number: signal.Signals) -> None:
    save = tmp_path / "c"
    running = warm.start(command(save, *ENDLESS), tmp_path)
    running.wait_for("iteration        5/")
    running.send(number)
    finished = running.finish()
    iteration = stopped_at(finished, save)
    assert f"{number.name}: " in finished.text
    assert f"[exiting program after receiving {number.name}.] datetime: " in finished.text
    # The last line printed is of the step that was saved: nothing done is lost, nothing more was begun.
    assert f"iteration {iteration:8d}/" in finished.text and f"iteration {iteration + 1:8d}/" not in finished.text


def test_a_signal_during_start_up(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    running = warm.start(command(save, *ENDLESS), tmp_path)
    running.wait_for("using world size")
    running.send(signal.SIGTERM)
    assert stopped_at(running.finish(), save) == 0


def test_a_signal_during_an_evaluation(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = command(save, "--train-iters", 40, "--eval-interval", 3, "--save-interval", 100000)
    words[words.index("--eval-iters") + 1] = 2000
    running = warm.start(words, tmp_path)
    running.wait_for("iteration        3/")
    running.send(signal.SIGINT)
    finished = running.finish()
    assert stopped_at(finished, save) == 3
    assert "validation loss" not in finished.text


def test_a_signal_during_a_save_and_the_curve_goes_on(warm: WarmProcess, tmp_path: Path) -> None:
    plan = ["--train-iters", 8, "--eval-interval", 4, "--save-interval", 3]
    whole, save = tmp_path / "whole", tmp_path / "c"
    assert warm.run(command(whole, *plan), tmp_path).code == 0
    running = warm.start(command(save, *plan), tmp_path)
    running.wait_for("saving checkpoint at iteration       3")
    running.send(signal.SIGUSR1)
    assert 3 <= stopped_at(running.finish(), save) < 8
    assert warm.run(command(save, *plan), tmp_path).code == 0
    assert_same(state_of(whole, 8), state_of(save, 8))


def test_the_second_signal_leaves_at_once(warm: WarmProcess, tmp_path: Path) -> None:
    words = command(tmp_path / "c", "--train-iters", 10, "--save-interval", 10)
    words[words.index("--global-batch-size") + 1] = 20000  # one step takes far longer than this test
    running = warm.start(words, tmp_path)
    running.wait_for("[before the start of training step]")
    time.sleep(0.5)
    running.send(signal.SIGINT)
    time.sleep(0.5)
    before = time.monotonic()
    running.send(signal.SIGINT)
    finished = running.finish()
    assert finished.code == 130
    assert time.monotonic() - before < 2.0
    assert "Traceback" not in finished.text


def test_without_save_a_signal_is_just_an_end(warm: WarmProcess, tmp_path: Path) -> None:
    running = warm.start([*MODEL, "--train-iters", 100000], tmp_path)
    running.wait_for("iteration        2/")
    running.send(signal.SIGTERM)
    finished = running.finish()
    assert finished.code == 128 + signal.SIGTERM
    assert re.search(r"nothing .*--save", finished.text) and "--load" not in finished.text


# The reader of the screen leaves: `| head`, or a `tee` that Ctrl-C ends first.


def with_a_reader_that_leaves(warm: WarmProcess, cwd: Path, words: list[object], needle: bytes) -> Running:
    """Start a run whose output goes into a pipe that nobody reads any more after the needle."""
    os.mkfifo(cwd / "screen")
    running = warm.start(words, cwd, log=cwd / "screen")
    with (cwd / "screen").open("rb") as screen:
        for line in screen:
            if needle in line:
                break
    (cwd / "screen").unlink()
    return running


def test_training_goes_on_when_the_reader_leaves(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = on_text(tmp_path, command(save, "--train-iters", 30, "--save-interval", 1000))
    running = with_a_reader_that_leaves(warm, tmp_path, words, b"using world size")
    assert running.finish().code == 0
    assert DirectoryStore(save).latest() == 30
    log = (save / "run/log.txt").read_text()
    assert log.count("WARNING: the console ") == 1 and "iteration       30/      30" in log


def test_a_signal_still_saves_when_the_reader_has_left(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = on_text(tmp_path, command(save, *ENDLESS))
    running = with_a_reader_that_leaves(warm, tmp_path, words, b"iteration        3/")
    running.send(signal.SIGINT)
    assert running.finish().code == 75
    assert (DirectoryStore(save).latest() or 0) >= 3
    assert "resume with:" in (save / "run/log.txt").read_text()


# Under torchrun. The launcher prints and exits as it likes; what counts is that the worker saved and no one is left.


def under_torchrun(repository: Path, save: Path, log: Path, ranks: int) -> subprocess.Popen[bytes]:
    words = [str(word) for word in on_text(log.parent, command(save, *ENDLESS))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    return subprocess.Popen(
        [*launcher, str(repository / "pretrain_gpt.py"), *words],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for(log: Path, needle: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while needle not in log.read_text():
        assert time.monotonic() < deadline, f"no {needle!r} in:\n{log.read_text()}"
        time.sleep(0.02)


HOWS = ("ctrl-c", "sigterm to the launcher", "launcher dies", "sigterm to a worker")
SAMPLE = (("ctrl-c", 2), ("launcher dies", 2))


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        pytest.param(*place, marks=() if place in SAMPLE else pytest.mark.full)
        for place in itertools.product(HOWS, (1, 2))
    ],
)
def test_under_torchrun_the_workers_save_and_no_one_is_left(
    repository: Path, tmp_path: Path, how: str, ranks: int
) -> None:
    save, log = tmp_path / "c", tmp_path / "log.txt"
    launcher = under_torchrun(repository, save, log, ranks)
    try:
        wait_for(log, "iteration        3/")
        workers = [number for number in processes_with(str(save)) if number != launcher.pid]
        assert len(workers) == ranks
        if how == "ctrl-c":  # the terminal signals the whole group, and torchrun forwards it once more
            os.killpg(launcher.pid, signal.SIGINT)
        elif how == "sigterm to a worker":
            os.kill(workers[-1], signal.SIGTERM)
        else:
            launcher.send_signal(signal.SIGTERM if how == "sigterm to the launcher" else signal.SIGKILL)
        wait_for(log, "resume (under the same launcher) with:")
        launcher.wait(60)
    finally:
        launcher.kill()
    iteration = DirectoryStore(save).latest()
    assert iteration is not None and iteration >= 3 and DirectoryStore(save).verify(iteration) == []
    assert f"iteration {iteration};" in log.read_text()
    deadline = time.monotonic() + 10
    while left := processes_with(str(save)):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def processes_with(word: str) -> list[int]:
    """Process numbers of those whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return sorted(found)
