"""The goldens of the real Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from .goldens import Goldens


@pytest.fixture(scope="session")
def golden(shared: Path) -> Goldens:
    """All goldens, unpacked."""
    return Goldens(shared / "golden")
