"""The launcher of the ranks of one machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megalith.cli import launch
from megalith.cli.train import _save_times, _saved_and_argv
from megalith.config import load
from megalith.distributed.supervise import FailureCause

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
    " --nproc 2"
)


def test_a_signal_before_the_ranks_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_for_ranks(config: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    monkeypatch.setattr(launch, "_import_for_ranks", import_for_ranks)
    monkeypatch.setattr(launch, "Attempt", None)
    code = launch.supervise(load(RUN.split(), {}), RUN.split(), lambda: (None, []), lambda argv: 0)
    assert code == 128 + signal.SIGTERM


def arguments_of(folder: Path, *more: str) -> list[str]:
    return [*RUN.split(), "--save", str(folder), "--save-interval", "10", "--load", str(folder), *more]


def save(folder: Path, iteration: int) -> None:
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(iteration))
    os.utime(tracker, ns=(iteration, iteration))


@pytest.mark.parametrize(
    ("more", "restarts_from"),
    [
        (["--override-opt-param-scheduler"], 40),
        (["--ckpt-step", "20"], None),
        (["--finetune"], None),
        (["--load", "base"], None),
    ],
)
def test_a_restart_before_the_first_save_starts_as_the_run_did(
    tmp_path: Path, more: list[str], restarts_from: int | None
) -> None:
    save(tmp_path, 40)
    words = arguments_of(tmp_path, *more)
    config = load(words, {}, files=False)
    before = _save_times(config)
    assert _saved_and_argv(config, words, before) == (restarts_from, words)
    save(tmp_path, 50)
    saved, resumed = _saved_and_argv(config, words, before)
    again = load(resumed, {}, files=False)
    assert saved == 50
    assert (again.checkpoint.load, again.checkpoint.ckpt_step) == (str(tmp_path), None)
    assert not again.checkpoint.finetune and not again.schedule.override_opt_param_scheduler


@pytest.mark.parametrize(("step", "shown"), [(0, False), (41, True)])
def test_no_command_is_told_that_a_mistake_has_just_ended(
    capsys: pytest.CaptureFixture[str], step: int, shown: bool
) -> None:
    failed = launch._Failure(FailureCause("the cause", 4, "error", step, permanent=True), 40)
    launch._print_outcome(failed, {}, launch._NO_RESTARTS, 40, ["--the-words"])
    printed = capsys.readouterr().err
    assert ("--the-words" in printed) == shown
    assert printed.splitlines()[-1].endswith("the cause")
