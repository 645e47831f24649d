"""What a GPU has to do for a step or a token does not grow: counted without one (`benchmarks/gpu_counts.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .. import fake_device

Counts = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def counts(repository: Path) -> Counts:
    return dict(json.loads((repository / "benchmarks/results/gpu_counts.json").read_text(encoding="utf-8")))


@pytest.mark.skipif(bool(fake_device.missing()), reason=fake_device.missing())
def test_no_count_has_grown(repository: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(repository / "benchmarks/gpu_counts.py"), "--check"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_laws(counts: Counts) -> None:
    for name, run in counts["now"].items():
        assert run["launches of the rest"] < counts["before"][name]["launches of the rest"]
        assert run["host waits a step"] == run["host waits a decoding step"] == 1
        assert run["launches of the optimizer"] == run["launches of the optimizer, 2 layers"]
        assert run["attention calls a layer and decoded token"] == 1 / 8
        assert run["bytes a logit"] <= 20


def test_growth_would_be_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import gpu_counts

    bounds = {"run": {"launches a layer": 48.0, "MiB a layer": 4000.0}}
    assert gpu_counts.grown({"run": {"launches a layer": 48.0, "MiB a layer": 3000.0}}, bounds) == []
    assert len(gpu_counts.grown({"run": {"launches a layer": 49.0, "MiB a layer": 4100.0}}, bounds)) == 2
