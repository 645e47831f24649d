"""metrics.jsonl survives what happens to files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.train.metrics import MetricsWriter, read_metrics
from megalith.train.results import StepResult

RESULT = StepResult(1, 2.5, True, 1e-3, 0.1, 1.0, 0.5, None, None, 4, 4, 64, 0.01)


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.after_step(RESULT)
    writer.after_step(replace(RESULT, iteration=2))
    writer.close()
    path.write_text(path.read_text()[:-20])
    again = MetricsWriter(path)
    again.after_step(replace(RESULT, iteration=3))
    again.close()
    assert [record["iteration"] for record in read_metrics(path)] == [1, 3]


def test_each_line_is_on_disk_at_once_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.after_step(replace(RESULT, loss=float("nan")))
    assert read_metrics(path)[0]["loss"] is None
    assert "NaN" not in path.read_text()
    writer.close()


def test_a_resume_rewinds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for iteration in (1, 2, 3):
        writer.after_step(replace(RESULT, iteration=iteration))
    writer.event("resume", iteration=1)
    writer.after_step(replace(RESULT, iteration=2, loss=2.0))
    writer.close()
    kept = [(record["event"], record["iteration"]) for record in read_metrics(path)]
    assert kept == [("step", 1), ("resume", 1), ("step", 2)]


def test_a_fresh_start_forgets_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.event("start", iteration=0)
    writer.after_step(RESULT)
    writer.event("start", iteration=0)
    writer.close()
    assert [record["event"] for record in read_metrics(path)] == ["start"]


def test_a_full_disk_does_not_stop_the_run(capsys) -> None:  # type: ignore[no-untyped-def]
    writer = MetricsWriter(Path("/dev/full"))
    writer.after_step(RESULT)
    writer.after_step(RESULT)
    assert capsys.readouterr().err.count("metrics.jsonl") == 1


def test_a_file_that_is_deleted_comes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.after_step(RESULT)
    for iteration, remove in ((2, path.unlink), (3, lambda: shutil.rmtree(path.parent))):
        remove()
        writer.after_step(replace(RESULT, iteration=iteration))
        assert [record["iteration"] for record in read_metrics(path)] == [iteration]
    writer.close()
    assert capsys.readouterr().err.count(f"WARNING: {path}") == 2
