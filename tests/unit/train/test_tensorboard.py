"""The scalars have Megatron's names and steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="the extra `track` is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalith.config.groups import LogConfig
from megalith.train.records import Records
from megalith.train.results import Evaluation, StepResult
from megalith.train.trackers import TensorBoard, drop_points_after


def test_scalars(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path), arguments={"num_layers": 2})
    writer = Records([board], LogConfig(tensorboard_log_interval=2, log_validation_ppl_to_tensorboard=True))
    for iteration in range(1, 5):
        writer.after_step(
            StepResult(
                iteration, 2.0 + iteration, iteration != 4, 1e-3, 0.1, 8.0, 0.5, None, None, 4 * iteration, 4, 64, 0.1
            )
        )
    writer.after_evaluation(Evaluation(4, 16, "validation", 3.0, 8, 0.1, final=False))
    writer.after_evaluation(Evaluation(4, 16, "test", 3.0, 8, 0.1, final=True))
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {
        *("learning-rate", "learning-rate vs samples", "batch-size", "batch-size vs samples"),
        *("lm loss", "lm loss vs samples", "loss-scale", "loss-scale vs samples", "grad-norm", "grad-norm vs samples"),
        *("lm loss validation", "lm loss validation vs samples"),
        *("lm loss validation ppl", "lm loss validation ppl vs samples"),
    }
    # Every second step; the fourth was skipped and has no loss.
    assert [(event.step, event.value) for event in events.Scalars("lm loss vs samples")] == [(8, 4.0)]
    assert [event.step for event in events.Scalars("learning-rate")] == [2, 4]
    assert events.Scalars("lm loss validation ppl")[0].value == pytest.approx(math.exp(3.0))
    assert "num_layers/text_summary" in events.Tags()["tensors"]


def _steps(folder: Path, name: str) -> list[int]:
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars(name)]


def _session(folder: Path, first: int, last: int, *, resumes: bool) -> None:
    """Record the steps after `first` up to `last`, of four samples each."""
    board = TensorBoard(str(folder), arguments={"lr": first}, iteration=first, samples=4 * first, resumes=resumes)
    for iteration in range(first + 1, last + 1):
        board.scalars({"lm loss": float(iteration)}, iteration, 4 * iteration)
    board.samples([{"prompt": "Once <b>", "answer": "upon\na *time*"}], last)
    board.checkpoint(f"/saved/{last}", last)
    board.close()


def test_a_resume_leaves_no_duplicates(tmp_path: Path) -> None:
    _session(tmp_path, 0, 10, resumes=False)
    _session(tmp_path, 6, 9, resumes=True)
    _session(tmp_path, 3, 12, resumes=True)  # further back: the second session is gone, and a part of the first
    assert _steps(tmp_path, "lm loss") == list(range(1, 13))
    assert _steps(tmp_path, "lm loss vs samples") == [4 * step for step in range(1, 13)]
    saved = EventAccumulator(str(tmp_path)).Reload().Tensors("checkpoint/text_summary")
    assert [event.step for event in saved] == [12]
    (texts,) = EventAccumulator(str(tmp_path)).Reload().Tensors("samples/text_summary")
    assert texts.step == 12 and b"\n\n    upon\n    a *time*" in texts.tensor_proto.string_val[0]


def test_a_record_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    _session(tmp_path, 0, 5, resumes=False)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    drop_points_after(tmp_path, 3, 12)
    assert _steps(tmp_path, "lm loss") == [1, 2, 3] and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_without_later_points_is_not_touched(tmp_path: Path) -> None:
    _session(tmp_path, 0, 5, resumes=False)
    (path,) = tmp_path.iterdir()
    before = path.stat()
    drop_points_after(tmp_path, 5, 20)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
