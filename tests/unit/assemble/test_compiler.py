"""`--compile` says what it needs before anything is built or any rank waits."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

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


def test_the_compiler_that_is_called_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load([*BASE.split(), "--compile"], {}, files=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    monkeypatch.setenv("CXX", "clang++")
    require_compiler(run, torch.device("cpu"))
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match=r"--compile.*icpx.*CXX"):
        require_compiler(run, torch.device("cpu"))


def test_an_environment_that_turns_compilation_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(ConfigError, match="TORCH_COMPILE_DISABLE=1"):
        require_compiler(load([*BASE.split(), "--compile"], {}, files=False), torch.device("cpu"))
    require_compiler(load(BASE.split(), {}, files=False), torch.device("cpu"))


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


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, g++, to refuse a part of the work")
@pytest.mark.parametrize(
    ("refused", "place"),
    [("void *kernel(", r"decoder.layers.0"), ("0.134145", "the backward pass")],
    ids=["of a layer", "of the derivative of GELU"],
)
def test_a_compiler_that_fails_ends_the_run(refused: str, place: str, tmp_path: Path) -> None:
    """One that fails for sources with such a text; errors may not be suppressed."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nfor file; do\n  if [ -f "$file" ] && grep -q "{refused}" "$file"; then exit 1; fi\ndone\n'
        'exec g++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    places = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHDYNAMO_SUPPRESS_ERRORS": "1"}
    few = "--num-layers 1 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
    command = [sys.executable, "-m", "megalith", "train", *BASE.split(), *few.split(), "--compile", "--device", "cpu"]
    done = subprocess.run(command, env={**os.environ, **places}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "--compile" in last and place in last
