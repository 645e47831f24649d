"""What starts quickly stays quick: help, configuration errors and preprocessing load neither torch nor other giants.

Each case runs in an interpreter of its own, because the modules of this one are already loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GIANTS = {"torch", "transformers", "wandb", "matplotlib", "tensorboard"}

REPORT_LOADED = """
import json, sys
code = 0
try:
    {action}
except SystemExit as stop:
    code = stop.code or 0
loaded = {{".".join(name.split(".")[:n]) for name in sys.modules for n in (1, 2, 3)}}
print("LOADED " + json.dumps([code, sorted(loaded)]))
"""


def loaded_by(action: str, *argv: str) -> tuple[int, set[str], str]:
    """Run a statement in a fresh interpreter; return its exit code, the modules (a.b.c of a.b.c.d), the screen."""
    process = subprocess.run(
        [sys.executable, "-c", REPORT_LOADED.format(action=action), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "120"},
    )
    screen = process.stdout + process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("LOADED ")]
    assert lines, screen
    code, modules = json.loads(lines[-1].removeprefix("LOADED "))
    return code, set(modules), screen


MAIN = "from megalith.cli.main import main; code = main()"


@pytest.mark.parametrize(
    "module",
    ["megalith", "megalith.config", "megalith.schedules", "megalith.tokenizers", "megalith.data.preprocess"],
)
def test_import_is_light(module: str) -> None:
    _, modules, _ = loaded_by(f"import {module}")
    assert "megalith" in modules
    assert not modules & GIANTS


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["preprocess", "--help"],
        ["generate", "--help"],
        ["quickstart", "--help"],
    ],
    ids=" ".join,
)
def test_help_is_light(argv: list[str]) -> None:
    code, modules, screen = loaded_by(MAIN, *argv)
    assert code == 0, screen
    assert "megalith" in screen
    assert not modules & GIANTS


def test_configuration_error_is_light() -> None:
    code, modules, screen = loaded_by(MAIN, "train", "--num-layers", "2", "--hidden-sizze", "64")
    assert code == 2, screen
    assert "--hidden-size" in screen
    assert not modules & GIANTS


def test_preprocessing_is_light(tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "1 2 3"}\n{"text": "4 5"}\n', encoding="utf-8")
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "16", "--workers", "1"]
    code, modules, screen = loaded_by(MAIN, "preprocess", *arguments, *tokenizer)
    assert code == 0, screen
    assert (tmp_path / "out_text_document.bin").stat().st_size > 0
    assert not modules & {*GIANTS, "megalith.config.groups", "megalith.config.run", "megalith.config.known"}


def test_training_loads_the_compiler_only_where_it_is_asked_for() -> None:
    """It is a second of each start, as is what FSDP2 and the files of checkpoints need (DTensor and sympy)."""
    _, modules, _ = loaded_by("import megalith.assemble.training, megalith.cli.train_hooks, megalith.cli.train_start")
    assert "torch.nn" in modules
    assert not modules & {"torch._dynamo", "sympy"}
