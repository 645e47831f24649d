"""Runs that go on from a checkpoint of the real Megatron, line by line (F35; golden `pretrain`).

Those that Megatron continued itself, in their own layout; and the same continuations in layouts that it cannot
change to, since what a run computes does not depend on the layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..e2e.warm import WarmProcess
from .goldens import Goldens
from .test_pretrain import (
    LAST_DIGIT,
    NORM,
    compare_validations,
    parse_iterations,
    prepare_case,
    unpack_checkpoint,
)

ONE = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
LAYOUTS = {
    "one": (1, ONE),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "pp2": (2, (*ONE[:2], "--pipeline-model-parallel-size", "2")),
    "dp2": (2, ONE),
    "dp2-zero1": (2, (*ONE, "--use-distributed-optimizer")),
}


def words_of(name: str, source: str, golden: Goldens, folder: Path) -> list[str]:
    """The command line of a case that loads what another one saved, laid into `folder`."""
    unpack_checkpoint(source, golden, folder)
    words = prepare_case(name, golden, folder)
    words[words.index("--load") + 1] = str(folder / "theirs/ckpt")
    return words


def run(number: int, words: list[str], folder: Path, warm: WarmProcess) -> str:
    first, *others = warm.run_ranks(number, words, folder) if number > 1 else [warm.run(words, folder)]
    assert [first.code, *(other.code for other in others)] == [0] * number, first.text
    return first.text


def compare(log: dict[str, Any], text: str) -> None:
    """As `compare_iterations`, for a run that begins in the middle."""
    ours, theirs = parse_iterations(text), log["iterations"]
    assert [line["iteration"] for line in ours] == [line["iteration"] for line in theirs]
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"iteration {other['iteration']}"
        # The original's second line after any start is the mean of the first two.
        loss = (ours[0]["lm loss"] + own["lm loss"]) / 2 if number == 1 else own["lm loss"]
        assert loss == pytest.approx(other["lm loss"], abs=LAST_DIGIT), where
        assert own["learning rate"] == pytest.approx(other["learning rate"], rel=1e-6), where
        assert own["grad norm"] == pytest.approx(other["grad norm"], abs=NORM), where
        assert own["params norm"] == pytest.approx(other["params norm"], abs=NORM), where
        assert own["consumed samples"] == other["consumed samples"], where


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "source"), [("gpt2_resume_torch_dist", "gpt2_torch_dist"), ("gpt2_resume_torch", "gpt2_torch")]
)
def test_a_run_of_megatron_is_continued_in_any_layout(
    name: str, source: str, layout: str, golden: Goldens, tmp_path: Path, warm: WarmProcess
) -> None:
    number, flags = LAYOUTS[layout]
    words = words_of(name, source, golden, tmp_path)
    text = run(number, [*words, *flags], tmp_path, warm)
    log = json.loads(golden.path(f"pretrain/{name}/log.json").read_text())
    compare(log, text)
    compare_validations(name, log, text)


@pytest.mark.parametrize("layout", ["tp2", "one", "pp2"])
def test_weights_of_two_tensor_ranks_are_finetuned_in_any_layout(
    layout: str, golden: Goldens, tmp_path: Path, warm: WarmProcess
) -> None:
    """The original did it in one process."""
    name = "llama_tp2_load_tp1"
    words = words_of(name, "llama_tp2_torch_dist", golden, tmp_path)
    number, flags = LAYOUTS[layout]
    log = json.loads(golden.path(f"pretrain/{name}/log.json").read_text())
    compare(log, run(number, [*words, *flags], tmp_path, warm))
