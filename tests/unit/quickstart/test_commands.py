"""The command lines: Megatron's flags, accepted by the configuration, and a script that repeats them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megalith.cli.quickstart.commands import (
    Folder,
    as_typed,
    generate_arguments,
    kill_iteration,
    save_interval,
    script,
    train_arguments,
)
from megalith.cli.quickstart.sizing import FEWEST_ITERATIONS, MODEL_SIZES, ModelSize
from megalith.config import load


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", MODEL_SIZES, ids=lambda size: f"{size.num_layers}x{size.hidden_size}")
def test_the_configuration_accepts_the_training(size: ModelSize, precision: str) -> None:
    command, *flags = train_arguments(Folder(Path("out")), size, precision, 1000)
    run = load(flags, {}, files=False)
    assert command == "train"
    assert run.model.ffn_size == size.ffn_hidden_size
    assert run.train.global_batch_size == size.batch_size
    assert run.precision.bf16 == (precision == "bf16")
    assert run.precision.fp16 == (precision == "fp16")
    assert run.checkpoint.save == run.checkpoint.load == "out/checkpoints"
    assert not run.notes


@pytest.mark.parametrize("iterations", [FEWEST_ITERATIONS, 25, 27, 100, 333, 5000])
def test_the_kill_falls_between_two_checkpoints(iterations: int) -> None:
    killed, interval = kill_iteration(iterations), save_interval(iterations)
    assert interval < killed < iterations
    assert killed % interval != 0
    assert killed % interval < interval - 1  # there is time to kill before the next checkpoint
    assert killed == pytest.approx(iterations / 2, abs=max(6, iterations * 0.06))


def test_the_script_is_what_was_run(tmp_path: Path) -> None:
    arguments = generate_arguments(Folder(tmp_path), 'it\'s a $PROMPT\n"here"', 7)
    # The command is replaced by one that prints its words, so that the shell's reading of the script shows.
    text = script([arguments]).replace(as_typed([]).strip(), f"{sys.executable} -c 'import sys; print(sys.argv[1:])'")
    printed = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == repr(arguments)
