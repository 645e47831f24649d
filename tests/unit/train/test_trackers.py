"""Trackers in their own threads, and the curves, config and checkpoints that each library keeps over a resume."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.train import trackers
from megalith.train.records import Records
from megalith.train.results import SavedCheckpoint
from megalith.train.trackers import THREADED, Threaded, TrackedRun, Tracker, TrackerStopped

SAMPLES = [{"prompt": "1 + 1", "answer": "*2*\n# 3", "held_out": "2"}, {"prompt": "Once <b>", "answer": ""}]


class Slow:
    """A tracker that notes its calls and waits for leave before each."""

    name, errors = "slow", (Exception,)

    def __init__(self, leave: threading.Event | None = None, fails: bool = False) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.leave, self.fails = leave or threading.Event(), fails
        if leave is None:
            self.leave.set()

    def _note(self, *call: object) -> None:
        self.leave.wait()
        if self.fails:
            raise ConnectionError("no route to host")
        self.calls.append((threading.current_thread().name, *call))

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self._note(dict(values), iteration, samples)

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        self._note(list(samples), iteration)

    def checkpoint(self, path: str, iteration: int) -> None:
        self._note(path, iteration)

    def close(self) -> None:
        self._note("close")


def test_calls_are_made_in_order_in_one_other_thread() -> None:
    slow = Slow()
    sink = Threaded("slow", lambda: slow)
    sink.scalars({"lm loss": 2.5}, 1, 4)
    sink.samples(SAMPLES, 1)
    sink.checkpoint("/saved", 1)
    sink.close()
    assert [call[1:] for call in slow.calls] == [({"lm loss": 2.5}, 1, 4), (SAMPLES, 1), ("/saved", 1), ("close",)]
    assert {call[0] for call in slow.calls} == {"tracker-slow"}


def test_a_save_waits_for_a_local_tracker() -> None:
    slow, failing = Slow(threading.Event()), Slow(fails=True)
    local = Threaded("local", lambda: slow, local=True)
    local.scalars({"lm loss": 2.5}, 1, 4)
    threading.Timer(0.05, slow.leave.set).start()
    local.checkpoint("/saved", 1)
    assert [call[1:] for call in slow.calls] == [({"lm loss": 2.5}, 1, 4), ("/saved", 1)]
    broken = Threaded("broken", lambda: failing, local=True)
    with pytest.raises(TrackerStopped, match="no route"):
        broken.checkpoint("/saved", 1)
        broken.close()


def test_a_tracker_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trackers, "_LONGEST_WAIT", 0.05)
    leave = threading.Event()
    hanging, whole = Threaded("hanging", lambda: Slow(leave)), Slow()
    records = Records([hanging, whole])
    hanging.wait_until_begun()
    records.after_save(SavedCheckpoint(3, "/saved", 0.1, 10))
    records.close()
    leave.set()
    assert whole.calls[-1][1] == "close"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: ") and "hanging" in line


def test_a_start_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_LONGEST_WAIT", 0.05)
    leave = threading.Event()

    def make() -> Tracker:
        leave.wait()
        return Slow()

    sink = Threaded("late", make)
    sink.wait_until_begun()
    assert sink.tracker is None
    sink.scalars({"lm loss": 2.5}, 1, 4)  # kept until it has begun
    leave.set()
    sink._patience = 60.0
    sink.close()
    assert isinstance(sink.tracker, Slow) and sink.tracker.calls[0][1] == {"lm loss": 2.5}


def _no_start() -> Tracker:
    raise ConnectionError("no route to host")


@pytest.mark.parametrize("make", [lambda: Slow(fails=True), _no_start], ids=["a call", "the start"])
@pytest.mark.parametrize("here", [False, True])
def test_what_a_tracker_raises_ends_its_records(
    make: Callable[[], Tracker], here: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Records([Threaded("broken", make, here=here)])
    deadline = time.monotonic() + 60.0
    while not (said := capsys.readouterr().err):
        records.after_save(SavedCheckpoint(3, "/saved", 0.1, 10))
        assert time.monotonic() < deadline
    records.close()
    assert "broken" in said and "ConnectionError: no route to host" in said and len(said.splitlines()) == 1
    assert not capsys.readouterr().err


def test_a_tracker_that_does_not_keep_up_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    leave = threading.Event()
    sink = Threaded("behind", lambda: Slow(leave))
    with pytest.raises(TrackerStopped):
        for step in range(10):
            sink.scalars({}, step, None)
    leave.set()


FAKE = """
import json
class Run:
    def __init__(self, **options): self.note(init=options)
    def note(self, **values):
        with open("calls.jsonl", "a") as file: file.write(json.dumps(values) + "\\n")
    def log(self, values, step): self.note(log=values, step=step)
    def finish(self): self.note(finish=True)
def init(project, **options): return Run(project=project, **options)
def Table(columns, data): return [dict(zip(columns, row)) for row in data]
"""
RUN = TrackedRun("megalith", "small", Path(), {"num_layers": 2, "data_path": ["a", "b"]}, "abc123", False)


def _record(name: str, run: TrackedRun, steps: range) -> None:
    make = THREADED[name]
    sink = Threaded(name, lambda: make(run), local=make.is_local(), here=name == "swanlab")
    for step in steps:
        sink.scalars({"lm loss": 3.0 / step, "tokens of a:b,c": 5.0, "grad-norm": float("nan")}, step, 4 * step)
    sink.samples(SAMPLES, 4)
    sink.checkpoint(f"/saved/iter_{steps[-1]:07d}", steps[-1])
    sink.close()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries keep their files, and nobody is logged in."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "swanlab"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def test_trackio_is_asked_for_one_run(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_folder / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(own_folder))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    for steps in (range(1, 3), range(3, 5)):
        _record("trackio", RUN, steps)
    del sys.modules["trackio"]
    calls = [json.loads(line) for line in (own_folder / "calls.jsonl").read_text().splitlines()]
    (first, second) = [call["init"] for call in calls if "init" in call]
    assert first == second and first["project"] == "megalith" and first["resume"] == "allow"
    assert first["config"] == {"num_layers": 2, "data_path": ["a", "b"]}
    logged = [(call["step"], call["log"]) for call in calls if "log" in call]
    assert [step for step, _ in logged] == [1, 2, 4, 2, 3, 4, 4, 4]
    assert logged[0][1]["lm loss"] == 3.0 and logged[0][1]["samples vs steps"] == 4
    assert logged[2][1] == {"samples": [SAMPLES[0], {**SAMPLES[1], "held_out": ""}]}
    assert logged[3][1] == {"checkpoint": "/saved/iter_0000002"}


def test_trackio_itself_continues_a_run(own_folder: Path) -> None:
    pytest.importorskip("trackio", reason="the package trackio is not installed (pip install trackio)")
    from trackio.utils import TRACKIO_DIR

    run = replace(RUN, run_id=secrets.token_hex(6))  # the folder is that of the first import
    for steps in (range(1, 4), range(4, 6)):
        _record("trackio", run, steps)
    with sqlite3.connect(TRACKIO_DIR / "megalith.db") as kept:
        rows = kept.execute("select step, metrics from metrics where run_name = ?", (f"small-{run.run_id}",)).fetchall()
    points = {step: value["lm loss"] for step, text in rows if "lm loss" in (value := json.loads(text))}
    assert points == {step: 3.0 / step for step in range(1, 6)}
    tables = [value["samples"] for _, text in rows if "samples" in (value := json.loads(text))]
    assert [row["answer"] for row in tables[-1]["_value"]] == [sample["answer"] for sample in SAMPLES]


def test_mlflow_itself_continues_a_run(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed (pip install mlflow)")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database (pip install mlflow)")
    uri = f"sqlite:///{own_folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    _record("mlflow", RUN, range(1, 4))
    _record("mlflow", replace(RUN, resumes=True), range(4, 6))
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("megalith")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "lm loss")] == [1, 2, 3, 4, 5]
    assert run.data.params["num_layers"] == "2" and run.data.tags["checkpoint"] == "/saved/iter_0000005"
    assert run.info.status == "FINISHED" and run.data.metrics["samples vs steps"] == 20
    (file,) = client.list_artifacts(run.info.run_id, "samples")
    text = Path(client.download_artifacts(run.info.run_id, file.path)).read_text()
    assert file.path == "samples/iter_0000004.md" and "\n\n    *2*\n    # 3\n\n" in text and "    Once <b>\n" in text


def test_mlflow_continues_without_a_store_of_files(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may take curves and have its files where nobody can write."""
    calls: list[str] = []
    answer = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"), experiment_id="e")

    class Client:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: calls.append(name) or answer

        def log_text(self, *_: object) -> None:
            calls.append("log_text")
            raise PermissionError("the bucket is not ours")

    package, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    vars(package).update(MlflowClient=Client)
    vars(entities).update(Metric=lambda *_: None, Param=lambda *_: None)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    _record("mlflow", RUN, range(1, 3))
    assert calls[-3:] == ["log_text", "set_tag", "set_terminated"]


def test_swanlab_itself_keeps_a_run_offline_and_leaves_ctrl_c_alone(own_folder: Path) -> None:
    pytest.importorskip("swanlab", reason="the package swanlab is not installed (pip install swanlab)")
    before = signal.getsignal(signal.SIGINT)
    run = replace(RUN, folder=own_folder / "run")
    make = THREADED["swanlab"]
    sink = Threaded("swanlab", lambda: make(run), local=make.is_local(), here=True)
    assert signal.getsignal(signal.SIGINT) is before
    sink.scalars({"lm loss": 2.5, "tokens of a:b,c": 5.0}, 1, 4)
    sink.samples(SAMPLES, 1)
    sink.checkpoint("/saved/iter_0000001", 1)
    sink.close()
    (kept,) = (own_folder / "run" / "swanlog").glob("run-*/*.swanlab")
    assert b"lm loss" in kept.read_bytes()
    texts = [text.read_text() for text in kept.parent.glob("media/text/*")]
    assert any("/saved/iter_0000001" in text for text in texts) and any("\n    # 3\n" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "environ", "local"),
    [
        ("trackio", {}, True),
        ("trackio", {"TRACKIO_SPACE_ID": "me/space"}, False),
        ("mlflow", {}, True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:///x.db"}, True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://host:5000"}, False),
        ("swanlab", {}, True),
        ("swanlab", {"SWANLAB_API_KEY": "k"}, False),
        ("swanlab", {"SWANLAB_API_KEY": "k", "SWANLAB_MODE": "offline"}, True),
    ],
)
def test_what_needs_no_network_is_waited_for(
    name: str, environ: dict[str, str], local: bool, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert THREADED[name].is_local() is local


def test_a_server_answers_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert trackers._answers(f"http://127.0.0.1:{port}/api")
    assert not trackers._answers(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    assert trackers._answers("https://unreachable.invalid")
