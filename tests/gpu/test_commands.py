"""Whole commands: resume bit for bit in deterministic mode, saving beside the training, `--nproc 2`, serving."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megalith.checkpoint import DirectoryStore
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Request, Sampling

from ..e2e.checkpoints import assert_same, curve_of, state_of
from ..e2e.small_run import write_text
from ..unit.serve.models import STYLES as SERVED
from ..unit.serve.models import Letters, collect, full_forward, model_of, tokens_of
from .conftest import Command
from .small import MODEL, ON_GPU, ON_TWO_GPUS, PRECISIONS, STYLES, bf16_or_skip

TRAIN = (
    "--global-batch-size 4 --split 100,0,0 --eval-iters 0 --log-interval 1 --num-workers 0 --lr-warmup-iters 2 "
    "--lr-decay-iters 20"
)


def run_words(folder: Path, save: str, *more: object) -> list[object]:
    """Return the words of a run over a small dataset that saves and resumes in one folder."""
    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        write_text(folder)
    return [MODEL, TRAIN, "--data-path", prefix, "--save", save, "--load", save, *more]


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "fp16"),
        pytest.param("cpu", "bf16", marks=pytest.mark.full),
        *(pytest.param("cuda", precision, marks=ON_GPU) for precision in ("fp16", "bf16")),
    ],
    indirect=["device"],
)
def test_a_run_killed_in_an_asynchronous_save_is_resumed_bit_for_bit(
    command: Command, tmp_path: Path, device: str, precision: str
) -> None:
    """Beside an uninterrupted run that saves at once; dropout shows that the random streams continue."""
    bf16_or_skip(precision, device)
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1 --deterministic-mode"
    flags = f"{STYLES['llama']} {PRECISIONS[precision]} {dropout} --train-iters 8 --save-interval 3"
    command("train", *run_words(tmp_path, "whole", flags))
    saving = run_words(tmp_path, "parts", flags, "--async-save")
    command("train", *saving, code=-9, MEGALITH_FAULT="kill9@step=6,point=mid_save")
    assert DirectoryStore(tmp_path / "parts").newest_verified()[0] == 3
    command("train", *saving)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert len(curve_of(whole)) == 8 and curve_of(whole) == curve_of(parts)
    assert_same(state_of(whole, 8), state_of(parts, 8))


def test_attention_inside_documents_repeats_bit_for_bit(command: Command, tmp_path: Path, device: str) -> None:
    flags = "--reset-attention-mask --reset-position-ids --eod-mask-loss --deterministic-mode --train-iters 4"
    for name in ("first", "second"):
        command("train", *run_words(tmp_path, name, flags, "--save-interval", 4))
    assert_same(state_of(tmp_path / "first", 4), state_of(tmp_path / "second", 4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_TWO_GPUS)], indirect=True)
def test_two_ranks_continue_the_checkpoint_of_one(command: Command, tmp_path: Path) -> None:
    one = "--train-iters 3 --save-interval 3"
    command("train", *run_words(tmp_path, "c", one))
    two = "--train-iters 6 --save-interval 3 --nproc 2 --tensor-model-parallel-size 2"
    command("train", *run_words(tmp_path, "c", two))
    losses = [step[1] for step in curve_of(tmp_path / "c")]
    assert len(losses) == 6 and losses[-1] < losses[0]


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", SERVED)
def test_greedy_tokens_are_those_of_whole_passes_in_fp64(style: str, device: str) -> None:
    """The cache is cut into small blocks, prompts are read in chunks, and requests come while others are answered."""
    model = model_of(style)
    prompts = [tuple((start * 7 + i * 3) % 26 for i in range(1 + 3 * start)) for start in range(5)]
    wanted = [full_forward(model, prompt, 9)[0] for prompt in prompts]
    runner = ModelRunner(model.to(device), 60, 4)
    engine = Engine(runner, Letters(), Limits(max_num_batched_tokens=8, max_num_seqs=3))
    requests = [Request(prompt, 9, sampling=Sampling(temperature=0.0), stop_ids=()) for prompt in prompts]
    assert [tokens_of(events) for events in collect(engine, requests, (0, 1, 2, 0, 3))] == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sampled_tokens_in_half_precision_come_as_many_as_asked(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16:
        bf16_or_skip("bf16", device)
    engine = Engine(ModelRunner(model_of("llama", dtype).to(device), 60, 4), Letters())
    requests = [Request((1, 2, 3), 7, Sampling(temperature=1.0, top_p=0.9), seed=seed, stop_ids=()) for seed in (1, 2)]
    assert [len(tokens_of(events)) for events in collect(engine, requests)] == [7, 7]


@contextmanager
def serving(folder: Path, device: str, repository: Path) -> Iterator[str]:
    """Start `megalith serve` on a checkpoint; give its address."""
    program = [sys.executable, "-m", "megalith", "serve", str(folder), "--port", "0", "--device", device]
    path = os.pathsep.join([str(repository / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        said = list[str]()
        for line in process.stdout:
            said.append(line)
            if address := re.search(r"Running on (http://[\w.:]+)", line):
                yield address[1]
                return
        pytest.fail("".join(said))
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.skipif(
    not (find_spec("fastapi") and find_spec("uvicorn")), reason="the serve extra (fastapi, uvicorn) is not installed"
)
def test_a_server_answers_twice_alike(command: Command, tmp_path: Path, device: str, repository: Path) -> None:
    command("train", *run_words(tmp_path, "c", "--train-iters 2 --save-interval 2"))
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with serving(tmp_path / "c", device, repository) as address:
        asked = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answers = [json.load(urllib.request.urlopen(asked)) for _ in range(2)]
    assert answers[0]["usage"]["completion_tokens"] == 5
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
