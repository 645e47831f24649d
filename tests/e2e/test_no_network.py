"""No command opens a network socket unasked: help, preprocess, train and generate run where one is fatal (F42)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..unit.checkpoint.huggingface_folders import VOCAB, write_folder
from .warm import WarmProcess

RUNNER = Path(__file__).with_name("no_network.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"),
    reason="the socket filter is that of Linux on x86-64 and ARM64",
)

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
)
RECIPE = shlex.split(
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 1 --eval-interval 3"
)


def run_without_network(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=cwd
    )


FORBIDDEN = f"""
import os, runpy
from megalith.cli.main import main
os.dup2(1, 2)
runpy.run_path({str(RUNNER)!r})["forbid_network"]()
raise SystemExit(main(WORDS))
"""


def run_forked(warm: WarmProcess, cwd: Path, *words: str) -> str:
    """Run a command without network in a fork of the template, which has imported what it needs; returns its text."""
    ended = warm.start_script(FORBIDDEN.replace("WORDS", repr(list(words))), cwd).finish()
    assert ended.code == 0, ended.text
    return ended.text


def test_the_filter_kills() -> None:
    ended = run_without_network("-c", "import socket; socket.socket(); print('opened')")
    assert ended.returncode == -signal.SIGSYS
    assert "opened" not in ended.stdout


def test_the_filter_lets_the_rest_be() -> None:
    ended = run_without_network("-c", "import socket; socket.socketpair(); print('made')")
    assert ended.stdout == "made\n", ended.stderr


def test_help_and_configuration_errors() -> None:
    assert run_without_network("-m", "megalith", "--help").returncode == 0
    assert run_without_network("-m", "megalith", "train", "--num-layerz", "2").returncode == 2


def test_from_text_to_generated_text(warm: WarmProcess, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": " ".join(str((i * j) % 64) for j in range(40))}) for i in range(50)]
    source.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    prefix = tmp_path / "numbers"

    run_forked(
        warm, tmp_path, "preprocess", "--input", str(source), "--output-prefix", str(prefix), *tokenizer, "--append-eod"
    )
    data = ["--data-path", f"{prefix}_text_document", "--split", "80,10,10", *tokenizer, "--device", "cpu"]
    run_forked(
        warm, tmp_path, "train", *MODEL, *RECIPE, *data, "--save", str(tmp_path / "ckpt"), "--save-interval", "3"
    )
    ended = run_without_network(
        "-m", "megalith", "generate", str(tmp_path / "ckpt"), "--prompt", "1 2 3", "--max-new-tokens", "4", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_hugging_face_folders(warm: WarmProcess, tmp_path: Path) -> None:
    """Not even where transformers compares the logits."""
    write_folder(tmp_path / "hf", vocab_size=VOCAB)
    assert "logits" in run_forked(warm, tmp_path, "checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "saved"))
