"""A profile covers the iterations that the flags name, and ends with the run; progress.txt has Megatron's lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megalith.config.groups import LogConfig
from megalith.train.profiler import Profile, TorchProfiler, build_profiler
from megalith.train.records import ProgressLog
from megalith.train.results import ExitReason, SavedCheckpoint, StepResult


class Notes:
    """Notes when it begins and ends."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def begin(self) -> None:
        self.moments.append("begin")

    def end(self) -> str:
        self.moments.append("end")
        return "written"


def step(iteration: int) -> StepResult:
    """A step of 4 samples of 16 tokens."""
    return StepResult(iteration, 2.0, True, 1e-3, 0.1, 1.0, 0.5, None, None, 4 * iteration, 4, 64, 0.5)


def moments(start: int, end: int, first: int, last: int) -> tuple[list[str], list[str]]:
    """Of a run of these iterations: of the profiler with the steps between, and what was said."""
    notes, said = Notes(), list[str]()
    profile = Profile(notes, start, end, first, said.append)
    for iteration in range(first + 1, last + 1):
        notes.moments.append(str(iteration))
        profile.after_step(step(iteration))
    profile.on_exit(ExitReason("signal", last))
    return notes.moments, said


def test_the_profile_covers_its_iterations() -> None:
    assert moments(1, 3, 0, 4) == (["1", "begin", "2", "3", "end", "4"], ["written"])
    assert moments(0, 1, 0, 2) == (["begin", "1", "end", "2"], ["written"])
    assert moments(1, 9, 0, 2) == (["1", "begin", "2", "end"], ["written"])


def test_a_run_that_begins_behind_the_profile_says_so() -> None:
    found, said = moments(1, 3, 2, 4)
    assert found == ["3", "4"]
    assert len(said) == 1 and "--profile-step-start 1" in said[0]


def test_torch_writes_a_trace_and_a_table(tmp_path: Path) -> None:
    log = LogConfig(profile=True, profile_step_start=3, profile_step_end=5)
    profiler = build_profiler(log, torch.device("cpu"), 2, tmp_path)
    assert isinstance(profiler, TorchProfiler)
    profiler.begin()
    torch.ones(8, 8) @ torch.ones(8, 8)
    path = tmp_path / "profile-rank2-iterations-4-5.json"
    assert str(path) in profiler.end()
    assert any("aten::mm" in str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"])
    assert "aten::mm" in path.with_suffix(".txt").read_text()


def test_progress_has_a_line_for_each_start_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "progress.txt"
    progress = ProgressLog(path, 2, 1e12, 4e12, job="77")
    progress.after_step(step(1))
    progress.after_save(SavedCheckpoint(1, "x", 0.0, 0))
    began, saved = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: 77\t# GPUs: 2\tStarting job", began)
    assert "Saved checkpoint\tIteration: 1\tJob throughput: 4.0 TFLOP/s/GPU" in saved
    assert "Floating-point operations: 5.00e+12\tTokens (in billions): 0.00" in saved
    path.unlink()
    path.mkdir()
    progress.after_save(SavedCheckpoint(2, "x", 0.0, 0))
    assert "progress.txt" in capsys.readouterr().err
