"""Curves reach every drawer under Megatron's names; a drawer that fails costs the curves, not the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.config.groups import LogConfig
from megalith.errors import ConfigError
from megalith.train import trackers
from megalith.train.records import Records
from megalith.train.results import Evaluation, Samples, SavedCheckpoint, StepResult, WindowReport
from megalith.train.trackers import WandB, require_package

STEP = StepResult(3, 2.5, True, 1e-3, 0.1, 8.0, 0.5, None, None, 12, 4, 64, 0.1)

WINDOW = WindowReport(3, 9, 12, 0.1, 1.0, 100.0, 0.1, None, 1e-3, 4, 2.5, 1.0, 0.5, None, None, 0, 0)


SAMPLED = Samples(3, [{"prompt": "Once", "answer": "upon a time"}])


class Notes:
    """A drawer that notes everything, until it breaks."""

    name = "notes"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, breaks: bool = False) -> None:
        self.points: list[tuple[str, float, int, int | None]] = []
        self.breaks, self.closed = breaks, False

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        if self.breaks:
            raise OSError("no space left on device")
        self.points += [(name, value, iteration, samples) for name, value in values.items()]

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        self.points += [(sample["answer"], 0.0, iteration, None) for sample in samples]

    def checkpoint(self, path: str, iteration: int) -> None:
        self.points.append((path, 0.0, iteration, None))

    def close(self) -> None:
        self.closed = True


def names(log: LogConfig, result: StepResult = STEP) -> set[str]:
    """Of the curves of one step, one evaluation and one timing."""
    notes = Notes()
    records = Records([notes], log, 4, lambda: {"resident_bytes": 5, "max_resident_bytes": 9})
    records.after_step(result)
    records.after_evaluation(Evaluation(3, 12, "validation", 3.0, 8, 0.1, final=False))
    records.after_timing(3, {"optimizer": [0.1, 0.3]})
    return {name for name, *_ in notes.points}


def test_what_is_recorded_without_flags() -> None:
    usual = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "lm loss validation"}
    assert names(LogConfig()) == usual
    assert names(LogConfig(), replace(STEP, applied=False, grad_norm=None)) == usual - {"lm loss", "grad-norm"}


@pytest.mark.parametrize(
    ("flag", "curve", "there"),
    [
        ({"log_timers_to_tensorboard": True}, "optimizer-time", True),
        ({"log_loss_scale_to_tensorboard": False}, "loss-scale", False),
        ({"log_validation_ppl_to_tensorboard": True}, "lm loss validation ppl", True),
        ({"log_memory_to_tensorboard": True}, "mem-resident-bytes", True),
        ({"log_world_size_to_tensorboard": True}, "world-size", True),
        ({"tensorboard_log_interval": 2}, "lm loss", False),
    ],
    ids=str,
)
def test_each_flag_has_its_curve(flag: dict[str, Any], curve: str, there: bool) -> None:
    assert (curve in names(LogConfig())) != there
    assert (curve in names(LogConfig(**flag))) == there


def test_the_longest_time_and_the_samples_are_recorded() -> None:
    notes = Notes()
    records = Records([notes], LogConfig(log_timers_to_tensorboard=True))
    records.after_step(STEP)
    records.after_timing(3, {"optimizer": [0.1, 0.3]})
    assert ("lm loss", 2.5, 3, 12) in notes.points
    assert ("optimizer-time", 0.3, 3, None) in notes.points


def test_a_drawer_that_fails_is_left_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    broken, whole = Notes(breaks=True), Notes()
    records = Records([broken, whole])
    records.after_step(STEP)
    records.after_step(STEP)
    records.close()
    assert len(whole.points) == 10 and whole.closed and not broken.closed
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: ") and "notes" in line and "no space left on device" in line


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package, to which nobody is logged in; returns what it was asked for."""
    asked: list[Any] = []
    run = types.SimpleNamespace(
        id="r1",
        log=lambda values, step: asked.append((step, values)),
        finish=lambda: asked.append("finish"),
        summary={},
    )
    package: Any = types.ModuleType("wandb")
    settings = types.SimpleNamespace(mode="online", base_url="https://wandb.test")
    package.Settings = types.SimpleNamespace
    monkeypatch.setattr(trackers, "_answers", lambda url: url == settings.base_url)
    package.setup = lambda: types.SimpleNamespace(settings=settings)
    package.login = lambda prompt=True, verify=True: bool(prompt)  # False: nothing is known and nobody is asked
    package.Table = dict
    package.Error = type("Error", (Exception,), {})

    def init(**words: Any) -> Any:
        asked.append(words)
        return run

    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return asked


def test_wandb_gets_the_same_names_once(wandb: list[Any], tmp_path: Path) -> None:
    log = LogConfig(wandb_project="p", wandb_exp_name="n", wandb_entity="team")
    sink = WandB(log, tmp_path / "run", {"num_layers": 2}, {})
    records = Records([sink])
    records.after_step(STEP)
    records.after_sampling(SAMPLED)
    records.close()
    begin, (step, values), texts, end = wandb
    assert begin == {
        **{"project": "p", "name": "n", "entity": "team", "dir": str(tmp_path / "run")},
        **{"config": {"num_layers": 2}, "mode": "offline"},
    }
    assert (step, values["lm loss"], values["samples vs steps"]) == (3, 2.5, 12)
    assert not any("vs samples" in name for name in values)
    assert texts == (3, {"samples": {"columns": ["prompt", "answer"], "data": [["Once", "upon a time"]]}})
    assert end == "finish"


def test_wandb_itself_keeps_the_curves_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the package wandb of the extra `track` is not installed")
    log = LogConfig(wandb_project="p", wandb_exp_name="n")
    records = Records([WandB(log, tmp_path, {"num_layers": 2}, {"WANDB_MODE": "offline"})])
    records.after_step(STEP)
    records.after_evaluation(Evaluation(3, 12, "validation", 3.0, 8, 0.1, final=False))
    records.after_sampling(SAMPLED)
    records.close()
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    names = (b"lm loss", b"learning-rate", b"grad-norm", b"samples vs steps", b"lm loss validation")
    deadline = time.monotonic() + 60.0
    while missing := [name for name in names if name not in kept.read_bytes()]:  # its service writes after `finish`
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)
    (table,) = kept.parent.glob("files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["data"] == [["Once", "upon a time"]]


@pytest.mark.parametrize("reachable", [False, True])
def test_a_service_that_does_not_begin_leaves_the_run_offline(
    reachable: bool, wandb: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, begin = sys.modules["wandb"], sys.modules["wandb"].init
    monkeypatch.setattr(trackers, "_answers", lambda url: reachable)

    def init(**words: Any) -> Any:
        if words["mode"] == "online":
            assert reachable and words["settings"].init_timeout < 5
            raise package.Error("no route to host")
        return begin(**words)

    monkeypatch.setattr(package, "init", init)
    sink = WandB(LogConfig(wandb_project="p", wandb_exp_name="n"), tmp_path, {}, {"WANDB_MODE": "online"}, "r0")
    assert sink.mode == "offline" and wandb[-1]["mode"] == "offline" and wandb[-1]["id"] == "r0"
    assert ("no route to host" in sink.why_offline) is reachable and sink.why_offline


LOG = LogConfig(wandb_project="p", wandb_exp_name="n")


@pytest.mark.parametrize(
    ("chosen", "logged_in", "wanted"),
    [("", True, ("online", False)), ("", False, ("offline", True)), ("offline", True, ("offline", False))],
)
@pytest.mark.parametrize("place", ["WANDB_MODE", "settings"])
def test_wandb_says_who_is_logged_in_unless_the_mode_is_chosen(
    chosen: str, logged_in: bool, wanted: tuple[str, bool], place: str, wandb: list[Any], tmp_path: Path
) -> None:
    package: Any = sys.modules["wandb"]
    package.login = lambda prompt, verify: logged_in and not prompt and not verify
    if place == "settings" and chosen:
        package.setup().settings.mode = chosen
    sink = WandB(LOG, tmp_path, {}, {place: chosen})
    assert (sink.mode, bool(sink.why_offline)) == wanted and wandb[0]["mode"] == wanted[0]


def test_older_packages_are_asked_for_a_key(wandb: list[Any], tmp_path: Path) -> None:
    package: Any = sys.modules["wandb"]
    package.login = lambda anonymous=None, relogin=None: pytest.fail("this one prompts")
    package.api = types.SimpleNamespace(api_key="k")
    assert WandB(LOG, tmp_path, {}, {}).mode == "online"


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"WANDB_MODE": "online"}, {"id": "r0", "resume": "allow"}),
        ({"WANDB_MODE": "offline"}, {"id": "r0"}),
        ({"WANDB_MODE": "online", "WANDB_RUN_ID": "mine"}, {}),
        ({"WANDB_MODE": "online", "WANDB_RESUME": "must"}, {"id": "r0"}),
    ],
)
def test_a_resume_continues_the_run(
    environ: dict[str, str], wanted: dict[str, str], wandb: list[Any], tmp_path: Path
) -> None:
    assert WandB(LOG, tmp_path, {}, environ, "r0").run_id == "r1"  # W&B's word counts
    assert {name: wandb[0][name] for name in ("id", "resume") if name in wandb[0]} == wanted


@pytest.mark.parametrize("host", ["api.wandb.ai", "own.example"])
def test_wandb_itself_finds_a_login(host: str, tmp_path: Path) -> None:
    """Of `wandb login`, wherever this version of it logs in to; a process of its own, as the package keeps state."""
    pytest.importorskip("wandb", reason="the package wandb of the extra `track` is not installed")
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "in/.netrc").write_text(f"machine {host} login user password {'k' * 40}\n")
    (tmp_path / "in/.netrc").chmod(0o600)
    code = "import wandb; from megalith.train.trackers import is_logged_in; print(is_logged_in(wandb))"
    base = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    base |= {"WANDB_BASE_URL": "https://own.example"} if host == "own.example" else {}
    for name in ("in", "out"):
        environ = {**base, "HOME": str(tmp_path / name)}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
        assert done.stdout.split()[-1:] == [str(name == "in")], done.stderr


def test_checkpoints_and_memory_reach_trackers() -> None:
    notes = Notes()
    records = Records([notes], LogConfig(trackers=("trackio",)), memory=lambda: {"resident_bytes": 5})
    records.after_save(SavedCheckpoint(3, "/saved/iter_0000003", 0.1, 10))
    records.after_window(WINDOW)
    assert ("/saved/iter_0000003", 0.0, 3, None) in notes.points and ("mem-resident-bytes", 5, 3, None) in notes.points


@pytest.mark.parametrize(("resumed_at", "recorded"), [(-1, True), (2, True), (3, False)])
def test_samples_of_the_iteration_that_a_run_resumes_from_are_there(resumed_at: int, recorded: bool) -> None:
    notes = Notes()
    Records([notes], resumed_at=resumed_at).after_sampling(SAMPLED)
    assert notes.points == [("upon a time", 0.0, 3, None)] * recorded


def test_a_missing_package_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--tracker mlflow .*pip install mlflow"):
        require_package("mlflow", "--tracker mlflow")
    with pytest.raises(ConfigError, match="--wandb-project .*wandb"):
        require_package("wandb", "--wandb-project")
