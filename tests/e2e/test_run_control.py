"""A run that is changed, continued, ended and looked at as users do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.train.metrics import read_metrics

from .test_resume import command
from .warm import WarmProcess

SHORT = ["--train-iters", 4, "--save-interval", 2, "--eval-interval", 4]


def lines_with(text: str, needle: str) -> list[str]:
    """The lines that contain it."""
    return [line for line in text.splitlines() if needle in line]


def test_a_finished_run_is_evaluated_extended_and_reported(
    warm: WarmProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "c"
    assert warm.run(command(save, *SHORT), tmp_path).code == 0
    # Started again it says so, and evaluates.
    again = warm.run(command(save, *SHORT), tmp_path)
    assert again.code == 0 and "iteration 4 of 4 " in again.text
    assert "WARNING" not in again.text and "on test set" in again.text
    # A longer run has another schedule: the message says what changed and which flag decides.
    longer = command(save, *SHORT, "--train-iters", 6, "--log-interval", 2)
    refused = warm.run(longer, tmp_path)
    assert refused.code == 4
    assert "--train-iters 4 -> 6" in refused.text
    assert "--override-opt-param-scheduler" in refused.text and "--lr-decay-iters" in refused.text
    more = warm.run([*longer, "--override-opt-param-scheduler", "--lr", 5e-3, "--log-progress"], tmp_path)
    assert more.code == 0, more.text
    assert lines_with(more.text, "    --lr 0.01 -> 0.005: ")
    assert lines_with(more.text, "    harmless: ") == [
        "    harmless: --override-opt-param-scheduler off -> on, --log-interval 1 -> 2, --log-progress off -> on"
    ]
    assert "Saved checkpoint\tIteration: 6" in (save / "progress.txt").read_text()
    changes = [record["changes"] for record in read_metrics(save / "run/metrics.jsonl") if record["event"] == "resume"]
    assert {"flag": "--lr", "was": "0.01", "now": "0.005"}.items() <= changes[-1][1].items()
    assert main(["report", str(save)]) == 0
    page = (save / "run/report.html").read_text()
    assert "<code>--lr</code></td><td>0.01</td><td>0.005</td>" in page


def test_skip_train_evaluates_the_checkpoint(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = command(save, *SHORT, "--eval-iters", 2)
    trained = warm.run(words, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in save.glob("iter_*/*")}
    only = warm.run([*words, "--skip-train", "--train-iters", 8], tmp_path)
    assert only.code == 0, only.text
    assert "skipping training (--skip-train is on) ..." in only.text and "] iteration " not in only.text
    assert lines_with(only.text, "on test set") == lines_with(trained.text, "on test set")
    assert {path: path.stat().st_mtime_ns for path in save.glob("iter_*/*")} == before
    # The same samples in half as many iterations of twice the batch, and in larger micro-batches.
    larger = ["--eval-iters", 1, "--eval-global-batch-size", 8, "--eval-micro-batch-size", 4]
    again = warm.run([*words, "--skip-train", "--train-iters", 8, *larger, "--padded-vocab-size", 512], tmp_path)
    assert again.code == 2 and re.search(r"--padded-vocab-size 512\b.*\b104\b", again.text)
    again = warm.run([*words, "--skip-train", "--train-iters", 8, *larger], tmp_path)
    losses = [float(re.findall(r"on test set \| lm loss value: (\S+)", run.text)[0]) for run in (only, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert lines_with(again.text, "Evaluating iter ") == ["Evaluating iter 1/1"] * 2


def test_what_two_ranks_print_and_keep(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = command(save, *SHORT, "--tensor-model-parallel-size", 2, "--timing-log-level", 1, "--log-throughput")
    words += ["--profile", "--profile-step-start", 1, "--profile-step-end", 2, "--profile-ranks", 1, "--device", "cpu"]
    first, second = warm.run_ranks(2, words, tmp_path)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    text = first.text
    blocks = re.findall(r"\(min, max\) time across ranks \(ms\):\n((?:    \S+ \.+: \(\d+\.\d\d, \d+\.\d\d\)\n)+)", text)
    names = [re.findall(r"^    (\S+) ", block, re.MULTILINE) for block in blocks]
    assert names[0] == ["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"]
    steps = [block for block in names if block == ["forward-backward", "optimizer"]]
    assert len(steps) == 4 and ["evaluate"] in names and ["save-checkpoint"] in names
    assert len(lines_with(text, "(after 1 iterations) memory (MB) | resident: ")) == 2
    assert len(lines_with(text, "Theoretical memory footprints")) == 1
    assert "throughput per GPU (TFLOP/s/GPU): " in text
    own, other = (save / "run/log.txt").read_text(), (save / "run/log-rank00001.txt").read_text()
    for log in (own, other):  # each rank has the complete text
        assert "  num_layers ...................................... 2\n" in log
        assert len(lines_with(log, "] iteration ")) == 4
    trace = json.loads((save / "run/profile-rank1-iterations-2-2.json").read_text())
    assert trace["traceEvents"]
    assert not list(save.glob("run/profile-rank0*"))


def test_an_error_is_in_the_log_of_its_rank(warm: WarmProcess, tmp_path: Path) -> None:
    words = command(tmp_path / "c", *SHORT, "--device", "cpu")
    finished = warm.run(words, tmp_path, MEGALITH_FAULT="raise@step=2,point=fwd")
    assert finished.code != 0
    log = (tmp_path / "c/run/log.txt").read_text()
    assert "Traceback (most recent call last)" in log or "Error" in log


def test_weights_to_begin_with(warm: WarmProcess, tmp_path: Path) -> None:
    """Those of --pretrained-checkpoint, unless --load holds a checkpoint."""
    first, save = tmp_path / "a", tmp_path / "b"
    trained = warm.run(command(first, *SHORT, "--eval-iters", 2), tmp_path)
    begin = ["--pretrained-checkpoint", first]
    words = command(save, *SHORT, "--eval-iters", 2, "--lr", 0, "--min-lr", 0, "--weight-decay", 0)
    runs = [warm.run([*words, *begin], tmp_path), warm.run([*words, *begin], tmp_path)]
    assert [run.code for run in runs] == [0, 0], runs[0].text
    assert "evaluating only" in runs[1].text  # its own checkpoint comes first
    fresh = warm.run(command(tmp_path / "c", *words[len(command(save)) :]), tmp_path)
    losses = [re.findall(r"on test set \| lm loss value: (\S+)", run.text)[0] for run in (trained, runs[0], fresh)]
    assert losses[0] == losses[1] != losses[2]
