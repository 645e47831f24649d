"""The way from the training loop to the first matrix product is as short as docs/tour.md says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_tour_lists_the_functions_of_the_hot_path() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "hot_path.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
