"""Runs with states of their own (SGD, Muon, Lion, rounded ones) resume byte for byte where ranks divide them (F01)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.errors import CheckpointError

from .test_train_checkpoint import FSDP, LLAMA, PP2, STEPS, TP2, TRAINING, ZERO, plain_tensors, train_on

ROUNDED = (
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    "--grad-reduce-in-bf16"
)
IMPORT = f"--import {__name__.rpartition('.')[0]}.registered_optimizers"
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
    "nadam-zero1": (2, f"{ZERO} {IMPORT} --optimizer nadam --bf16", MOMENTS | MAIN),
    "own-fsdp-fp16": (2, f"{FSDP} {IMPORT} --optimizer my-sign --fp16 --initial-loss-scale 65536", {"mean"} | MAIN),
    "own-matrices-tp2": (2, f"{TP2} {LLAMA} {IMPORT} --optimizer my-shampoo", {"factor", "mean"} | MOMENTS),
    "own-rounded-zero1": (
        2,
        f"{ZERO} {IMPORT} --optimizer my-sign --bf16 --grad-reduce-in-bf16 --use-precision-aware-optimizer "
        "--main-grads-dtype bf16 --main-params-dtype fp16",
        {"mean"} | MAIN,
    ),
    "fp16-pp2": (2, f"{PP2} --fp16 --initial-loss-scale 65536 --loss-scale-window 2", MOMENTS | MAIN),
}
"""Name -> ranks, flags, kinds of state in a checkpoint."""
CONVERTED = {
    "sgd": ("--optimizer sgd --decoupled-lr 1e-3", {"momentum_buffer"}),
    "lion": ("--optimizer lion --bf16", {"exp_avg"} | MAIN),
    "muon": ("--optimizer muon --bf16", {"momentum_buffer"} | MOMENTS | MAIN),
    "soap": ("--optimizer soap", SOAP),
    "own": (f"{IMPORT} --optimizer my-sign --bf16", {"mean"} | MAIN),
    "mup": ("--use-mup --mup-base-hidden-size 8", MOMENTS),
    "adaptive_muon": ("--optimizer adaptive_muon", {"momentum_buffer", "moment2_buffer"} | MOMENTS),
}
SAMPLE = ("muon-tp2", "soap-tp2", "rounded-zero1", "nadam-zero1", "own-matrices-tp2")


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
    convert(first, there, ConversionOptions(tp=2, pp=2))
    convert(there, back, ConversionOptions(tp=1, pp=1))
    one, other, again = (plain_tensors(DirectoryStore(folder).folder(2)) for folder in (first, there, back))
    states = {key for key in one if key.startswith("optimizer.")}
    assert {key.split(".")[2] for key in states} == kinds
    for converted in (other, again):
        names = {key for key in converted if key.startswith("optimizer.")}
        assert names == states and all(one[key].equal(converted[key]) for key in states)
    assert train_on(str(back), flags, 1, 40, STEPS) == train_on(str(first), flags, 1, 40, STEPS)


EXACT = "--global-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0 --init-method-std 0.2"
RESHARDED = {
    "own-element": ("--optimizer my-sign", (ZERO, "", FSDP), 0.0),
    "nadam-bf16": ("--optimizer nadam --bf16", (ZERO, ""), 0.0),
    "nadam-tp": (f"--optimizer nadam {LLAMA}", (TP2, ZERO, PP2), 1e-5),
    "own-matrix": (f"--optimizer my-shampoo {LLAMA}", (TP2, "", PP2), 1e-5),
    # torch's Muon orthogonalizes in bf16: the last bit of a gradient may change an update by 2^-9 of itself
    "muon-of-torch": (f"--optimizer torch-muon {LLAMA}", (TP2, ""), 1e-4),
}
"""Name -> flags, the layouts of two ranks (one where it is empty) in turn, relative tolerance of losses."""


@pytest.mark.parametrize("case", RESHARDED)
def test_registered_optimizers_continue_in_other_layouts(ranks: Any, tmp_path: Path, case: str) -> None:
    flags, layouts, tolerance = RESHARDED[case]
    flags = f"{IMPORT} {flags} {EXACT}"
    wanted = train_on(str(tmp_path / "whole"), flags, 1, 40, 2 * len(layouts))
    steps: list[tuple[Any, ...]] = []
    for number, layout in enumerate(layouts, 1):
        arguments = (str(tmp_path / "moved"), f"{flags} {layout}", 2 if layout else 1, 40, 2 * number)
        steps += ranks.run(2, train_on, *arguments)[0] if layout else train_on(*arguments)
    losses, others = ([loss for _, loss, _, _ in run] for run in (steps, wanted))
    assert losses == pytest.approx(others, rel=tolerance, abs=0.0)
    assert len(set(losses)) == len(losses)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    train_on(str(tmp_path), f"{IMPORT} --optimizer my-sign {EXACT}", 1, 40, 1)
    with pytest.raises(CheckpointError, match="--optimizer adam: .*my-sign.*--no-load-optim"):
        train_on(str(tmp_path), f"--optimizer adam {EXACT}", 1, 40, 2)
