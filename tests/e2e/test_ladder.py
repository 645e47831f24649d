"""`megalith ladder` on runs of `megalith train`: a sweep that SIGTERM stops in a run, which saves and is resumed.

One of its rates diverges.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from megalith.report import read_history

from .small_run import on_text
from .test_resume import MODEL
from .warm import WarmProcess

ITERATIONS = 300


def test_a_sweep_is_stopped_and_continued(warm: WarmProcess, tmp_path: Path) -> None:
    ladder = ["--folder", tmp_path / "ladder"]
    words = [*on_text(tmp_path, MODEL), "--widths", 16, "--sweep-iters", ITERATIONS, "--sweep-lr", 1e-4, 1e-2, 1e30]
    runs = [tmp_path / "ladder" / f"2x16-iters{ITERATIONS}-lr{lr}" for lr in ("0.0001", "0.01", "1e+30")]
    process = warm.start([*ladder, *words, "--device", "cpu"], tmp_path, command="ladder")
    metrics, deadline = runs[0] / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"step"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send(signal.SIGTERM)
    assert process.finish().code == 75
    stopped = read_history(runs[0] / "run").last["iteration"]
    assert 0 < stopped < ITERATIONS
    assert f"--folder {tmp_path / 'ladder'}" in process.text
    assert not runs[1].exists()

    again = warm.run(ladder, tmp_path, command="ladder")
    assert again.code == 0, again.text
    resumed = [event.iteration for event in read_history(runs[0] / "run").events if event.kind == "resume"]
    assert resumed == [stopped]
    stored = json.loads((tmp_path / "ladder" / "ladder.json").read_text())
    found = stored["runs"]
    assert [Path(run["name"]).name for run in found] == [run.name for run in runs]
    assert found[1]["loss"] < found[0]["loss"]
    assert stored["failed"] == [runs[2].name], "its loss is not finite"
    assert "the best learning rate is 0.01" in again.text
