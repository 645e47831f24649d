"""Runs over blends, with documents kept apart, in cyclic order and over whole validation splits, as a user has them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.data.indexed import IndexedWriter
from megalith.train.metrics import read_metrics

from .checkpoints import assert_same, curve_of, state_of
from .warm import WarmProcess, free_port

MODEL = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--micro-batch-size", 1, "--global-batch-size", 4, "--train-iters", 8),
    *("--lr", 1e-2, "--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--log-interval", 1),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--device", "cpu", "--distributed-backend", "gloo"),
]


def write(prefix: Path, scale: int, documents: int = 40) -> Path:
    """Documents of 1 to 30 tokens that end with 99."""
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in range(documents):
            tokens = np.append(np.arange(document % 30) * (document + 3) * scale % 99, 99)
            writer.add_document(tokens, [len(tokens)])
        writer.finalize()
    return prefix


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "one", 1), write(tmp_path / "other", 7, documents=60)


def saving(save: Path) -> list[object]:
    return ["--save", save, "--load", save, "--save-interval", 4]


def steps_of(save: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(save / "run" / "metrics.jsonl") if record["event"] == "step"]


@pytest.mark.parametrize(
    "order",
    [
        "--dataloader-type single --reset-attention-mask --reset-position-ids --eod-mask-loss --num-workers 2",
        pytest.param(
            "--dataloader-type cyclic --dataloader-inter-document-masking --num-workers 1", marks=pytest.mark.full
        ),
    ],
    ids=["single", "cyclic"],
)
def test_two_ranks_resume_a_blend_where_it_stood(
    warm: WarmProcess, tmp_path: Path, sources: tuple[Path, Path], order: str
) -> None:
    one, other = sources
    common = [*MODEL, "--data-path", 1, one, 3, other, "--split", "8,2,0", *order.split(), "--eval-iters", 1]
    common += ["--data-cache-path", tmp_path / "cache"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for arguments in (saving(whole), [*saving(halves), "--exit-interval", 4], saving(halves)):
        for finished in warm.run_ranks(2, [*common, *arguments], tmp_path):
            assert finished.code == 0, finished.text
    assert_same(state_of(whole, 8), state_of(halves, 8))
    assert curve_of(whole) == curve_of(halves)
    counts = [record["source_tokens"] for record in steps_of(halves)]
    assert counts == [record["source_tokens"] for record in steps_of(whole)]
    assert all(sum(step.values()) == 4 * 16 for step in counts)
    total = sum((Counter(step) for step in counts), Counter())
    assert total[str(one)] + total[str(other)] == 8 * 4 * 16
    if "single" in order:
        assert total[str(one)] == total[str(other)] / 3
    assert not list((tmp_path / "cache").glob(".*")), "no lock is left"


def test_other_data_stops_a_resume_and_can_be_accepted(
    warm: WarmProcess, tmp_path: Path, sources: tuple[Path, Path]
) -> None:
    """F20: weights, order, number and content of the data; accepted, it stands in the log of the run."""
    one, other = sources
    save, blend = tmp_path / "c", ["--data-path", 1, one, 3, other, "--split", "1,0,0", "--eval-iters", 0]
    assert warm.run([*MODEL, *blend, *saving(save), "--exit-interval", 4], tmp_path).code == 0
    changes = {
        ("--data-path", 1, one, 2, other): [r"dataset 2 .*\bweight 3\b.*\bweight 2\b"],
        ("--data-path", 1, other, 3, one): [r"dataset 1 .*\b40\b.*\b60\b", r"dataset 2 .*\b60\b.*\b40\b"],
        ("--data-path", one): [r"\bdatasets\b.*\b2\b", r"\bsource\b.* [0-9a-f]{16}\b"],
    }
    for words, messages in changes.items():
        refused = warm.run([*MODEL, *words, "--split", "1,0,0", "--eval-iters", 0, *saving(save)], tmp_path)
        assert refused.code == 4, refused.text
        assert all(re.search(f"training data: {message}", refused.text) for message in messages), refused.text
    write(one, 5)
    refused = warm.run([*MODEL, *blend, *saving(save)], tmp_path)
    assert refused.code == 4 and "dataset 1 " in refused.text, refused.text
    accepted = warm.run([*MODEL, *blend, *saving(save), "--accept-data-change"], tmp_path)
    said = "dataset 1 .*--accept-data-change"
    assert accepted.code == 0 and re.search(said, accepted.text), accepted.text
    assert re.search(said, (save / "run" / "log.txt").read_text())


def test_phases_with_data_of_their_own(warm: WarmProcess, tmp_path: Path, sources: tuple[Path, Path]) -> None:
    """Two phases of 4 steps: the second goes on with the weights and the schedule, on the data that it names."""
    one, other = sources
    save, common = tmp_path / "c", ["--split", "1,0,0", "--eval-iters", 0, *saving(tmp_path / "c")]
    phases = ["--phase-transition-iterations", "4"]
    first = warm.run([*MODEL, "--data-path", one, *common, *phases], tmp_path)
    assert first.code == 0 and "[exiting program at iteration 4] datetime" in first.text, first.text
    refused = warm.run([*MODEL, "--data-path", other, *common], tmp_path)
    assert refused.code == 4 and re.search(r"training data: sequences .*\b40\b.*\b60\b", refused.text), refused.text
    second = warm.run([*MODEL, "--data-path", other, *common, *phases], tmp_path)
    assert second.code == 0 and "train:      16" in second.text, second.text
    assert [step["iteration"] for step in steps_of(save)] == list(range(1, 9))
    # In the middle of a phase its data is that of the checkpoint.
    again = warm.run([*MODEL, "--data-path", one, *common, *phases, "--train-iters", 12], tmp_path)
    assert again.code == 4 and re.search(r"training data: sequences .*\b60\b.*\b40\b", again.text), again.text


def test_ranks_with_different_data_are_refused(warm: WarmProcess, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, scale in zip(folders, (1, 7), strict=True):
        folder.mkdir()
        write(folder / "one", 1)
        write(folder / "other", scale)
    command = [*MODEL, "--data-path", "one", "other", "--split", "1,0,0", "--eval-iters", 0]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        warm.start(command, folder, **place, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, folder in enumerate(folders)
    ]
    ranks = [one.finish() for one in running]
    assert all(one.code != 0 for one in ranks)
    assert any("data dataset 2" in one.text for one in ranks), ranks[0].text


def test_whole_validation_sets_one_by_one(warm: WarmProcess, tmp_path: Path, sources: tuple[Path, Path]) -> None:
    """Every layout and batch size sees each sample of each set once: without training the losses are the same."""
    one, other = sources
    data = ["--train-data-path", one, "--valid-data-path", one, other, "--full-validation", "--eval-interval", 4]
    sets = ["--multiple-validation-sets", "--validation-set-names", "short", "long", "--lr", 0, "--eval-iters", 0]
    losses = []
    for number, batches in ((1, "1 4"), (2, "3 12")):
        micro, whole = batches.split()
        sizes = ["--micro-batch-size", micro, "--global-batch-size", whole]
        first, *_ = warm.run_ranks(number, [*MODEL, *data, *sets, *sizes], tmp_path)
        assert first.code == 0, first.text
        found = re.findall(r"validation loss at iteration (\d+) on (\S+) set \| lm loss value: (\S+)", first.text)
        expected = [(step, name) for step in "488" for name in ("validation-short", "validation-long")]
        assert [(step, name) for step, name, _ in found] == expected
        losses.append([float(loss) for _, _, loss in found])
        assert losses[-1][0] != losses[-1][1]
    for other_losses in losses:
        assert other_losses == pytest.approx(losses[0], rel=2e-6)
        assert other_losses[:2] * 3 == other_losses
