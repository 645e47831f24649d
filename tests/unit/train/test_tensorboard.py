"""The scalars have Megatron's names and steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="the extra `track` is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalith.config.groups import LogConfig
from megalith.train.records import Records, TensorBoard
from megalith.train.results import Evaluation, StepResult


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
