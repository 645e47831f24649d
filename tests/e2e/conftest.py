"""Fixtures of the tests that run Megalith as a user does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .warm import WarmProcess


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Runs training commands in processes that start in milliseconds."""
    process = WarmProcess(tmp_path_factory.mktemp("commands"))
    yield process
    process.close()
