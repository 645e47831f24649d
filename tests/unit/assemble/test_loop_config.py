"""What flags of the control of a run become in its loop config; its effect is tested with the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megalith.assemble import training
from megalith.assemble.observer import StartObserver
from megalith.config import load
from megalith.distributed.context import ParallelContext

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30"
)


@pytest.mark.parametrize(
    ("flags", "name", "without", "value"),
    [
        ("--start-eval-at-iter 7", "eval_start_iteration", 0, 7),
        ("--exit-duration-in-mins 3", "exit_minutes", None, 3),
        ("--log-params-norm", "log_params_norm", False, True),
        ("--log-gradient-noise-scale", "log_noise", False, True),
    ],
)
def test_flags_reach_the_loop_config(
    flags: str, name: str, without: object, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "measure_peak", lambda *_: 1.0)
    model: Any = SimpleNamespace(vocab_size=128)

    def configured(more: str) -> object:
        run = load(f"{BASE} {more}".split(), {}, files=False)
        return getattr(training.build_loop_config(run, [model], ParallelContext.solo(), StartObserver()), name)

    assert (configured(""), configured(flags)) == (without, value)
