"""Fixtures that several kinds of tests use."""

from __future__ import annotations

import os
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalith.assemble.nvidia import find_driver

from .e2e.warm import WarmProcess

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ranks that share a core and wake each other for every few bytes of gloo spend most of their time on preemption: as
# batch processes the tests of several ranks need a third of the processor time. All processes they start inherit it.
with suppress(AttributeError, OSError):  # not on every system
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

if not torch.cuda.is_available() and find_driver() is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else each command would say that torch cannot use this machine's GPU

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return _REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """The archives of `tests/parity/fixtures`, unpacked: `golden/<topic>` and `data/<corpus>`."""
    with tempfile.TemporaryDirectory(prefix="megalith-fixtures-") as folder:
        for kind in ("golden", "data"):
            for path in (_REPOSITORY / "tests/parity/fixtures" / kind).glob("*.tar.xz"):
                with tarfile.open(path) as archive:
                    archive.extractall(Path(folder, kind), filter="data")
        yield Path(folder)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Runs training commands in processes that start in milliseconds."""
    process = WarmProcess(tmp_path_factory.mktemp("commands"))
    yield process
    process.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line for each reason what was skipped."""
    skipped: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else str(report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid.partition("::")[0])
    if not skipped:
        return
    terminalreporter.section("skipped, and why")
    for reason, files in sorted(skipped.items()):
        places = sorted(set(files))
        more = f" and {len(places) - 2} more files" if len(places) > 2 else ""
        terminalreporter.line(f"{len(files):4d}  {reason} ({', '.join(places[:2])}{more})")
