"""Hooks of users: what they ask for reaches the run, and is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.api import Control, Hook, StepResult, from_values, train, training
from megalith.config import RunConfig
from megalith.errors import ConfigError

VALUES: dict[str, Any] = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "max_position_embeddings": 4},
    **{"micro_batch_size": 1, "train_iters": 6, "lr": 1e-2, "mock_data": True, "eval_iters": 0, "save_interval": 10},
    **{"tokenizer_type": "NullTokenizer", "vocab_size": 10, "lr_decay_style": "constant"},
}


def run_of(folder: Path, **values: Any) -> RunConfig:
    return from_values({**VALUES, "save": str(folder), **values})


class Told(Hook):
    def __init__(self, **asked: Any) -> None:
        self.asked, self.told = asked, list[str]()

    def on_start(self, control: Control) -> None:
        self.told.append(f"start {control.rank} {control.lr_scale}")

    def on_step(self, result: StepResult, control: Control) -> None:
        self.told.append(f"step {result.iteration}")
        if result.iteration == 2:
            control.lr_scale = self.asked.get("lr_scale", control.lr_scale)
        if result.iteration == self.asked.get("stop"):
            control.stop("enough")

    def on_save(self, saved: Any, control: Control) -> None:
        self.told.append(f"save {saved.iteration}")

    def on_end(self, control: Control) -> None:
        self.told.append("end")


def test_a_hook_is_told_and_stops_the_run(tmp_path: Path) -> None:
    hook = Told(stop=3)
    with training(run_of(tmp_path / "a"), hooks=[hook]) as run:
        results = list(train(run))
        assert run.exit_reason is not None and (run.exit_reason.kind, run.exit_reason.detail) == ("hook", "enough")
    assert len(results) == 3
    assert hook.told == ["start 0 1.0", "step 1", "step 2", "step 3", "save 3", "end"]


def test_the_scale_of_the_rate_survives_a_resume(tmp_path: Path) -> None:
    with training(run_of(tmp_path / "a"), hooks=[Told(lr_scale=0.25, stop=4)]) as run:
        rates = [result.learning_rate for result in train(run)]
    assert rates[:2] == [1e-2, 1e-2] and rates[2:] == [0.25e-2, 0.25e-2]
    again = Told()
    with training(run_of(tmp_path / "a", load=str(tmp_path / "a")), hooks=[again]) as run:
        assert [result.learning_rate for result in train(run)] == [0.25e-2, 0.25e-2]
    assert again.told[0] == "start 0 0.25"


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "half"])
def test_a_scale_that_is_no_factor_is_refused(tmp_path: Path, scale: Any) -> None:
    run_config = replace(run_of(tmp_path / "a"))
    with pytest.raises(ConfigError, match="lr_scale is"), training(run_config, hooks=[Told(lr_scale=scale)]) as run:
        list(train(run))
