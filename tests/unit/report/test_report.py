"""One page of a run: rewinds, values that are no numbers, torn lines, a million steps (reliability F37, F38)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.report import read_history, render_page
from megalith.report.history import Curve, History, downsample
from megalith.report.page import WIDTH, chart


def step(iteration: int, loss: float | None, **more: Any) -> str:
    """A line of metrics.jsonl."""
    record = {"event": "step", "time": 1e9 + iteration, "iteration": iteration, "loss": loss, "applied": True}
    return json.dumps({**record, "learning_rate": 1e-3, "grad_norm": 1.0, "seconds": 0.1, **more}) + "\n"


def write(folder: Path, *lines: str) -> Path:
    """A run folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def event(kind: str, iteration: int, **more: Any) -> str:
    """A line of metrics.jsonl."""
    return json.dumps({"event": kind, "time": 1e9 + iteration, "iteration": iteration, **more}) + "\n"


def test_a_resume_from_an_earlier_checkpoint_divides_the_curve(tmp_path: Path) -> None:
    change = {"flag": "--lr", "was": "0.001", "now": "<b>", "effect": "another way"}
    folder = write(
        tmp_path,
        event("start", 0),
        *(step(i, 5.0 - i / 10) for i in range(1, 8)),
        event("save", 5, num_bytes=10, seconds=1.0),
        event("resume", 5, changes=[change]),
        *(step(i, 4.0 - i / 10) for i in range(6, 9)),
    )
    history = read_history(folder)
    loss = history.curves["training loss"]
    assert [[point[0] for point in segment] for segment in loss.segments] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert loss.abandoned == [[(6, 4.4), (7, 4.3)]]
    text = render_page(history, "a <run>")
    assert 'class="again"' in text and "a &lt;run&gt;" in text and "<td>&lt;b&gt;</td>" in text
    assert "<b>1</b><span>restarts</span>" in text


def test_values_that_are_no_numbers_and_torn_lines(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        event("start", 0),
        step(1, 5.0),
        step(2, None),
        step(3, None),
        step(4, 4.0, applied=False, grad_norm=None),
        '{"event": "step", "iterat\n',
        "17\n",
        step(5, float("nan")),
        step(6, 3.0),
        '{"event": "st',
    )
    history = read_history(folder)
    assert (history.num_steps, history.num_skipped, history.num_nan, history.unreadable) == (6, 1, 2, 3)
    assert history.curves["training loss"].segments == [[(1, 5.0)], [(6, 3.0)]]
    assert [(e.kind, e.iteration) for e in history.events[1:]] == [("not a number", 2), ("skipped", 4)]
    text = render_page(history, "run")
    assert "2 steps" in text and "NaN" in text and "3 unreadable" in text


def test_lines_of_other_types_are_unreadable(tmp_path: Path) -> None:
    bad = [
        step(2, 4.0, time="x"),
        step(2, 4.0, seconds="x"),
        event("save", 1, num_bytes="x"),
        event("save", 1, seconds=[1]),
    ]
    digits = '{"event": "step", "iteration": ' + "9" * 5000 + "}\n"
    history = read_history(write(tmp_path, event("start", 0), step(1, 5.0), *bad, digits, step(2, 3.0)))
    assert (history.num_steps, history.unreadable) == (2, 5)
    assert "5 unreadable" in render_page(history, "run")


def test_a_fresh_start_in_the_same_folder_leaves_the_old_curve_grey(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, event("start", 0), step(1, 5.0), event("start", 0), step(1, 6.0)))
    loss = history.curves["training loss"]
    assert (loss.segments, loss.abandoned) == ([[(1, 6.0)]], [[(1, 5.0)]])


def test_what_happened_before_the_first_value_stands_inside_the_picture() -> None:
    picture = chart({"train": Curve([[(10.0, 11e3), (20.0, 15e3)]])}, [(0.0, "start", "start"), (25.0, "save", "save")])
    left, right = (float(x) for x in re.findall(r'class="mark \w+" x1="([\d.]+)"', picture))
    axes = [float(x) for x in re.findall(r'class="grid" x1="([\d.]+)" x2="([\d.]+)"', picture)[0]]
    assert [left, right] == axes and right < WIDTH
    assert ">12,000</text>" in picture


def test_thinning_keeps_every_spike() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[54_322] = (54_322.0, -99.0)
    thin = downsample(points, 500)
    assert len(thin) <= 501
    assert {points[54_321], points[54_322]} <= set(thin)
    assert thin == sorted(thin)


def test_a_page_of_many_steps_is_small(tmp_path: Path) -> None:
    lines = [event("start", 0), *(step(i, 3.0 + i % 7, loss_scale=8.0) for i in range(1, 20_001))]
    lines += [event("save", i, num_bytes=1, seconds=1.0) for i in range(100, 20_001, 10)]
    history = read_history(write(tmp_path, *lines))
    text = render_page(history, "run")
    assert len(text) < 400_000
    assert "(399 of 1992)" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "save/run", event("start", 0), step(1, 5.0))
    (folder / "config.json").write_text('{"train": {"train_iters": 5, "seed": 1234}, "model": {"num_layers": 3}}')
    assert main(["report", str(tmp_path / "save")]) == 0
    assert "1 steps, 1 events" in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    assert "<title>save</title>" in text and "1 of 5" in text
    assert not re.search(r"https?://|<script|<link|@import|src=", text), "the page loads something"
    assert main(["report", str(folder), "-o", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text() == text.replace("report.html", "a.html")
    assert main(["report", str(tmp_path / "save"), "-o", str(tmp_path / "no/a.html")]) == 2
    assert main(["report", str(tmp_path)]) == 3
    assert "metrics.jsonl" in capsys.readouterr().err


def test_the_last_answers_to_held_out_prompts_are_shown() -> None:
    history = History()
    for iteration in (10, 20):
        sample = {"prompt": "a <b>", "answer": f"of {iteration}", "held_out": "c"}
        samples = [sample, {"prompt": "d", "answer": "e"}]
        history.take({"event": "samples", "iteration": iteration, "samples": samples})
    page = render_page(history, "run")
    assert "<td>a &lt;b&gt;</td><td>of 20</td><td>c</td>" in page and "of 10" not in page
    assert "<td>d</td><td>e</td><td></td>" in page
