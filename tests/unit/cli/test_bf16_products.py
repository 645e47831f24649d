"""How bf16 is multiplied is in the log and in the checkpoint, and a resume that multiplies otherwise says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.devices import CPU, CPU_WITH_BF16

from megalith.assemble.facts import facts_of
from megalith.cli.main import main
from megalith.config import load

BASE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --max-position-embeddings 256 --bf16 "
    "--micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--eval-iters 0 --num-workers 0 --device cpu"
)
RUN = f"train {BASE} --save c --load c --save-interval 1 --exit-interval 1"


def test_a_resume_on_another_kind_of_processor_says_that_results_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for computed in (CPU_WITH_BF16, CPU, CPU):
        monkeypatch.setattr("megalith.device.HOST", computed)
        assert main(RUN.split()) == 0
        said.append(capsys.readouterr())
    assert [bool(re.search(r"bf16.*\bfp32\b", text.out)) for text in said] == [False, True, True]
    assert [bool(re.search(r"\bbfloat16\b.*\bfloat32\b", text.err)) for text in said] == [False, True, False]


def test_ranks_that_multiply_otherwise_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    run, device, found = load(BASE.split(), {}, files=False), torch.device("cpu"), []
    for computed in (CPU_WITH_BF16, CPU):
        monkeypatch.setattr("megalith.device.HOST", computed)
        found.append(facts_of(run, device))
    names = [name for name in found[0] if found[0][name] != found[1][name]]
    assert len(names) == 1 and "bf16" in names[0]
