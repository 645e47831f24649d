"""Runs on several ranks as a user has them: bit-exact resumes, kills, signals, and the walkthrough's commands.

The ranks are real processes in the environment that torchrun gives them; torchrun itself starts where its own conduct
matters.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.train.faults import POINTS

from .checkpoints import assert_same, curve_of, state_of
from .test_signals import stopped_at
from .warm import Finished, Running, WarmProcess

TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
ZERO, FP16 = "--use-distributed-optimizer", "--fp16 --initial-loss-scale 16777216 --loss-scale-window 3"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def model(repository: Path, folder: Path) -> list[object]:
    """A GPT of four layers on Shakespeare, the indices of the data kept in the folder."""
    data = repository / "tests/parity/fixtures/golden/train/data"
    return [
        *("--num-layers", 4, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 16),
        *("--max-position-embeddings", 16, "--micro-batch-size", 1, "--global-batch-size", 8, "--num-workers", 1),
        *("--lr", 1e-2, "--lr-decay-style", "cosine", "--min-lr", 1e-3, "--lr-warmup-iters", 2, "--weight-decay", 0.1),
        *("--data-path", data / "shakes_text_document", "--data-cache-path", folder / "cache", "--split", "90,10,0"),
        *("--vocab-file", data / "vocab.json", "--merge-file", data / "merges.txt", "--eval-iters", 1),
        *("--make-vocab-size-divisible-by", 8, "--log-interval", 1, "--distributed-backend", "gloo", "--device", "cpu"),
    ]


@pytest.fixture(scope="module")
def words(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return model(repository, tmp_path_factory.mktemp("data"))


def text_of(finished: list[Finished], codes: int = 0) -> str:
    """What the first rank printed; all ranks have ended alike, and the others had nothing to say."""
    assert [one.code for one in finished] == [codes] * len(finished), "\n".join(one.text for one in finished)
    assert [one.text for one in finished[1:] if one.text] == []
    return finished[0].text


def saving(save: Path) -> list[object]:
    return ["--save", save, "--load", save]


RESUMES = {
    "dp2": (2, f"{DROPOUT}"),
    "dp2-zero1-bf16": (2, f"{ZERO} --bf16 {DROPOUT}"),
    "tp2": (2, f"{TP2} {DROPOUT}"),
    "tp2-sp-fp16": (2, f"{TP2} --sequence-parallel {FP16} {DROPOUT}"),
    "pp2": (2, f"{PP2} {DROPOUT}"),
    "pp2-vpp2": (2, f"{VPP2} {DROPOUT}"),
    "cp2": (2, f"{CP2} {DROPOUT}"),
    "tp2-pp2": (4, f"{TP2} {PP2} {DROPOUT}"),
    "dp2-zero1": (2, f"{ZERO} {DROPOUT}"),
    "tp2-sp": (2, f"{TP2} --sequence-parallel {DROPOUT}"),
    "pp2-fp16": (2, f"{PP2} {FP16} {DROPOUT}"),
    "pp2-dp2-zero1-bf16": (4, f"{PP2} {ZERO} --bf16 {DROPOUT}"),
    "tp2-cp2-fp16": (4, f"{TP2} {CP2} {FP16} {DROPOUT}"),
    "tp2-dp2-zero1-fp16": (4, f"{TP2} {ZERO} {FP16} {DROPOUT}"),
}
ALWAYS = ("dp2-zero1-bf16", "tp2-sp-fp16", "pp2-vpp2", "cp2", "tp2-pp2")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.full) for case in RESUMES]
)
def test_twice_the_steps_are_steps_and_a_restart_and_steps(
    warm: WarmProcess, tmp_path: Path, words: list[object], case: str
) -> None:
    """F01: losses, norms, rates, every tensor of the checkpoint and every random state are the same bytes."""
    number, layout = RESUMES[case]
    common = [*words, *layout.split(), "--train-iters", 8, "--eval-interval", 3, "--save-interval", 8]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    straight = text_of(warm.run_ranks(number, [*common, *saving(whole)], tmp_path))
    first = text_of(warm.run_ranks(number, [*common, *saving(halves), "--exit-interval", 4], tmp_path))
    assert "[exiting program at iteration 4] datetime" in first
    second = text_of(warm.run_ranks(number, [*common, *saving(halves)], tmp_path))
    assert f" loading distributed checkpoint from {halves} at iteration 4" in second
    assert_same(state_of(whole, 8), state_of(halves, 8))
    assert len(curve_of(whole)) == 8 and curve_of(whole) == curve_of(halves)
    assert validations(straight) == validations(first) + validations(second)
    assert ("number of skipped iterations:   1" in straight) == ("fp16" in case)


def validations(text: str) -> list[str]:
    return re.findall(r"validation loss at iteration .*", text)


# Kills. The other rank is not left waiting: it ends by itself, and the same command goes on.

KILLS = {"tp2": f"{TP2} {DROPOUT}", "dp2-zero1": f"{ZERO} {DROPOUT}", "pp2-vpp2": f"{VPP2} {DROPOUT}"}
PLAN = ["--train-iters", 8, "--eval-interval", 4, "--save-interval", 3]


@pytest.fixture(scope="module")
def uninterrupted(
    warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory, words: list[object]
) -> Callable[[str], Path]:
    """The folder of a run of two ranks in a layout of `KILLS` that nothing befell."""
    folders: dict[str, Path] = {}

    def run(case: str) -> Path:
        if case not in folders:
            folder = folders[case] = tmp_path_factory.mktemp(case)
            text_of(warm.run_ranks(2, [*words, *KILLS[case].split(), *PLAN, *saving(folder)], folder))
        return folders[case]

    return run


SAMPLE = {
    *(("tp2", "mid_save", 1), ("tp2", "bwd", 0), ("dp2-zero1", "pre_commit", 0), ("dp2-zero1", "opt", 1)),
    *(("pp2-vpp2", "post_commit", 1), ("pp2-vpp2", "eval", 0)),
}


@pytest.mark.parametrize(
    ("case", "point", "rank"),
    [
        pytest.param(*place, marks=() if place in SAMPLE else pytest.mark.full)
        for place in itertools.product(KILLS, POINTS, (0, 1))
    ],
)
def test_a_rank_killed_at_any_point_costs_only_the_steps_since_the_last_save(
    warm: WarmProcess,
    tmp_path: Path,
    words: list[object],
    uninterrupted: Callable[[str], Path],
    case: str,
    point: str,
    rank: int,
) -> None:
    """F02, F03: no manual step, the previous checkpoint is chosen, the end is the same bytes."""
    save = tmp_path / "c"
    command = [*words, *KILLS[case].split(), *PLAN, *saving(save)]
    # Saves are at 3, 6 and 8, the evaluation at 4; a load happens at the iteration that was saved.
    step = {"eval": 4, "load": 3}.get(point, 6 if "save" in point or "commit" in point else 5)
    if point == "load":
        text_of(warm.run_ranks(2, [*command, "--exit-interval", 3], tmp_path))
    fault = f"kill9@step={step},point={point},rank={rank}"
    before = time.monotonic()
    ended = warm.run_ranks(2, command, tmp_path, MEGALITH_FAULT=fault)
    assert time.monotonic() - before < 60.0
    assert ended[rank].code == -9, ended[rank].text
    assert ended[1 - rank].code > 0 and f"rank {rank}" in ended[1 - rank].text, ended[1 - rank]
    resumed = text_of(warm.run_ranks(2, command, tmp_path))
    # Once every byte is written and rank 0 commits, the other rank is needed no more.
    last_saved = 6 if point == "post_commit" or (point, rank) == ("mid_commit", 1) else 3
    assert f" loading distributed checkpoint from {save} at iteration {last_saved}" in resumed
    assert_same(state_of(uninterrupted(case), 8), state_of(save, 8))
    assert curve_of(uninterrupted(case)) == curve_of(save)
    assert sorted(path.name for path in save.iterdir() if path.name.startswith(".")) == []


# Signals (F04). Whichever rank hears of it, all save the same step and leave with the same code.

ENDLESS = ["--train-iters", 100000, "--eval-interval", 100000, "--save-interval", 100000]


def finish(ranks: list[Running]) -> list[Finished]:
    return [running.finish() for running in ranks]


def step_saved(finished: list[Finished], save: Path) -> int:
    """The iteration that all ranks have saved before they left."""
    assert [one.code for one in finished] == [75] * len(finished), "\n".join(one.text for one in finished)
    iteration = stopped_at(finished[0], save)
    assert DirectoryStore(save).verify(iteration) == []
    return iteration


@pytest.mark.parametrize(
    ("layout", "number", "rank"),
    [
        (TP2, signal.SIGTERM, 1),
        (ZERO, signal.SIGINT, 0),
        (PP2, signal.SIGUSR1, 1),
        pytest.param(PP2, signal.SIGTERM, 0, marks=pytest.mark.full),
        pytest.param(CP2, signal.SIGINT, 1, marks=pytest.mark.full),
        pytest.param(TP2, signal.SIGUSR2, 0, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    warm: WarmProcess, tmp_path: Path, words: list[object], layout: str, number: signal.Signals, rank: int
) -> None:
    save = tmp_path / "c"
    ranks = warm.start_ranks(2, [*words, *layout.split(), *ENDLESS, *saving(save)], tmp_path)
    ranks[0].wait_for("iteration        5/")
    ranks[rank].send(number)
    finished = finish(ranks)
    iteration = step_saved(finished, save)
    assert f"{number.name}: finishing this step and saving" in finished[rank].text
    assert f"[exiting program after receiving {number.name}.] datetime: " in finished[0].text
    assert f"iteration {iteration:8d}/" in finished[0].text and f"iteration {iteration + 1:8d}/" not in finished[0].text


@pytest.mark.parametrize(
    ("moment", "needle", "earliest", "latest"),
    [
        ("start-up", "building GPT model", 0, 1),
        ("evaluation", "iteration        3/", 3, 3),
        ("save", "saving checkpoint at iteration       4", 4, 5),
    ],
)
def test_a_signal_to_one_rank_at_another_moment(
    warm: WarmProcess, tmp_path: Path, words: list[object], moment: str, needle: str, earliest: int, latest: int
) -> None:
    save = tmp_path / "c"
    command = [*words, *TP2.split(), "--train-iters", 40, "--save-interval", 4, *saving(save)]
    if moment == "evaluation":
        command += ["--eval-interval", 3, "--eval-iters", 2000]
    ranks = warm.start_ranks(2, command, tmp_path)
    ranks[0].wait_for(needle)
    ranks[1].send(signal.SIGTERM)
    finished = finish(ranks)
    assert earliest <= step_saved(finished, save) <= latest
    assert "validation loss" not in finished[0].text


@pytest.mark.parametrize("rank", [0, 1])
def test_the_second_signal_to_a_rank_ends_all_at_once(
    warm: WarmProcess, tmp_path: Path, words: list[object], rank: int
) -> None:
    # One step takes far longer than this test.
    command = [*words, *PP2.split(), "--train-iters", 4, "--global-batch-size", 20000]
    ranks = warm.start_ranks(2, command, tmp_path)
    ranks[0].wait_for("[before the start of training step]")
    time.sleep(0.5)
    ranks[rank].send(signal.SIGINT)
    ranks[rank].wait_for("SIGINT: finishing this step")
    before = time.monotonic()
    ranks[rank].send(signal.SIGINT)
    finished = finish(ranks)
    assert finished[rank].code == 130 and finished[1 - rank].code > 0
    assert time.monotonic() - before < 10.0
    assert "Traceback" not in finished[rank].text
