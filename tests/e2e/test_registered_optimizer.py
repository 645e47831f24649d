"""A registered optimizer: trained under ZeRO-1, killed, and resumed on one rank, with the losses of a run on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .checkpoints import assert_same, curve_of, state_of
from .warm import WarmProcess

OWN = """
from dataclasses import dataclass

import torch

from megalith.optim import UpdateBatch, UpdateRule
from megalith.registry import mark


@dataclass
class MyLionSettings:
    my_beta: float = 0.9


@mark("optimizer", "my-lion", settings=MyLionSettings, unit="element")
class MyLion(UpdateRule):
    state_names = ("momentum",)

    def __init__(self, settings: MyLionSettings) -> None:
        self.beta = settings.my_beta

    def update(self, batch: UpdateBatch) -> None:
        for param, grad, momentum in zip(batch.params, batch.grads, batch.states["momentum"], strict=True):
            param.mul_(1 - batch.lr * batch.weight_decay)
            param.sub_(momentum.lerp(grad, 0.05).sign(), alpha=batch.lr)
            momentum.lerp_(grad, 1 - self.beta)


NAdam = mark("optimizer", "nadam", unit="element")(torch.optim.NAdam)
"""
MODEL = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 2, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-3),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--log-interval", 1, "--eval-iters", 0),
    *("--num-workers", 0, "--train-iters", 8, "--save-interval", 3, "--clip-grad", 0, "--bf16"),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--distributed-backend", "gloo", "--device", "cpu"),
]


@pytest.mark.parametrize("optimizer", ["my-lion --my-beta 0.8", pytest.param("nadam", marks=pytest.mark.full)])
def test_a_killed_run_under_zero_continues_on_one_rank(warm: WarmProcess, tmp_path: Path, optimizer: str) -> None:
    (tmp_path / "own_optimizers.py").write_text(OWN)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = [*MODEL, "--import", "own_optimizers", "--optimizer", *optimizer.split()]
    straight = warm.run([*command, "--save", whole, "--load", whole], tmp_path)
    assert straight.code == 0, straight.text
    command += ["--save", cut, "--load", cut]
    fault = {"MEGALITH_FAULT": "kill9@step=5,point=opt,rank=1"}
    killed = warm.run_ranks(2, [*command, "--use-distributed-optimizer"], tmp_path, **fault)
    assert killed[1].code == -9 and killed[0].code != 0
    resumed = warm.run(command, tmp_path)
    assert resumed.code == 0 and f"{cut} at iteration 3" in resumed.text, resumed.text
    losses, wanted = ({step: loss for step, loss, *_ in curve_of(folder)} for folder in (cut, whole))
    assert len(wanted) == 8 and losses == wanted
    assert_same(state_of(whole, 8), state_of(cut, 8))


def test_a_format_without_its_states_is_refused(warm: WarmProcess, tmp_path: Path) -> None:
    (tmp_path / "own_optimizers.py").write_text(OWN)
    command = [*MODEL, "--import", "own_optimizers", "--optimizer", "my-lion", "--ckpt-format", "torch"]
    refused = warm.run([*command, "--save", tmp_path / "save"], tmp_path)
    assert refused.code == 2 and "--ckpt-format" in refused.text and "torch_dist" in refused.text
