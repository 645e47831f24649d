"""Fixtures that several kinds of tests use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .e2e.warm import WarmProcess

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return _REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of goldens and corpora beside the working tree; tests that need it are skipped where it is absent."""
    folder = _REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"the folder of goldens and corpora is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Runs training commands in processes that start in milliseconds."""
    process = WarmProcess(tmp_path_factory.mktemp("commands"))
    yield process
    process.close()
