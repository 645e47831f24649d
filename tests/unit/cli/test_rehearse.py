"""`megalith train --rehearse-resume`: the shadow is the same run, and is told where it is another."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cli import main, rehearse
from megalith.config import load
from megalith.train.results import StepResult

WORDS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 5 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30 --eval-iters 0 --device cpu --save-interval 2 --rehearse-resume --hidden-dropout 0 "
    "--attention-dropout 0"
)
STEP = StepResult(3, 2.0, True, 1e-2, 0.0, 1.0, 0.5, None, None, 12, 4, 64, 0.1)


def rehearsals(save: Path) -> list[dict[str, Any]]:
    """The events of the run about rehearsals."""
    lines = (save / "run/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "rehearsal"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"loss": 2.0 + 1e-6, "grad_norm": 0.5 + 1e-6}, None),
        ({"loss": 2.01}, "loss"),
        ({"loss": float("nan")}, "loss"),
        ({"grad_norm": 0.6}, "grad_norm"),
        ({"grad_norm": None, "applied": False}, "applied"),
        ({"consumed_samples": 4}, "consumed_samples"),
        ({"learning_rate": 9e-3}, "learning_rate"),
    ],
)
def test_what_is_another_run(changes: dict[str, Any], named: str | None) -> None:
    config = load(WORDS.split(), {}, files=False)
    found = rehearse.differing(config, STEP, asdict(replace(STEP, **changes)))
    assert [text.split()[0] for text in found][:1] == ([named] if named else [])


def test_the_shadow_saves_nothing_and_is_alone() -> None:
    words = f"{WORDS} --save runs/one --tensor-model-parallel-size 2 --sequence-parallel --keep-last 1".split()
    config = load(words, {"RANK": "0", "WORLD_SIZE": "2"}, files=False)
    settings = rehearse.shadow_settings(config, 2)
    assert settings["checkpoint"] | {"save": None, "load": "runs/one", "ckpt_step": 2} == settings["checkpoint"]
    assert settings["parallel"]["tensor_model_parallel_size"] == 1
    assert not settings["parallel"]["sequence_parallel"]
    assert settings["train"]["global_batch_size"] == 4


@pytest.mark.full
def test_too_large_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_available", lambda: 1e9)
    assert main.main(["train", *WORDS.split(), "--save", str(tmp_path)]) == 0
    (event,) = rehearsals(tmp_path)
    assert event["verdict"] == "not rehearsed"
    assert event["iteration"] == 2


@pytest.mark.full
def test_two_ranks_resume_in_one_process(tmp_path: Path) -> None:
    words = ["train", "--nproc", "2", *WORDS.split(), "--tensor-model-parallel-size", "2", "--save", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "megalith", *words], check=True, timeout=240)
    (event,) = rehearsals(tmp_path)
    assert (event["verdict"], event["iteration"]) == ("equal", 2), event


@pytest.mark.full
def test_another_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = rehearse.shadow_settings

    def forgetful(*args: Any) -> dict[str, dict[str, Any]]:
        settings = right(*args)
        settings["checkpoint"]["no_load_optim"] = True
        return settings

    monkeypatch.setattr(rehearse, "shadow_settings", forgetful)
    assert main.main(["train", *WORDS.split(), "--save", str(tmp_path)]) == 0
    (event,) = rehearsals(tmp_path)
    assert event["verdict"] == "mismatch"
    assert "--rehearse-resume" in capsys.readouterr().err
