"""The launcher of the ranks of one machine."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from megalith.cli import launch
from megalith.config import load

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
