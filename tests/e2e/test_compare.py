"""`megalith compare` on runs of `megalith train`: two learning rates with three seeds each, and one against itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.report.comparison import Measure, group_runs, read_run
from megalith.report.verdict import judge

from .checkpoints import state_of
from .small_run import on_text
from .test_resume import MODEL
from .warm import WarmProcess

COMMON = ["--train-iters", 40, "--eval-interval", 10, "--save-interval", 40, "--eval-iters", 4, "--num-workers", 0]


@pytest.fixture(scope="module")
def runs(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Save folders of finished runs, by learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    model, saved = on_text(folder, MODEL), dict[str, list[str]]()
    for lr in ("1e-2", "1e-4"):
        for seed in (1, 2, 3):
            save = folder / f"lr{lr}-s{seed}"
            words = [*model, *COMMON, "--lr", lr, "--min-lr", 0, "--seed", seed, "--save", save]
            outcome = warm.run(words, folder)
            assert outcome.code == 0, outcome.text
            saved.setdefault(lr, []).append(str(save))
    return saved


def test_two_learning_rates_are_told_apart(
    runs: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [*runs["1e-4"], *runs["1e-2"]]
    base, other = group_runs([read_run(Path(folder), Path(folder).name) for folder in folders])
    assert (base.name, other.name) == ("lr1e-4", "lr1e-2")
    assert judge(base, other, Measure()).differs is True
    assert other.total("tokens") == 40 * 4 * 16
    assert other.total("FLOPs") == pytest.approx(state_of(Path(folders[0]), 40)["flops"])
    assert other.spent_until("steps", base.losses(Measure())[0], Measure()) < 40
    assert main(["compare", *folders, "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^--lr +0.0001 +0.01 *$", text, re.MULTILINE), text
    assert (tmp_path / "page.html").read_text().count("<svg") == 8


def test_equal_runs_are_not_told_apart_nor_is_one_seed(runs: dict[str, list[str]]) -> None:
    first, second = ([read_run(Path(folder), folder)] for folder in runs["1e-2"][:2])
    (base,), (other,) = group_runs(first), group_runs(second)
    assert judge(base, other, Measure()).differs is None
    assert not group_runs([*first, *second])[1:]
