"""Hooks of users on several ranks: what they ask for must be the same, and an error of one ends all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith.api import Control, Hook
from megalith.distributed.context import ParallelContext
from megalith.errors import ConfigError
from megalith.layout import Layout
from megalith.train.user_hooks import UserHooks

from ..e2e.warm import WarmProcess
from .conftest import Ranks

ONE_RAISES = """
from megalith.api import Hook

class OneRaises(Hook):
    def on_step(self, result, control):
        if control.rank == 1 and result.iteration == 2:
            raise ValueError("a hook of one rank")
"""
RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4
    --micro-batch-size 1 --train-iters 6 --lr 1e-2 --mock-data --eval-iters 0 --tokenizer-type NullTokenizer
    --vocab-size 10 --import own_hook --hook own_hook:OneRaises"""


class Asks(Hook):
    def __init__(self, scales: tuple[Any, Any], stops: tuple[bool, bool]) -> None:
        self.scales, self.stops = scales, stops

    def on_step(self, result: Any, control: Control) -> None:
        control.lr_scale = self.scales[control.rank]
        if self.stops[control.rank]:
            control.stop("asked")


def _asked(scales: tuple[Any, Any], stops: tuple[bool, bool]) -> Any:
    """What the run has of the requests of its two ranks, or the message of the error."""
    context = ParallelContext.create(Layout(dp=2), torch.device("cpu"))
    state = SimpleNamespace(chunks=(), context=context, lr_scale=1.0, iteration=1)
    run = SimpleNamespace(state=state, exit_reason=None)
    hooks = UserHooks([Asks(scales, stops)], cast("Any", None), cast("Any", run))
    try:
        hooks.after_step(cast("Any", None))
    except ConfigError as error:
        return str(error)
    return state.lr_scale, run.exit_reason and run.exit_reason.detail


@pytest.mark.parametrize(
    ("scales", "stops", "wanted"),
    [
        ((0.5, 0.5), (True, True), (0.5, "asked")),
        ((0.5, 1.0), (False, False), "lr_scale 0.5 to 1.0"),
        ((1.0, 1.0), (False, True), "stop on some ranks"),
        ((float("nan"), float("nan")), (False, False), "lr_scale is nan"),
    ],
)
def test_ranks_must_ask_for_the_same(ranks: Ranks, scales: Any, stops: Any, wanted: Any) -> None:
    for found in ranks.run(2, _asked, scales, stops):
        assert wanted in found if isinstance(found, str) else found == wanted


@pytest.mark.full
def test_an_error_of_the_hook_of_one_rank_ends_all(tmp_path: Path, warm: WarmProcess) -> None:
    (tmp_path / "own_hook.py").write_text(ONE_RAISES)
    ended = warm.run_ranks(2, RUN.split(), tmp_path)
    assert all(one.code != 0 for one in ended)
    assert "a hook of one rank" in ended[1].text and "rank 1" in ended[0].text
