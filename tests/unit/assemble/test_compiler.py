"""`--compile` says what it needs before anything is built or any rank waits."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch

from megalith.assemble.model import require_compiler
from megalith.config import load
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
