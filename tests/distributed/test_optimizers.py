"""Runs with states of their own (SGD, Muon, Lion, rounded ones) resume byte for byte where ranks divide them (F01)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.convert import Wanted, convert

from .test_train_checkpoint import FSDP, LLAMA, PP2, STEPS, TP2, TRAINING, ZERO, plain_tensors, train_on

ROUNDED = (
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    "--grad-reduce-in-bf16"
)
MOMENTS, MAIN = {"exp_avg", "exp_avg_sq"}, {"fp32_param"}
SOAP = MOMENTS | {"L", "R", "Q_L", "Q_R"}
CASES = {
    "sgd-zero1": (2, f"{ZERO} --optimizer sgd --decoupled-lr 1e-3", {"momentum_buffer"}),
    "muon-tp2": (2, f"{TP2} {LLAMA} --optimizer muon --bf16", {"momentum_buffer"} | MOMENTS | MAIN),
    "adaptive-muon-tp2": (
        2,
        f"{TP2} {LLAMA} --optimizer adaptive_muon --bf16",
        {"momentum_buffer", "moment2_buffer"} | MOMENTS | MAIN,
    ),
    "soap-tp2": (2, f"{TP2} {LLAMA} --optimizer soap --bf16 --soap-precondition-frequency 2", SOAP | MAIN),
    "mup-tp2": (2, f"{TP2} {LLAMA} --use-mup --mup-base-hidden-size 8", MOMENTS),
    "rounded-zero1": (2, f"{ZERO} {ROUNDED} --main-params-dtype fp16", MOMENTS | MAIN),
    "grads-fsdp": (
        2,
        "--use-megatron-fsdp --bf16 --grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32",
        MOMENTS | MAIN,
    ),
    "lion-fsdp": (2, f"{FSDP} --optimizer lion --bf16", {"exp_avg"} | MAIN),
    "fp16-pp2": (2, f"{PP2} --fp16 --initial-loss-scale 65536 --loss-scale-window 2", MOMENTS | MAIN),
}
"""Name -> ranks, flags, kinds of state in a checkpoint."""
CONVERTED = {
    "sgd": ("--optimizer sgd --decoupled-lr 1e-3", {"momentum_buffer"}),
    "lion": ("--optimizer lion --bf16", {"exp_avg"} | MAIN),
    "muon": ("--optimizer muon --bf16", {"momentum_buffer"} | MOMENTS | MAIN),
    "soap": ("--optimizer soap", SOAP),
    "mup": ("--use-mup --mup-base-hidden-size 8", MOMENTS),
    "adaptive_muon": ("--optimizer adaptive_muon", {"momentum_buffer", "moment2_buffer"} | MOMENTS),
}
SAMPLE = ("muon-tp2", "soap-tp2", "rounded-zero1")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Any, tmp_path: Path, case: str) -> None:
    world_size, layout, kinds = CASES[case]
    flags = f"{layout} {TRAINING}"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight = ranks.run(world_size, train_on, str(whole), flags, world_size, 40, STEPS)
    first = ranks.run(world_size, train_on, str(cut), flags, world_size, 40, STEPS // 2)
    then = ranks.run(world_size, train_on, str(cut), flags, world_size, 40, STEPS)
    for rank in range(world_size):
        assert [*first[rank], *then[rank]] == straight[rank]
        assert len({loss for _, loss, _, _ in straight[rank]}) == STEPS
    one, other = (plain_tensors(DirectoryStore(folder).folder(STEPS)) for folder in (whole, cut))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    assert {key.split(".")[2] for key in one if key.startswith("optimizer.")} == kinds


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in ("sgd", "soap", "adaptive_muon") else pytest.mark.full)
        for name in CONVERTED
    ],
)
def test_a_conversion_keeps_every_state(tmp_path: Path, optimizer: str) -> None:
    """To two tensor-parallel ranks in two stages and back: the same tensors; and the run goes on as if nothing were."""
    flags, kinds = CONVERTED[optimizer]
    flags = f"{LLAMA} {flags} {TRAINING} --hidden-dropout 0 --attention-dropout 0"
    first, there, back = (tmp_path / name for name in ("first", "there", "back"))
    train_on(str(first), flags, 1, 40, 2)
    convert(first, there, Wanted(tp=2, pp=2))
    convert(there, back, Wanted(tp=1, pp=1))
    one, other, again = (plain_tensors(DirectoryStore(folder).folder(2)) for folder in (first, there, back))
    states = {key for key in one if key.startswith("optimizer.")}
    assert {key.split(".")[2] for key in states} == kinds
    for converted in (other, again):
        names = {key for key in converted if key.startswith("optimizer.")}
        assert names == states and all(one[key].equal(converted[key]) for key in states)
    assert train_on(str(back), flags, 1, 40, STEPS) == train_on(str(first), flags, 1, 40, STEPS)
