"""Runs on several ranks as a user has them: bit-exact resumes, kills, signals, and Megatron's commands as typed.

The ranks are real processes in the environment that torchrun gives them; torchrun itself starts where its own conduct
matters.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.train.faults import POINTS
from megalith.train.metrics import read_metrics

from . import small_run
from .checkpoints import assert_same, curve_of, state_of
from .test_signals import stopped_at
from .warm import Finished, Running, WarmProcess, free_port

TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
ZERO, FP16 = "--use-distributed-optimizer", "--fp16 --initial-loss-scale 16777216 --loss-scale-window 3"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def model(shared: Path, folder: Path) -> list[object]:
    """A GPT of four layers on Shakespeare, the indices of the data kept in the folder."""
    return [
        *("--num-layers", 4, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 16),
        *("--max-position-embeddings", 16, "--micro-batch-size", 1, "--global-batch-size", 4, "--num-workers", 1),
        *("--lr", 1e-2, "--lr-decay-style", "cosine", "--min-lr", 1e-3, "--lr-warmup-iters", 2, "--weight-decay", 0.1),
        *(*ready_text(shared, folder), "--eval-iters", 1, "--log-interval", 1),
        *("--make-vocab-size-divisible-by", 8, "--distributed-backend", "gloo", "--device", "cpu"),
    ]


@pytest.fixture(scope="module")
def words(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return model(shared, tmp_path_factory.mktemp("data"))


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
ALWAYS = ("dp2-zero1-bf16", "tp2-sp-fp16", "cp2", "tp2-pp2")


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


def test_a_layout_of_stages_changes_no_bit(warm: WarmProcess, tmp_path: Path, words: list[object]) -> None:
    """`--pipeline-model-parallel-layout` with stages without layers, micro-batches in groups of four and two.

    Without dropout, whose random numbers are those of a stage, and clipping, as the norm is summed stage by stage.
    """
    common = [*words, *PP2.split(), "--train-iters", 3, "--global-batch-size", 6, "--save-interval", 3]
    common += ["--clip-grad", 0, "--hidden-dropout", 0, "--attention-dropout", 0]
    text_of(warm.run_ranks(2, [*common, *saving(tmp_path / "even")], tmp_path))
    own = ["--pipeline-model-parallel-layout", "E|t*3|t|L", "--microbatch-group-size-per-virtual-pipeline-stage", 4]
    text_of(warm.run_ranks(2, [*common, *own, *saving(tmp_path / "own")], tmp_path))
    assert_same(state_of(tmp_path / "even", 3), state_of(tmp_path / "own", 3))


def test_stages_without_layers_are_saved_resumed_and_converted(
    warm: WarmProcess, tmp_path: Path, words: list[object]
) -> None:
    """Predictions in a stage of their own are computed and saved with the loss, in files of each rank too."""
    common = [*words, "--position-embedding-type", "rope", "--mtp-num-layers", 1, "--train-iters", 4]
    common += ["--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "Et|ttt|m|L"]
    common += ["--ckpt-format", "torch", "--save-interval", 2, "--hidden-dropout", 0, "--attention-dropout", 0]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    text_of(warm.run_ranks(2, [*common, *saving(whole)], tmp_path))
    text_of(warm.run_ranks(2, [*common, *saving(halves), "--exit-interval", 2], tmp_path))
    text_of(warm.run_ranks(2, [*common, *saving(halves)], tmp_path))
    assert curve_of(whole) == curve_of(halves) and len(curve_of(whole)) == 4
    for stages in ([], ["--pp", 1]):
        target = tmp_path / f"converted{len(stages)}"
        done = warm.run(["convert", whole, target, *stages], tmp_path, command="checkpoint")
        assert done.code == 0, done.text
    loaded = [*common[: common.index("--pipeline-model-parallel-layout")], "--load", whole, "--no-load-optim"]
    done_ranks = warm.run_ranks(2, [*loaded, "--use-mp-args-from-checkpoint-args", "--finetune"], tmp_path)
    text_of(done_ranks)


@pytest.mark.full
def test_fsdp2_shards_a_layout_of_stages(warm: WarmProcess, tmp_path: Path, words: list[object]) -> None:
    """A chunk without parameters has nothing to shard."""
    common = [*words, "--train-iters", 3, "--save-interval", 3, "--global-batch-size", 8]
    common += ["--hidden-dropout", 0, "--attention-dropout", 0]
    layout = [*PP2.split(), "--pipeline-model-parallel-layout", "Ett|t||tL"]
    text_of(warm.run_ranks(4, [*common, *layout, "--use-torch-fsdp2", *saving(tmp_path / "sharded")], tmp_path))
    text_of(warm.run_ranks(1, [*common, *saving(tmp_path / "alone")], tmp_path))
    curves = [[step[1] for step in curve_of(tmp_path / name)] for name in ("sharded", "alone")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


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
    *(("tp2", "mid_save", 1), ("dp2-zero1", "pre_commit", 0), ("dp2-zero1", "opt", 1)),
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
    assert iteration == 0 or DirectoryStore(save).verify(iteration) == []  # nothing is saved before the first step
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
    assert f"{number.name}: " in finished[rank].text
    assert f"[exiting program after receiving {number.name}.] datetime: " in finished[0].text
    assert f"iteration {iteration:8d}/" in finished[0].text and f"iteration {iteration + 1:8d}/" not in finished[0].text


@pytest.mark.parametrize(
    ("moment", "needle", "earliest", "latest"),
    [
        ("start-up", "building GPT model", 0, 0),
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


# Errors: what one rank or all ranks cannot do is said once, and all end with its code.


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ("--lr 1e30", 1, "megalith train: the loss is nan at iteration "),
        pytest.param(
            *("--save /proc/x --save-interval 1", 2, "--save /proc/x: not writable: No such file or directory"),
            marks=pytest.mark.full,  # other ranks wait for the first one to speak of a configuration
        ),
        ("--split 99.9,0.1,0", 3, "the valid split of "),
        ("--load nowhere --exit-on-missing-checkpoint", 4, "--load nowhere holds no checkpoint"),
    ],
)
def test_an_error_is_said_once_and_ends_all_ranks_with_its_code(
    warm: WarmProcess, tmp_path: Path, words: list[object], more: str, code: int, message: str
) -> None:
    finished = warm.run_ranks(2, [*words, *TP2.split(), "--train-iters", 4, *more.split()], tmp_path)
    together = "\n".join(one.text for one in finished)
    assert [one.code for one in finished] == [code, code], together
    assert together.count(message) == 1 and "Traceback" not in together, together


# Megatron's command lines for two and four processes as users type them; sizes, steps and rate fit a small machine.

AS_TYPED = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-backend auto --train-iters {steps} --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std 0.006 --clip-grad 1.0 --lr 0.003 --lr-decay-style cosine --min-lr 0.00001 "
    "--lr-warmup-fraction .01 --log-interval 10 --save-interval 10 --eval-interval 50 --eval-iters 5 "
    "--distributed-backend nccl --device cpu"
)
LAYOUTS = {
    "tp2": (2, f"{TP2} --pipeline-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 16"),
    "tp2-pp2": (4, f"{TP2} {PP2} --micro-batch-size 2 --global-batch-size 16 --tensorboard-dir T"),
    "dp4": (4, "--attention-softmax-in-fp32 --micro-batch-size 4 --global-batch-size 32"),
}
STEPS = {"a small vocabulary": 24, "GPT-2's vocabulary": 40}
CASES = [
    ("a small vocabulary", "tp2"),
    *(pytest.param("GPT-2's vocabulary", case, marks=pytest.mark.full) for case in LAYOUTS),
]


@pytest.fixture(scope="module")
def texts(repository: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[object]]:
    """The flags of some of Shakespeare's text; with GPT-2's tokenizer it is prepared as a user would."""
    prepared: dict[str, list[object]] = {}

    def flags(kind: str) -> list[object]:
        if kind not in prepared:
            folder = tmp_path_factory.mktemp("text")
            small = kind == "a small vocabulary"
            prepared[kind] = ready_text(shared, folder) if small else prepare_text(repository, shared, folder)
        return prepared[kind]

    return flags


def ready_text(shared: Path, folder: Path) -> list[object]:
    data = shared / "golden/train/data"
    return [
        *("--data-path", data / "shakes_text_document", "--data-cache-path", folder / "cache"),
        *("--vocab-file", data / "vocab.json", "--merge-file", data / "merges.txt", "--split", "90,5,5"),
    ]


def prepare_text(repository: Path, shared: Path, folder: Path) -> list[object]:
    speeches = (shared / "data/tinyshakespeare/input.txt").read_text().split("\n\n")
    (folder / "plays.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in speeches))
    gpt2 = shared / "data/gpt2"
    files = ["--vocab-file", gpt2 / "gpt2-vocab.json", "--merge-file", gpt2 / "gpt2-merges.txt"]
    subprocess.run(
        [
            *(sys.executable, repository / "tools/preprocess_data.py", "--input", folder / "plays.jsonl"),
            *("--output-prefix", folder / "plays", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod", *files),
        ],
        check=True,
        capture_output=True,
    )
    return [*files, "--data-path", folder / "plays_text_document", "--split", "949,50,1"]


def losses(save: Path) -> dict[int, float]:
    """Iteration -> loss, of the steps that were not skipped."""
    records = [record for record in read_metrics(save / "run/metrics.jsonl") if record["event"] == "step"]
    return {record["iteration"]: record["loss"] for record in records if record["applied"]}


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_megatron_commands_as_typed_under_torchrun(
    repository: Path,
    warm: WarmProcess,
    tmp_path: Path,
    texts: Callable[[str], list[object]],
    kind: str,
    case: str,
) -> None:
    """In fp16 and with dropout: it runs, learns as one process does, saves and resumes."""
    (number, layout), steps = LAYOUTS[case], STEPS[kind]
    save = tmp_path / "c"
    words = [*AS_TYPED.format(steps=steps).split(), "--fp16", *texts(kind)]
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", number, "--nnodes", 1),
        *("--master_addr", "localhost", "--master_port", free_port(), repository / "pretrain_gpt.py"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    first = subprocess.run(
        [str(word) for word in (*launcher, *words, *layout.split(), *saving(save), "--exit-interval", steps // 2)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "--distributed-backend nccl becomes gloo" in first.stdout and "Traceback" not in first.stderr
    assert f"[exiting program at iteration {steps // 2}] datetime" in first.stdout
    second = text_of(warm.run_ranks(number, [*words, *layout.split(), *saving(save)], tmp_path))
    assert f" loading distributed checkpoint from {save} at iteration {steps // 2}" in second
    text_of([warm.run([*words, *in_one_process(layout), "--save", tmp_path / "one"], tmp_path)])
    curve, alone = losses(save), losses(tmp_path / "one")
    # Which steps overflow at their loss scale depends on the dropout that each layout draws.
    assert abs(len(curve) - len(alone)) <= 3 and len(curve) >= steps - 18
    assert curve[steps] == pytest.approx(alone[steps], rel=0.01) and curve[steps] < 0.98 * curve[min(curve)], curve
    assert len(validations(second)) == 2 and len(re.findall(r"\btokens\b.* needs 33\b", second)) == (
        0 if "small" in kind else 1
    )
    assert len(list((tmp_path / "T").glob("events.out.tfevents.*"))) == (3 if case == "tp2-pp2" else 0)


def in_one_process(layout: str) -> list[str]:
    """The same flags without the sizes of the parallelism."""
    return re.sub(r"--\S+-parallel-size \d", "", layout).split()


EXACT = "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 64"


@pytest.mark.parametrize(
    ("kind", "case"),
    [*CASES[1:], pytest.param("a small vocabulary", "tp2-pp2", marks=pytest.mark.full), ("a small vocabulary", "dp4")],
)
def test_the_curve_of_those_commands_is_that_of_one_process(
    warm: WarmProcess, tmp_path: Path, texts: Callable[[str], list[object]], kind: str, case: str
) -> None:
    """Five digits in fp32, with dropout 0 and one padded vocabulary."""
    (number, layout), steps = LAYOUTS[case], STEPS[kind]
    words = [*AS_TYPED.format(steps=steps).split(), *EXACT.split(), *texts(kind)]
    text_of(warm.run_ranks(number, [*words, *layout.split(), "--save", tmp_path / "ranks"], tmp_path))
    text_of([warm.run([*words, *in_one_process(layout), "--save", tmp_path / "one"], tmp_path)])
    together, alone = losses(tmp_path / "ranks"), losses(tmp_path / "one")
    assert len(alone) == steps and alone[steps] < alone[1] - 0.3
    assert together == pytest.approx(alone, rel=1e-5)


def test_layouts_with_one_padded_vocabulary_have_the_same_losses(warm: WarmProcess, tmp_path: Path) -> None:
    """Every row counts in the loss, and 100 tokens have 128 rows in one process and 256 in two that share layers."""
    words = [*small_run.MODEL, "--data-path", small_run.write_text(tmp_path), "--device", "cpu"]
    words += ["--train-iters", 2, "--save-interval", 2]
    alone, wide, together = tmp_path / "alone", tmp_path / "wide", tmp_path / "together"
    told = text_of([warm.run([*words, *saving(alone)], tmp_path)])
    assert "--padded-vocab-size" not in told
    text_of([warm.run([*words, *saving(wide), "--padded-vocab-size", 256], tmp_path)])
    told = text_of(warm.run_ranks(2, [*words, *TP2.split(), *saving(together)], tmp_path))
    assert "--padded-vocab-size 256" in told
    assert losses(together) == pytest.approx(losses(wide), rel=1e-5)
    assert losses(together)[1] > losses(alone)[1] + 0.5
