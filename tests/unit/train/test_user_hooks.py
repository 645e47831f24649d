"""Hooks of users: what they ask for reaches the run, and is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.api import Control, Hook, StepResult, from_values, train, training
from megalith.config import RunConfig
from megalith.errors import ConfigError, MegalithError
from megalith.registry import Entry, Registry

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
    with (
        pytest.raises(ConfigError, match="--hook Told: lr_scale is"),
        training(run_config, hooks=[Told(lr_scale=scale)]) as run,
    ):
        list(train(run))


def named_hooks(thing: type[Hook]) -> RunConfig:
    name = f"{__name__}:{thing.__qualname__}"
    return from_values({**VALUES, "hooks": (name,)}, registry=Registry((Entry("hook", name, thing),)))


@pytest.mark.parametrize("moment", ["__init__", "on_start", "on_step", "on_save", "on_end"])
def test_an_exception_in_a_hook_names_hook_moment_and_line(tmp_path: Path, moment: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("gone")

    config = named_hooks(type("Fails", (Hook,), {moment: fail}))
    config = replace(config, checkpoint=replace(config.checkpoint, save=str(tmp_path / "a")))
    where = "" if moment == "__init__" else f"{moment}: "
    with (
        pytest.raises(MegalithError, match=rf"--hook \S+:Fails: {where}KeyError: 'gone' at .*{__name__}") as caught,
        training(config) as run,
    ):
        list(train(run))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_error_of_a_run_is_not_hidden_by_that_of_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("gone")

    config = named_hooks(type("Fails", (Hook,), {"on_step": fail, "on_end": fail}))
    with pytest.raises(MegalithError, match="Fails: on_step"), training(config) as run:
        list(train(run))
    assert "Fails: on_end" in capfd.readouterr().err


def test_a_method_that_nothing_calls_is_refused() -> None:
    config = named_hooks(type("Misspelled", (Hook,), {"on_steps": lambda *_: None}))
    with pytest.raises(ConfigError, match="Misspelled.*on_steps.*on_step"), training(config):
        pass
