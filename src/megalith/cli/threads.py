"""How the threads of tensor operations wait; to be settled before torch is imported."""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Let the threads of a tensor operation wait asleep instead of spinning; must run before torch is imported.

    torch's OpenMP library spins for long by default. Beside other work on the same cores that makes a step several
    times slower (seen on 2 cores at a load of 3, not benchmarked); the one quiet pair of runs was equal within 1 %.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
