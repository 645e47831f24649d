"""`--compile` says what it needs before anything is built or any rank waits."""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import nullcontext

import pytest
import torch
from tests.devices import H100, MI300, P40, T4, V100

from megalith.assemble.model import require_compiler
from megalith.config import load
from megalith.device import DESCRIBED, Capability
from megalith.errors import ConfigError

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
)


@pytest.mark.parametrize(("device", "lacking"), [("cpu", "a C.. compiler on a CPU"), ("cuda", "Triton on a GPU")])
def test_a_missing_compiler_is_named(device: str, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"--compile needs {lacking}"):
        require_compiler(load([*BASE.split(), "--compile"], {}, files=False), torch.device(device))
    require_compiler(load(BASE.split(), {}, files=False), torch.device(device))


def test_a_compiler_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "c++" else None)
    require_compiler(load([*BASE.split(), "--compile"], {}, files=False), torch.device("cpu"))


@pytest.mark.parametrize(("able", "code"), [(P40, False), (V100, True), (T4, True), (H100, True), (MI300, True)])
def test_a_gpu_that_triton_has_no_code_for_is_named(
    able: Capability, code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    run, gpu = load([*BASE.split(), "--compile"], {}, files=False), torch.device("cuda", 0)
    with nullcontext() if code else pytest.raises(ConfigError, match=r"--compile.*sm_70.*Tesla P40 \(sm_61\)"):
        require_compiler(run, gpu)
    require_compiler(load(BASE.split(), {}, files=False), gpu)
