"""The page of `megalith plan --html`, plans in Python, and what a run says at its end beside its plan."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith import api
from megalith.cli.main import main
from megalith.cli.planned import planned
from megalith.config import load
from megalith.plan.page import render_plan
from megalith.report.history import Event
from megalith.report.page import _describe
from megalith.train.results import Hook

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --hidden-dropout 0 --attention-dropout 0 --pipeline-model-parallel-size 2"
)


class _Tags(HTMLParser):
    """Counts start and end tags, and keeps the sizes of rectangles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.widths: list[float] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        if tag == "rect":
            self.widths.append(float(dict(attrs)["width"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_page_shows_memory_time_and_every_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *FLAGS.split(), "--gpus", "2xH100", "--html", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    tags = _Tags(text)
    assert "script" not in tags.opened and "http" not in text
    for tag in ("svg", "table", "tr", "td", "rect", "title", "p", "div"):
        assert tags.opened.count(tag) == tags.closed.count(tag), tag
    operations = re.findall(r"<title>[FB]\d+\.\d+</title>", text)
    assert len(operations) == 2 * 2 * 6  # stages, kinds, and of the 8 micro-batches 3 for each stage
    memory = [part for rank in told["memory"]["ranks"] for part in rank["peak"].values() if part]
    spent = [part for part in told["parts"].values() if part]
    bars = tags.widths[: -len(operations)]
    assert len(bars) >= len(memory) + len(spent) and min(bars) >= 0
    assert sum(bars[-len(spent) :]) == pytest.approx(960 - 96 - 8, abs=1)  # the step fills its bar


def test_the_library_plans_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    plan = api.plan(FLAGS.split(), "2xH100")
    assert main(["plan", *FLAGS.split(), "--gpus", "2xH100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert isinstance(plan, api.Plan) and plan.fits is True and plan.fits == told["fits"]
    assert plan.fullest.peak_bytes == told["memory"]["peak_bytes"] and plan.time.step_seconds == told["step_seconds"]
    with pytest.raises(api.ConfigError, match="--gpus"):
        api.plan(FLAGS.split(), "2xPotato")
    for nodes in (0, 3):
        with pytest.raises(api.ConfigError, match=f"--nodes {nodes}"):
            api.plan(FLAGS.split(), "2xH100", nodes=nodes)
    assert "Beside the first" not in render_plan(plan)


def test_a_run_says_at_its_end_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in FLAGS.split() if word != "--pipeline-model-parallel-size"][:-1]
    config, said, events = load(words, {}, files=False), list[str](), list[dict[str, Any]]()

    def hook(**memory: int) -> Hook | None:
        return planned(
            config, 256, torch.device("cpu"), lambda: memory, said.append, lambda _, **values: events.append(values)
        )

    assert hook() is None, "nothing was planned"
    assert main(["plan", *words, "--gpus", "1xCPU", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for memory in ({}, {"max_allocated_bytes": 3 * 2**30}):
        found = hook(**memory)
        assert found is not None
        found.after_training(1)
        assert len(events) == 0 or memory, "a run without a window has nothing to compare"
        for seconds in (90.0, 2.0, 4.0):
            found.after_window(cast(Any, SimpleNamespace(seconds_per_step=seconds)))
        found.after_training(7)
        last = events[-1]
        assert (last["iteration"], last["measured_seconds"]) == (7, 3.0), "the first window has the start in it"
        assert last["planned_seconds"] == pytest.approx(told["step_seconds"])
        assert last["planned_peak_bytes"] == told["memory"]["peak_bytes"]
        assert last["measured_peak_bytes"] == memory.get("max_allocated_bytes")
        assert ("GiB" in said[-1]) is bool(memory) and " 3 s a step" in said[-1]
        assert ("GiB" in _describe(Event("plan", 7, 0.0, last))) is bool(memory)
