"""`megalith plan --calibrate RUN`: what finished runs correct in later plans, and which runs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith.cli.main import main
from megalith.cli.planned import planned
from megalith.config import load
from megalith.plan.calibration import circumstances
from megalith.plan.devices import DEVICES, GIB
from megalith.plan.plan import plan_run
from megalith.plan.rates import table_of, with_measured

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(name: str, **record: Any) -> tuple[int, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        lines = [{"event": "start", "iteration": 0}, {"event": "plan", "iteration": 5, **record}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        capsys.readouterr()
        code = main(["plan", "--calibrate", str(folder)])
        return code, "".join(capsys.readouterr())

    return run


def _end_of_a_run(seconds: float) -> dict[str, Any]:
    """Return the record of a run on this CPU whose steps took so many seconds."""
    found: list[dict[str, Any]] = []
    config = load(FLAGS.split(), {}, files=False)
    hook = planned(config, 256, torch.device("cpu"), dict, lambda _: None, lambda _, **values: found.append(values))
    assert hook is not None
    hook.after_window(cast(Any, SimpleNamespace(seconds_per_step=seconds)))
    hook.after_training(5)
    return found[0]


def test_the_next_plan_is_as_fast_as_the_run_was(calibrate: Callable[..., tuple[int, str]], cache: Path) -> None:
    first = plan_run(FLAGS.split(), DEVICES["CPU"], world_size=1)
    assert calibrate("run", **_end_of_a_run(3.0))[0] == 0
    assert main(["plan", f"--calibrate={cache / 'run'}", "--json"]) == 2, "it goes with no other flag"
    second = plan_run(FLAGS.split(), DEVICES["CPU"], world_size=1)
    assert second.time.step_seconds == pytest.approx(3.0) and "1 runs" in second.notes[-1]
    assert sum(second.time.parts.values()) == pytest.approx(3.0)
    assert first.time.mfu * first.time.step_seconds == pytest.approx(second.time.mfu * 3.0), "of the same peak"
    assert second.ranks == first.ranks
    assert calibrate("run", **_end_of_a_run(3.0))[0] == 0, "of a plan that was calibrated"
    assert calibrate("other", **_end_of_a_run(6.0))[0] == 0
    third = plan_run(FLAGS.split(), DEVICES["CPU"], world_size=1).time.step_seconds
    assert third == pytest.approx(4.0), "the median of 1/3 and 1/6"
    (cache / "megalith" / "plan" / "calibration-cpu.json").write_text('{"run": 1}')
    assert with_measured(DEVICES["CPU"], 1) == DEVICES["CPU"]


def test_memory_is_corrected_on_a_gpu(calibrate: Callable[..., tuple[int, str]]) -> None:
    card = DEVICES["H100"]
    before = plan_run([*FLAGS.split(), "--bf16"], card, world_size=1)
    peak = before.fullest.peak_bytes + GIB
    measured = {"measured_peak_bytes": peak, "measured_context_bytes": 2 * GIB, "measured_seconds": 1.0}
    predicted = {"planned_seconds": 0.5, "planned_peak_bytes": peak - GIB}
    assert calibrate("run", **measured, **predicted, **circumstances(card))[0] == 0
    after = plan_run([*FLAGS.split(), "--bf16"], card, world_size=1)
    assert after.fullest.peak_bytes == peak and after.device.room == (80 - 2) * GIB * 92 // 100
    assert after.time.step_seconds == pytest.approx(2 * before.time.step_seconds)
    assert with_measured(DEVICES["A100"], 1) == DEVICES["A100"], "a run says nothing of other devices"
    table = {"1": {**card.rates.__dict__, "source": "measured anew"}}
    table_of(card).write_text(json.dumps(table))
    assert with_measured(card, 1).unplanned == 0, "what was learned beside other rates"


def test_runs_that_say_nothing_of_plans_are_refused(calibrate: Callable[..., tuple[int, str]], cache: Path) -> None:
    plan_run(FLAGS.split(), DEVICES["CPU"], world_size=1)
    record = _end_of_a_run(3.0)
    for change, named in (
        ({"versions": ["0.1", "2.10"]}, "Megalith 0.1 and torch 2.10"),
        ({"device": "Other CPU (avx2)"}, "Other CPU (avx2)"),
        ({"device": "NVIDIA Potato"}, "NVIDIA Potato"),
    ):
        code, said = calibrate("run", **{**record, **change})
        assert code == 2 and named in said and "--calibrate" in said
    assert calibrate("run", planned_seconds=1.0, measured_seconds=1.0)[0] == 2, "of an earlier version, which says less"
    assert main(["plan", "--calibrate", str(cache / "nowhere")]) != 0
    assert main(["plan", "--calibrate", str(cache / "run"), "--json"]) == 2
    assert not list(cache.rglob("calibration*"))


def test_devices_without_files_of_their_own_share_none() -> None:
    names = {device.file_name for device in DEVICES.values()}
    assert len(names) == len(DEVICES) and replace(DEVICES["T4"], name="a/b").file_name == "a-b"
