"""No hang without a named rank: who sleeps, is stopped, leaves, fails or dies is named with step and phase (F09)."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from .small_run import MODEL, write_text
from .warm import Finished, WarmProcess

TIMEOUT = 3
LAYOUTS = {
    "dp2": [],
    "tp2": ["--tensor-model-parallel-size", 2],
    "pp2": ["--pipeline-model-parallel-size", 2],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def run_with_a_fault(
    warm: WarmProcess, cwd: Path, text: Path, layout: str, fault: str, **env: str
) -> tuple[list[Finished], float]:
    """Run two ranks to the end of a fault at step 4; returns their ends and the seconds since step 3."""
    words = [*MODEL, "--data-path", text, "--train-iters", 10, *LAYOUTS[layout]]
    words += ["--distributed-timeout-seconds-after-init", TIMEOUT]
    ranks = warm.start_ranks(2, words, cwd, MEGALITH_FAULT=fault, **env)
    deadline = time.monotonic() + 60.0
    while not any("iteration        3/" in rank.text for rank in ranks):
        assert time.monotonic() < deadline, [rank.text for rank in ranks]
        time.sleep(0.01)
    at_step_3 = time.monotonic()
    return [rank.finish() for rank in ranks], time.monotonic() - at_step_3


def named(rank: int, phase: str) -> str:
    """Pattern of a line that names a rank, its process, step 4 and a phase."""
    return rf"\brank {rank} \(\S+, process \d+\) of 2\b.*\bstep 4\b.*\b{phase}\b"


@pytest.mark.parametrize(
    ("layout", "rank", "point", "phase"),
    [("dp2", 1, "fwd", "forward"), ("tp2", 0, "bwd", "backward"), ("pp2", 1, "data", "data")],
)
def test_a_rank_that_sleeps(
    warm: WarmProcess, tmp_path: Path, text: Path, layout: str, rank: int, point: str, phase: str
) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, layout, f"sleep@rank={rank},step=4,point={point}")
    assert seconds < TIMEOUT + 8
    assert [end.code for end in ends] == [6, 6]
    report = "".join(end.text for end in ends)
    assert len(re.findall(named(rank, phase), report)) == 1
    assert "time.sleep(3600.0)" in report  # the stack of the rank that sleeps
    assert re.search(
        rf"\brank {1 - rank} .*\b[3-7]\.\d s\b.*\bstep 4\b.*\bwaiting\b", report
    )  # the rank that waits, and how long


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_rank_that_is_stopped(warm: WarmProcess, tmp_path: Path, text: Path, layout: str) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, layout, "stop@rank=0,step=4,point=fwd")
    assert seconds < TIMEOUT + 8
    assert [end.code for end in ends] == [-9, 6]  # it could not leave by itself
    assert re.search(named(0, "forward"), ends[1].text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies(warm: WarmProcess, tmp_path: Path, text: Path, layout: str) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, layout, "kill9@rank=1,step=4,point=bwd")
    assert seconds < TIMEOUT + 8
    assert [end.code for end in ends] == [6, -9]
    assert re.search("^megalith train: " + named(1, "backward"), ends[0].text, re.MULTILINE)
    assert "Traceback" not in ends[0].text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_raises(warm: WarmProcess, tmp_path: Path, text: Path, layout: str) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, layout, "raise@rank=0,step=4,point=opt")
    assert seconds < TIMEOUT + 8
    assert [end.code for end in ends] == [1, 6]
    assert re.search(f"^megalith train: {named(0, 'optimizer')}.*: RuntimeError", ends[1].text, re.MULTILINE)
    assert "Traceback" in ends[0].text and "Traceback" not in ends[1].text


def test_a_rank_that_leaves(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, "dp2", "leave@rank=1,step=4,point=fwd")
    assert seconds < TIMEOUT + 8
    assert ends[0].code == 6
    assert re.search(named(1, "last"), ends[0].text)


def boards_of(pids: Sequence[int]) -> list[Path]:
    """Folders in memory that a process of these has written its number to."""
    files = Path("/dev/shm").glob("megalith-*/who-*")
    return [file.parent for file in files if json.loads(file.read_text())["pid"] in pids]


@pytest.mark.parametrize("fault", ["", "kill9@rank=0,step=4,point=bwd", "raise@rank=1,step=4,point=bwd"])
def test_nothing_is_left_behind(warm: WarmProcess, tmp_path: Path, text: Path, fault: str) -> None:
    words = [*MODEL, "--data-path", text, "--train-iters", 6]
    ranks = warm.start_ranks(2, words, tmp_path, MEGALITH_FAULT=fault)
    ranks[0].wait_for("iteration        2/")
    pids = [rank.pid for rank in ranks]
    assert len(boards_of(pids)) == 2
    ends = [rank.finish() for rank in ranks]
    assert boards_of(pids) == []
    if not fault:
        assert [end.code for end in ends] == [0, 0], ends
        assert ends[1].text == ""  # one rank speaks
        assert "WARNING" not in ends[0].text and "[W" not in ends[0].text


# As on several hosts: the ranks have nothing in common but the store of rank 0.

SEVERAL_HOSTS = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.2"}


@pytest.mark.parametrize(
    ("fault", "codes", "pattern"),
    [
        ("sleep@rank=1,step=4,point=fwd", [6, 6], named(1, "forward")),
        # Where a process of another host is gone, its last report is known, of an earlier step or of start-up.
        ("kill9@rank=1,step=4,point=fwd", [6, -9], r"\brank 1 \(\S+, process \d+\) of 2\b.*\b(step \d|start-up)"),
        ("kill9@rank=0,step=4,point=fwd", [-9, 6], r"\brank 0 \(\S+, process \d+\) of 2\b.*\bstore\b"),
        ("raise@rank=0,step=4,point=fwd", [1, 6], f"{named(0, 'forward')}.*: RuntimeError"),
    ],
)
def test_ranks_of_several_hosts(
    warm: WarmProcess, tmp_path: Path, text: Path, fault: str, codes: list[int], pattern: str
) -> None:
    ends, seconds = run_with_a_fault(warm, tmp_path, text, "dp2", fault, **SEVERAL_HOSTS)
    assert seconds < TIMEOUT + 8
    assert [end.code for end in ends] == codes
    assert re.search(pattern, "".join(end.text for end in ends))


def test_the_rank_that_holds_the_store_is_stopped(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    words = [*MODEL, "--data-path", text, "--train-iters", 10, "--distributed-timeout-seconds-after-init", TIMEOUT]
    fault = "stop@rank=0,step=4,point=fwd"
    zero, one = warm.start_ranks(2, words, tmp_path, MEGALITH_FAULT=fault, **SEVERAL_HOSTS)
    assert one.finish().code == 6
    assert re.search(r"\brank 0 \(\S+, process \d+\).*\bstore\b", one.text)
    zero.send(signal.SIGKILL)
    zero.finish()
