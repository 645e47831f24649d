"""How the threads of tensor operations wait; to be settled before torch is imported."""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Let the threads of a tensor operation wait asleep instead of spinning; must run before torch is imported.

    torch's OpenMP library spins for long by default. Beside other work on the same cores that made a step 4 to 12
    times slower (2 cores, 2 threads, load 3); on a quiet machine the two are equal within 2 %.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
