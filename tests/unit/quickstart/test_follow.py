"""Following a training by its metrics: torn lines, the kill, failures, and the proof of the resume."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from megalith.cli.quickstart.follow import (
    CommandFailed,
    Followed,
    MetricsTail,
    Record,
    compare_repeated_steps,
    follow_training,
    run_command,
)

STEPS = """
import json, sys, time
with open(sys.argv[1], "a", buffering=1) as file:
    for step in range(1, int(sys.argv[2]) + 1):
        file.write(json.dumps({"event": "step", "iteration": step, "loss": 1 / step}) + "\\n")
        time.sleep(0.005)
"""


def step_record(iteration: int, loss: float, grad_norm: float = 1.0) -> Record:
    return {"event": "step", "iteration": iteration, "loss": loss, "grad_norm": grad_norm, "learning_rate": 0.1}


def test_the_tail_gives_each_line_once_and_passes_over_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert list(tail.new_records()) == []
    path.write_text('{"event": "a"}\n{"event":', encoding="utf-8")
    assert list(tail.new_records()) == [{"event": "a"}]
    with path.open("a", encoding="utf-8") as file:
        file.write(' "b"}\n{"torn')
    assert list(tail.new_records()) == [{"event": "b"}]
    with path.open("a", encoding="utf-8") as file:
        file.write('\n{"event": "c"}\n')
    assert list(tail.new_records()) == [{"event": "c"}]


def test_a_training_is_followed_to_its_end(tmp_path: Path) -> None:
    seen: list[Record] = []
    path = tmp_path / "metrics.jsonl"
    command = (sys.executable, "-c", STEPS)
    followed = follow_training(command, [str(path), "5"], MetricsTail(path), tmp_path / "log", on_record=seen.append)
    assert [record["iteration"] for record in followed.of("step")] == [1, 2, 3, 4, 5]
    assert seen == followed.records
    assert followed.exit_code == 0


def test_a_training_is_killed_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    followed = follow_training(
        (sys.executable, "-c", STEPS),
        [str(path), "4000"],
        MetricsTail(path),
        tmp_path / "log",
        on_record=lambda record: None,
        kill_at=10,
    )
    assert followed.exit_code == -signal.SIGKILL
    assert 10 <= followed.of("step")[-1]["iteration"] < 2000


def test_a_failure_carries_the_exit_code_and_the_last_lines(tmp_path: Path) -> None:
    program = "import sys; print('first the cause'); sys.exit(3)"
    with pytest.raises(CommandFailed, match="first the cause") as caught:
        run_command((sys.executable, "-c", program), [], tmp_path / "log")
    assert caught.value.exit_code == 3
    with pytest.raises(CommandFailed) as caught:
        follow_training(
            (sys.executable, "-c", program),
            [],
            MetricsTail(tmp_path / "none"),
            tmp_path / "log",
            on_record=lambda record: None,
            kill_at=10,
        )
    assert caught.value.exit_code == 3


def test_a_death_by_signal_is_a_failure_too(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    with pytest.raises(CommandFailed) as caught:
        run_command((sys.executable, "-c", program), [], tmp_path / "log")
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_equal_repetitions_prove_the_resume() -> None:
    before = Followed([step_record(step, 1 / step) for step in range(1, 9)])
    after = Followed([step_record(step, 1 / step) for step in range(6, 13)])
    proof = compare_repeated_steps(before, after)
    assert (proof.resumed_from, proof.killed_at, proof.num_repeated, proof.num_equal) == (5, 8, 3, 3)
    assert proof.largest_difference == 0.0


def test_the_smallest_difference_is_told() -> None:
    before = Followed([step_record(step, 1.0) for step in range(1, 9)])
    after = Followed([step_record(6, 1.0 + 2**-52), step_record(7, 1.0, grad_norm=1.5), step_record(8, 1.0)])
    proof = compare_repeated_steps(before, after)
    assert (proof.num_repeated, proof.num_equal) == (3, 1)
    assert proof.largest_difference == 2**-52
    assert json.loads(json.dumps(proof.largest_difference)) == 2**-52
