"""Where the goldens are."""

from __future__ import annotations

from pathlib import Path

import pytest

from .goldens import Goldens


@pytest.fixture(scope="session")
def golden(repository: Path) -> Goldens:
    """All goldens where the folder `shared` lies beside the working tree, else those that are part of it."""
    everything = repository.parent / "shared/golden"
    if everything.is_dir():
        return Goldens(everything, complete=True)
    return Goldens(repository / "tests/parity/fixtures/golden", complete=False)
