"""Measuring the machine: the probe runs the very model that training will, and a pause does not fool it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith.cli.quickstart import speed
from megalith.cli.quickstart.commands import Folder, train_arguments
from megalith.cli.quickstart.sizing import MODEL_SIZES


def flags() -> list[str]:
    return train_arguments(Folder(Path("out")), MODEL_SIZES[0], "fp32", 24)[1:]


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PEAK_SECONDS", 0.1)
    machine = speed.measure_machine()
    assert machine.precision in ("fp32", "bf16", "fp16")
    assert 1e8 < machine.flops < 1e16
    assert machine.name


def test_the_peak_is_measured_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measure(device: torch.device, dtype: torch.dtype, budget_seconds: float) -> float:
        asked.append(budget_seconds)
        return 1e12

    monkeypatch.setattr(speed, "measure_peak", measure)
    assert speed.measure_machine("cpu").flops == 1e12
    assert asked and min(asked) >= 2.0


def test_a_step_is_timed_on_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.1)
    assert 1e-4 < speed.measure_step(MODEL_SIZES[0], flags()) < 60.0


def test_a_pause_is_not_taken_for_a_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([33.0, *[0.1] * 1000])
    monkeypatch.setattr(speed, "time_step", lambda *_: next(durations))
    assert speed.measure_step(MODEL_SIZES[0], flags()) == 0.1
