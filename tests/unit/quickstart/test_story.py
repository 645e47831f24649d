"""Commands that the configuration accepts, a training that is followed and killed, and the proof of the resume."""

from __future__ import annotations

import builtins
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.quickstart.model import MODEL_SIZES, Machine, ModelSize, Plan
from megalith.cli.quickstart.story import (
    GENERATE,
    CommandFailed,
    Record,
    compare_repeated_steps,
    last_step,
    program,
    run_command,
    save_png,
    script_of,
    train_arguments,
    words_of,
)
from megalith.config import load

STEPS = """
import json, sys, time
with open(sys.argv[1], "a", buffering=1) as file:
    for step in range(1, int(sys.argv[2]) + 1):
        file.write(json.dumps({"event": "step", "iteration": step, "loss": 1 / step}) + "\\n")
        time.sleep(0.005)
"""


def steps(numbers: Sequence[int], grad_norm: float = 1.0, loss: float | None = None) -> list[Record]:
    rest = {"event": "step", "grad_norm": grad_norm, "learning_rate": 0.1}
    return [{**rest, "iteration": number, "loss": 1 / number if loss is None else loss} for number in numbers]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", MODEL_SIZES, ids=lambda size: f"{size.num_layers}x{size.hidden_size}")
def test_the_configuration_accepts_the_training(size: ModelSize, precision: str) -> None:
    command, *flags = train_arguments(Path("my out"), Plan(Machine("x", precision, 1e9), size, 1000))
    run = load(flags, {}, files=False)
    assert command == "train"
    assert run.model.ffn_size == size.ffn_hidden_size
    assert run.train.global_batch_size == size.batch_size
    assert run.precision.bf16 == (precision == "bf16")
    assert run.precision.fp16 == (precision == "fp16")
    assert run.checkpoint.save == run.checkpoint.load == "my out/checkpoints"
    assert not run.notes


def test_the_script_is_what_was_run(tmp_path: Path) -> None:
    arguments = words_of(GENERATE, out=tmp_path, prompt='it\'s a {} $PROMPT\n"here"', tokens=7)
    # The command is replaced by one that prints its words, so that the shell's reading of the script shows.
    text = script_of(arguments).replace(program(), f"{sys.executable} -c 'import sys; print(sys.argv[1:])'", 1)
    printed = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == repr(arguments)


def test_the_newest_step_of_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == {}
    path.write_text('{"event": "start"}\n{"event": "st', encoding="utf-8")
    assert last_step(path) == {}
    lines = [json.dumps({"event": "step", "iteration": number}) for number in range(1000)]
    path.write_text("\n".join([*lines, '{"event": "save"}', '{"event": "step", "it']), encoding="utf-8")
    assert last_step(path)["iteration"] == 999


def use(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Run this program instead of Megalith."""
    monkeypatch.setattr("megalith.cli.quickstart.story.COMMAND", (sys.executable, "-c", source))


def test_a_command_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "import sys; print(sys.argv[1:])")
    run_command(["one", "two"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "['one', 'two']\n"


def test_a_training_is_killed_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, STEPS)
    path = tmp_path / "metrics.jsonl"
    run_command([str(path), "4000"], tmp_path / "log", lambda: last_step(path).get("iteration", 0) >= 10)
    assert 10 <= last_step(path)["iteration"] < 2000


@pytest.mark.parametrize(
    ("source", "exit_code"),
    [
        ("import sys; print('first the cause'); sys.exit(3)", 3),
        ("import os, signal; print('first the cause', flush=True); os.kill(os.getpid(), 15)", 128 + signal.SIGTERM),
    ],
    ids=["error", "signal"],
)
def test_a_failure_carries_the_exit_code_and_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, exit_code: int
) -> None:
    use(monkeypatch, source)
    with pytest.raises(CommandFailed, match="first the cause") as caught:
        run_command(["train"], tmp_path / "log")
    assert caught.value.exit_code == exit_code


def test_equal_repetitions_prove_the_resume() -> None:
    resumed = {"event": "resume", "iteration": 5}
    proof = compare_repeated_steps(steps(range(1, 9)), [*steps(range(1, 6)), resumed, *steps(range(6, 13))])
    assert (proof["resumed_from"], proof["killed_at"]) == (5, 8)
    assert (proof["num_repeated"], proof["num_equal"], proof["largest_difference"]) == (3, 3, 0.0)


def test_the_smallest_difference_is_reported() -> None:
    again = [{"event": "resume", "iteration": 5}, *steps([6], loss=1.0 + 2**-52), *steps([7], 1.5, 1.0)]
    again += steps([8], loss=1.0)
    proof = compare_repeated_steps(steps(range(1, 9), loss=1.0), again)
    assert (proof["num_repeated"], proof["num_equal"], proof["largest_difference"]) == (3, 1, 2**-52)


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert save_png(steps(range(1, 300)), steps([100, 200]), 150, path, "title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (960, 540)


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert not save_png(steps([1, 2]), [], 1, tmp_path / "loss.png", "title")
    assert not (tmp_path / "loss.png").exists()
