"""`megalith compare`: runs of known curves and costs, what may not be compared, and the page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.config.changes import ANOTHER_WAY, HARMLESS, LENGTH, ROUNDING
from megalith.config.run import all_settings
from megalith.report import read_history
from megalith.report.comparison import AXES, Experiment, Measure, group_runs, read_run
from megalith.report.settings import differing
from megalith.report.verdict import judge, tables

from .test_report import event, step, write

STEPS = 100
BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 8},
    "train": {"micro_batch_size": 2, "train_iters": STEPS, "seed": 1},
    "schedule": {"lr": 0.1},
    "data": {"data_path": ["text"], "seq_length": 8},
    "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 30},
}
Loss = Callable[[int], float]


def make(folder: Path, loss: Loss, *, steps: int = STEPS, last: float | None = None, **settings: Any) -> str:
    """Write a run of 16 tokens and 0.5 seconds a step, 1,000 FLOPs a token, with an evaluation every ten steps."""
    lines = [event("start", 0)]
    for i in range(1, steps + 1):
        lines.append(step(i, loss(i), num_tokens=16, seconds=0.5))
        if i % 10 == 0:
            lines.append(
                event("evaluation", i, split="validation", loss=loss(i) if last is None else last, final=False)
            )
    lines.append(event("throughput", steps, tokens_per_second=32.0, teraflops=32e3 / 1e12))
    write(folder, *lines)
    config = {group: dict(values) for group, values in BASE.items()}
    for name, value in settings.items():
        config.setdefault(all_settings()[name].group, {})[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def falling(offset: float = 0.0, speed: float = 1.0) -> Loss:
    return lambda i: 5.0 - 0.02 * speed * i + offset


def experiments(*folders: str) -> list[Experiment]:
    return group_runs([read_run(Path(folder), Path(folder).name) for folder in folders])


def sides(tmp_path: Path, base: list[float], other: list[float], **settings: Any) -> list[str]:
    """Runs of two learning rates whose losses are shifted, a seed each."""
    return [
        make(tmp_path / f"{name}-s{seed}", falling(offset), seed=seed, **more)
        for name, offsets, more in (("base", base, {}), ("fast", other, {"lr": 0.2, **settings}))
        for seed, offset in enumerate(offsets)
    ]


def test_runs_are_grouped_by_all_settings_but_the_seed(tmp_path: Path) -> None:
    third = make(tmp_path / "base-s9", falling(), seed=9, save_interval=7, log_interval=100, load="elsewhere")
    found = experiments(*sides(tmp_path, [0.0, 0.01], [0.0]), third)
    assert [(each.name, len(each.runs)) for each in found] == [("base", 3), ("fast-s0", 1)]
    assert differing([each.settings for each in found]) == {"--lr": ("0.1", "0.2")}


def test_derived_and_default_settings_are_equal_to_those_that_are_given(tmp_path: Path) -> None:
    one = make(tmp_path / "a", falling())
    other = make(tmp_path / "b", falling(), global_batch_size=2, ffn_hidden_size=64, seed=2)
    assert len(experiments(one, other)) == 1
    third = make(tmp_path / "c", falling(), global_batch_size=4)
    assert differing([each.settings for each in experiments(one, third)]) == {
        "--global-batch-size": ("2", "4"),
        "--eval-global-batch-size": ("2", "4"),
    }


def test_what_a_run_spends_until_the_loss_of_the_other(tmp_path: Path) -> None:
    slow, fast = make(tmp_path / "slow", falling()), make(tmp_path / "fast", falling(speed=2.0), lr=0.2)
    base, other = experiments(slow, fast)
    assert [base.total(axis) for axis in AXES] == pytest.approx([100, 1600, 1.6e6, 50])
    for axis, half in {"steps": 50, "tokens": 800, "FLOPs": 8e5, "time": 25}.items():
        assert other.spent_until(axis, 3.0, Measure()) == pytest.approx(half)
        assert other.loss_at(axis, half, Measure()) == pytest.approx(3.0)
    assert base.spent_until("steps", 2.9, Measure()) != base.spent_until("steps", 2.9, Measure())  # never: NaN
    cells = next(table.rows[0] for table in tables([base, other], Measure()) if table.columns[1] == "loss")
    assert [re.search(r"([\d.]+)x", cell)[1] for cell in cells[2:]] == ["2.00"] * 4  # type: ignore[index]


def test_a_single_evaluation_is_found_at_what_another_run_rounds_otherwise(tmp_path: Path) -> None:
    (run,) = experiments(make(tmp_path / "a", falling(), steps=10))
    for axis in AXES:
        for factor in (1 - 1e-12, 1 + 1e-12):
            assert run.loss_at(axis, factor * run.total(axis), Measure()) == pytest.approx(4.8)
        assert math.isnan(run.loss_at(axis, 0.99 * run.total(axis), Measure()))


def test_a_resume_counts_the_steps_once(tmp_path: Path) -> None:
    folder = Path(make(tmp_path / "a", falling()))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    repeated = [line for line in lines if json.loads(line)["iteration"] > 50]
    wrong = event("evaluation", 60, split="validation", loss=99.0)
    (folder / "metrics.jsonl").write_text("".join([*lines[:60], wrong, event("resume", 50), *repeated]))
    (found,) = experiments(str(folder))
    assert found.total("tokens") == 1600 and found.total("time") == 50
    assert found.runs[0].validation[1].max() < 5


def test_lost_steps_count_as_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, torn = (Path(make(tmp_path / name, falling(), lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2)))
    lines = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ('"step"' in line and 30 < json.loads(line)["iteration"] <= 60)]
    kept.insert(3, json.dumps({"event": "step", "iteration": "q", "loss": "x", "num_tokens": 16}) + "\n")
    (torn / "metrics.jsonl").write_text("".join(kept))
    one, other = experiments(str(whole), str(torn))
    assert [other.total(axis) for axis in AXES] == [one.total(axis) for axis in AXES]
    assert other.runs[0].lost == 30 and read_history(torn).unreadable == 1
    assert main(["compare", str(whole), str(torn)]) == 0
    assert "lack 30 steps" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_run_that_ended_without_its_last_records_is_finished(tmp_path: Path) -> None:
    """They were lost with a full disk; the next start has evaluated."""
    file = Path(make(tmp_path / "a", falling())) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["iteration"] < STEPS]
    file.write_text("".join(kept))
    assert read_run(tmp_path / "a", "a").unfinished
    last = event("evaluation", STEPS, split="validation", loss=3.0)
    file.write_text("".join([*kept, event("resume", STEPS), last]))
    assert not read_run(tmp_path / "a", "a").unfinished
    file.write_text("".join([*lines, event("resume", 50)]))
    assert read_run(tmp_path / "a", "a").unfinished, "it goes back to iteration 50"


def test_an_evaluation_that_lacks_a_set_does_not_count(tmp_path: Path) -> None:
    two = {"valid_data_path": ["v", "w"], "multiple_validation_sets": True}
    folder = make(tmp_path / "a", falling(), **two)
    assert not len(read_run(Path(folder), "a").validation[0])
    with (Path(folder) / "metrics.jsonl").open("a") as file:
        file.write(event("evaluation", STEPS, split="validation-1", loss=5.0))
    assert read_run(Path(folder), "a").validation[1].tolist() == [4.0]


def test_two_names_of_a_dataset_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.bin").touch()
    names = (["0.5", "text"], ["0.5", str(tmp_path / "text")])
    runs = [make(tmp_path / f"a{s}", falling(), seed=s, data_path=name) for s, name in enumerate(names)]
    assert len(experiments(*runs)) == 1
    other = [make(tmp_path / f"b{s}", falling(s / 9), seed=s, lr=0.2, data_path=names[1]) for s in range(2)]
    base, found = experiments(runs[0], *other)
    assert "data" not in judge(base, found, Measure()).text
    assert set(differing([base.settings, found.settings])) == {"--lr"}


def test_a_run_that_was_not_evaluated_at_its_end_has_no_final_loss(tmp_path: Path) -> None:
    """It was killed behind its last save."""
    runs = sides(tmp_path, [0.0, 0.01, 0.02], [0.0, 0.01, 0.02])
    base, other = experiments(*runs)
    assert judge(base, other, Measure()).differs is False
    for run in runs[:3]:
        file = Path(run) / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(x for x in lines if not ('"evaluation"' in x and json.loads(x)["iteration"] == STEPS)))
    base, other = experiments(*runs)
    verdict = judge(base, other, Measure())
    assert verdict.differs is None and "90 of 100" in verdict.text and "base-s0" in verdict.text


@pytest.mark.parametrize(
    ("effect", "again", "differs"),
    [
        (ANOTHER_WAY, None, None),
        (ANOTHER_WAY, 50, True),  # those steps were taken again, as before
        (ANOTHER_WAY, 80, None),
        (ROUNDING, None, True),
        (HARMLESS, None, True),
        (LENGTH, None, True),
    ],
)
def test_what_a_resume_changed_belongs_to_a_run(
    tmp_path: Path, effect: str, again: int | None, differs: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sides(tmp_path, [0.0, 0.01, 0.02], [-0.5, -0.51, -0.49])
    file = Path(runs[0]) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    change = {"flag": "--lr", "was": "5.0", "now": "0.1", "effect": effect}
    later = [] if again is None else [event("resume", again, changes=[])]
    after = [line for line in lines if json.loads(line)["iteration"] > (again or 50)]
    until = [line for line in lines if json.loads(line)["iteration"] <= 50]
    between = [line for line in lines if 50 < json.loads(line)["iteration"] <= (again or 50)]
    file.write_text("".join([*until, event("resume", 50, changes=[change]), *between, *later, *after]))
    base, other = experiments(*runs)
    assert judge(base, other, Measure()).differs is differs
    assert main(["compare", *runs]) == 0
    assert ("--lr from 5.0 to 0.1" in re.sub(r"\s+", " ", capsys.readouterr().out)) is (
        differs is None or effect == LENGTH
    )


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make(tmp_path / "a", falling()), make(tmp_path / "b", falling(), lr=0.2)
    before = sorted(tmp_path.rglob("*"))
    for path in (str(tmp_path), "", str(tmp_path / "absent" / "page.html")):
        assert main(["compare", one, other, "--html", path]) == 2
        assert "--html" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_difference_is_told_with_enough_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sides(tmp_path, [0.0, 0.01, 0.02], [-0.5, -0.51, -0.49])
    base, other = experiments(*runs)
    assert judge(base, other, Measure()).differs is True
    assert main(["compare", *runs]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "--lr" in text and "-0.5100" in text


def test_one_seed_a_side_gives_no_verdict(tmp_path: Path) -> None:
    base, other = experiments(*sides(tmp_path, [0.0], [-0.5]))
    assert judge(base, other, Measure()).differs is None
    base, other = experiments(*sides(tmp_path / "more", [0.0, 0.1], [-0.5]))
    assert judge(base, other, Measure()).differs is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 31}, "--vocab-size"),
        ({"data_path": ["other"]}, "--data-path"),
        ({"label_smoothing": 0.1}, "--label-smoothing"),
        ({"steps": 60}, "60 of 100"),
        ({"last": float("nan")}, "fast-s0"),
        ({"seed": 3}, "--seed 3"),
    ],
)
def test_what_may_not_be_compared_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    runs = sides(tmp_path, [0.0, 0.01], [])
    runs += [make(tmp_path / f"fast-s{s}", falling(-s), **{"seed": s, "lr": 0.2, **changes}) for s in range(2)]
    base, other = experiments(*runs)
    found = judge(base, other, Measure())
    assert found.differs is None and named in found.text


def test_a_run_that_diverged_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sides(tmp_path, [0.0, 0.01], [0.0])
    bad = make(tmp_path / "fast-s7", lambda i: float("nan") if i > 50 else 5.0, seed=7, lr=0.2)
    assert main(["compare", *runs, bad]) == 0
    assert "not finite" in re.sub(r"\s+", " ", capsys.readouterr().out)
    for run in (*runs, bad):
        file = Path(run) / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"evaluation"' not in line))
    assert main(["compare", runs[0], bad]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "training loss of fast-s7 is not finite" in text
    file = Path(bad) / "metrics.jsonl"
    text = file.read_text()
    skipped = text.replace('"loss": NaN, "applied": true', '"loss": null, "applied": false')
    assert skipped != text
    file.write_text(skipped)
    assert not math.isfinite(Measure(validation=False).of(read_run(file.parent, "skipped")))


def test_equal_validation_data_suffices(tmp_path: Path) -> None:
    runs = sides(tmp_path, [], [])
    for name, path in (("a", "one"), ("b", "two")):
        runs += [
            make(tmp_path / f"{name}{seed}", falling(seed / 9), data_path=[path], seed=seed, valid_data_path=["v"])
            for seed in range(2)
        ]
    base, other = experiments(*runs)
    assert judge(base, other, Measure()).differs is False


def test_the_lowest_loss_is_tested_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def overfitting(low: float) -> Loss:
        return lambda i: low + abs(i - 50) / 50

    runs = [make(tmp_path / f"a{s}", overfitting(2 + s / 100), seed=s) for s in range(3)]
    runs += [make(tmp_path / f"b{s}", overfitting(1 + s / 100), seed=s, lr=0.2) for s in range(3)]
    base, _ = experiments(*runs)
    assert base.losses(Measure(lowest=True)) == [2.0, 2.01, 2.02] and min(base.losses(Measure())) == 3.0
    assert main(["compare", *runs, "--best"]) == 0
    assert "-1.0000" in capsys.readouterr().out


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sides(tmp_path, [0.0, 0.01], [-0.5, -0.51])
    assert main(["compare", *runs, "--html", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|src=", text), "the page loads something"
    assert text.count("<svg") == 8 and text.count("<polyline") == 8 * 4
    assert "fast" in text and "--lr" in text
    assert main(["compare", *runs, "--html", str(tmp_path / "no/a.html")]) == 2
    assert "--html" in capsys.readouterr().err


def test_a_baseline_of_equal_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make(tmp_path / f"{name}-{s}", falling(s / 100), seed=s) for name in ("old", "new") for s in range(3)]
    assert main(["compare", *runs[3:], "--baseline", *runs[:3]]) == 0
    assert "new against old: +0.0000" in capsys.readouterr().out
    each = [word for run in runs[:3] for word in ("--baseline", run)]
    assert main(["compare", *runs[3:], *each]) == 0
    assert "new against old: +0.0000" in capsys.readouterr().out


def test_runs_without_validation_are_compared_by_training_loss(tmp_path: Path) -> None:
    runs = sides(tmp_path, [0.0, 0.01], [-0.5, -0.51])
    for run in runs:
        file = Path(run) / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"evaluation"' not in line))
    assert main(["compare", *runs]) == 0
    assert main(["compare", *runs, "--best"]) == 2


def test_bad_command_lines_end_with_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make(tmp_path / "a", falling()), make(tmp_path / "b", falling(), lr=0.2)
    bare = write(tmp_path / "bare", event("start", 0), step(1, 5.0, num_tokens=1))
    empty = write(tmp_path / "empty", event("start", 0))
    for words, code, named in [
        ([one], 2, "RUN"),
        (["--baseline", one, other], 2, "--baseline"),
        ([one, one], 2, str(tmp_path / "a")),
        ([one, "--baseline", one], 2, str(tmp_path / "a")),
        ([make(tmp_path / "c", falling()), "--baseline", one, other], 2, "--lr"),
        ([one, str(tmp_path / "missing")], 3, "missing"),
        ([str(tmp_path / "missing"), str(tmp_path / "gone")], 3, "gone"),
        ([one, str(bare)], 3, "config.json"),
        ([one, str(empty)], 3, "metrics.jsonl"),
    ]:
        assert main(["compare", *words]) == code
        assert named in capsys.readouterr().err
