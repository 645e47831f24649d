"""Progress is one line that fits, below what others print; plain lines outside a terminal; silent in libraries."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import wraps
from pathlib import Path

import pytest

from megalith import progress
from megalith.train.loop import LoopConfig
from megalith.train.results import StepResult
from megalith.train.status import StatusLine

DRAWN = re.compile(r"\r([^\r\n]*)\x1b\[K")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal; without a descriptor, it has the usual width."""

    def isatty(self) -> bool:
        return True

    @property
    def drawn(self) -> list[str]:
        """The texts of the last line, one after the other."""
        return [STYLE.sub("", text) for text in DRAWN.findall(self.getvalue()) if text]

    @property
    def left(self) -> str:
        """What a reader of the terminal has in the end."""
        return DRAWN.sub("", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for `in_terminal`, whose bars appear at once."""
    for name in ("RANK", "WORLD_SIZE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_BARS", 0.005)
    return Terminal()


def in_terminal(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test as a command whose stdout and stderr are `terminal`; pytest sets its own ones after fixtures."""

    @wraps(test)
    def run(terminal: Terminal, **fixtures: object) -> None:
        with redirect_stdout(terminal), redirect_stderr(terminal), progress.on_console():
            test(terminal=terminal, **fixtures)

    return run


def wait_for(what: object, stream: Terminal) -> None:
    """Until a bar shows a text."""
    deadline = time.monotonic() + 30.0
    while str(what) not in "\n".join(stream.drawn):
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.002)


@in_terminal
def test_a_bar_has_share_amount_rate_time_note_and_memory(terminal: Terminal) -> None:
    with progress.task("encoding", 4_000_000, "B", done=1_000_000) as encoding:
        encoding.advance(1_000_000, "2 x 5MB/s")
        wait_for("50%", terminal)
    shown = next(text for text in terminal.drawn if "50%" in text)
    assert shown.startswith("encoding ") and "2M/4MB" in shown and "left" in shown and "B/s" in shown
    assert all(len(text) <= 79 for text in terminal.drawn)
    assert terminal.left == ""


@pytest.mark.parametrize("columns", [10, 24, 40, 60, 79, 200])
@in_terminal
def test_a_line_never_wraps(columns: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_columns", lambda: columns)
    what = "checking the GPTDataset train indices"
    for total in (None, 123_456_789_012):
        seen = len(terminal.drawn)
        with progress.task(what, total, " samples", counts="samples"):
            progress.advance("samples", 98_765_432_109, "loss 3.141 45.1% right")
            wait_for(what[:columns], terminal)
            while len(terminal.drawn) < seen + 3:
                time.sleep(0.002)
    progress.show_status(
        ["step 123456/1234567", "loss 3.141", "123M tokens/s", "MFU 41%", "12 d 23 h left", "save at 1"]
    )
    assert terminal.drawn and all(len(text) <= columns for text in terminal.drawn)
    progress.hide_status()


@in_terminal
def test_what_is_printed_stays_as_it_is(terminal: Terminal) -> None:
    long, before = " iteration " * 30, sys.stdout
    with progress.task("loading"):
        wait_for("loading", terminal)
        print("a", end="", flush=True)
        print("b\n\tc", file=sys.stderr)
        print(long)
        before.write("held from before\n")
    print("after")
    assert sys.stdout is terminal and sys.stderr is terminal
    assert terminal.left.replace("held from before\n", "") == f"ab\n\tc\n{long}\nafter\n"


@in_terminal
def test_of_tasks_within_tasks_the_inner_one_is_shown(terminal: Terminal) -> None:
    with progress.task("outer", 10, "B", counts="outer"):
        wait_for("outer", terminal)
        with progress.task("inner", 10, "B", counts="inner"):
            progress.advance("outer", 5)
            progress.advance("inner", 3)
            wait_for("30%", terminal)
            assert terminal.drawn[-1].startswith("inner")
        wait_for("50%", terminal)
    assert not progress.is_counted("outer")


@in_terminal
def test_threads_report_to_one_task(terminal: Terminal) -> None:
    with progress.task("reading", counts="read") as reading:
        threads = [
            threading.Thread(target=lambda: [progress.advance("read", 1) for _ in range(2000)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert reading.done == 8000


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"RANK": "1", "WORLD_SIZE": "2"}], ids=str)
@in_terminal
def test_who_asks_for_plain_text_and_other_ranks_see_no_bar(
    environ: dict[str, str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_A_LINE", 0.01)
    with progress.task("loading", 10, "B") as loading:
        loading.advance(5)
        progress.show_status(["step 1/2"])
        while "RANK" not in environ and "loading: 50%, 5/10B, " not in terminal.getvalue():
            time.sleep(0.002)
    text = terminal.getvalue()
    assert "\x1b" not in text and "step" not in text and bool(text) == ("RANK" not in environ)


def test_lines_of_a_pipe_become_rarer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_A_LINE", 0.01)
    with progress.on_console(), progress.task("loading"):
        time.sleep(1.0)
    out, err = capsys.readouterr()
    assert not out and 1 <= len(err.splitlines()) <= 7


@in_terminal
def test_programs_that_import_megalith_are_silent(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress._console, "on", False)
    with progress.task("loading", counts="read"):
        assert not progress.is_counted("read") and threading.active_count() == len(threading.enumerate())
        assert not any(thread.name == "progress" for thread in threading.enumerate())
        progress.show_status(["step 1/2"])
    assert not terminal.getvalue()


@in_terminal
def test_a_fork_leaves_the_line_to_its_parent(terminal: Terminal, tmp_path: Path) -> None:
    with progress.task("loading", counts="read"):
        wait_for("loading", terminal)
        child = os.fork()
        if child == 0:
            fine = sys.stderr is terminal and not progress.is_counted("read")
            print("of the child", flush=True)  # whatever locks its parent held
            os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rich_is_imported_by_the_first_bar_only() -> None:
    code = (
        "import io, sys, time; from megalith import progress\n"
        "class T(io.StringIO):\n    isatty = lambda self: {terminal}\n"
        "sys.stderr = T(); progress._SECONDS_BETWEEN_BARS = 0.01\n"
        "with progress.on_console(), progress.task('x', 1, 'B'):\n    time.sleep({seconds})\n"
        "print('rich' in sys.modules)"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "NO_COLOR", "TERM")}

    def imported(**case: object) -> str:
        words = [sys.executable, "-c", code.format(**case)]
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.strip()

    assert imported(terminal=True, seconds=0.1) == "False"
    assert imported(terminal=False, seconds=2.4) == "False"
    assert imported(terminal=True, seconds=2.4) == "True"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (999.7, "1k"), (1234, "1.23k"), (123_456_789, "123M"), (2.5e12, "2.5T")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert progress.short(value) == shown


@in_terminal
def test_the_status_of_a_training(terminal: Terminal) -> None:
    config = LoopConfig(
        train_iterations=1000,
        global_batch_size=4,
        num_micro_batches=2,
        log_interval=10,
        eval_interval=100,
        eval_iterations=1,
        flops_per_step=2e9,
        measured_peak_flops_per_s=1e10,
        save_interval=300,
    )
    status = StatusLine(config, shown_after=0.0)
    status.after_step(StepResult(700, 2.5, True, 1e-3, 0.1, 1.0, 0.5, None, None, 2800, 4, 4096, 0.5))
    assert terminal.drawn == ["step 700/1000  loss 2.5  8.19k tokens/s  MFU 40%  2 min 30 s left  save at 900"]
    print(" iteration      700/    1000 |")
    assert terminal.drawn[-1] == terminal.drawn[0]
    status.close()
    assert terminal.left == " iteration      700/    1000 |\n"
    late = StatusLine(config)  # nothing in the first two seconds
    late.after_step(StepResult(701, 2.5, True, 1e-3, 0.1, 1.0, 0.5, None, None, 2804, 4, 4096, 0.5))
    assert len(terminal.drawn) == 2
