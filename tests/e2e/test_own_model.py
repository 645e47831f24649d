"""A registered model trains alike in every layout that it has, resumes bit for bit, and is refused in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''
import torch
from torch import nn
from megalith.api import GPT, Linear, Replicated, register_model


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(size), nn.GRU(size, size, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.mix(self.norm(x))[0])


@register_model("recurrent")
class Recurrent(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        size = config.hidden_size
        self.table, self.head = nn.Embedding(vocab_size, size), nn.Linear(size, vocab_size, bias=False)
        self.gain = nn.Parameter(torch.randn(size))
        nn.init.normal_(self.table.weight, std=0.02)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(Layer(size) for _ in range(config.num_layers))

    def forward(self, tokens):
        x = self.table(tokens) * self.gain
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@register_model("recurrent-without-dropout")
class WithoutDropout(Recurrent):
    def __init__(self, config, vocab_size):
        super().__init__(config, vocab_size)
        for layer in self.layers:
            layer.drop = nn.Identity()


@register_model("extended")
class Extended(GPT):
    """A GPT whose last hidden states go through one more layer."""

    def __init__(self, config, vocab_size, **parts):
        super().__init__(config, vocab_size, **parts)
        self.extra = None
        if self.stage.is_last:
            self.extra = Linear(config.hidden_size, config.hidden_size, Replicated(), bias=False, **self.factory)

    def head_input(self, states):
        states = super().head_input(states)
        return states + self.extra(states)
'''
WORDS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --eval-iters 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 2 --import own_models
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1"""

AGAIN = """--import own_models --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant
    --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_models.py").write_text(MODULE)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megalith", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


def losses(folder: Path, name: str, model: str, *words: str) -> list[float]:
    done = run(folder, "train", *WORDS.split(), "--model", model, "--save", name, "--save-interval", "2", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [json.loads(line) for line in (folder / name / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


def test_every_layout_of_a_plain_module_gives_the_losses_of_one_process(folder: Path) -> None:
    alone = losses(folder, "alone", "recurrent-without-dropout")
    assert len(alone) == 4 and alone[-1] < alone[0]
    for name, words in {
        "replicas": ["--nproc", "2"],
        "zero1": ["--nproc", "2", "--use-distributed-optimizer"],
        "fsdp": ["--nproc", "2", "--use-torch-fsdp2"],
        "bf16": ["--nproc", "2", "--use-torch-fsdp2", "--bf16"],
    }.items():
        found = losses(folder, name, "recurrent-without-dropout", *words)
        assert found == pytest.approx(alone, rel=2e-2 if name == "bf16" else 1e-5), name
    for name in ("zero1", "fsdp"):
        rest = losses(folder, f"{name}-alone", "recurrent-without-dropout", "--load", name, "--ckpt-step", "2")
        assert rest == pytest.approx(alone[2:], rel=1e-5), name


def test_a_plain_module_with_dropout_resumes_bit_for_bit_and_generates(folder: Path) -> None:
    whole = losses(folder, "whole", "recurrent")
    assert losses(folder, "rest", "recurrent", "--load", "whole", "--ckpt-step", "2") == whole[2:]
    same = run(folder, "checkpoint", "diff", "whole", "rest")
    assert same.returncode == 0, same.stdout + same.stderr
    answer = run(folder, "generate", "whole", "--import", "own_models", "--prompt", "1 2 3", "--max-new-tokens", "4")
    assert answer.returncode == 0 and answer.stdout.startswith("1 2 3 ")
    without = run(folder, "generate", "whole", "--prompt", "1 2 3")
    assert without.returncode == 4 and "--import own_models" in without.stderr
    (folder / "text.txt").write_text(" ".join(str(number % 30) for number in range(100)))
    words = ("whole", "--import", "own_models", "--task", "text", "--data", "text.txt", "--json", "scored.json")
    scored = run(folder, "evaluate", *words)
    assert scored.returncode == 0, scored.stderr
    again = run(folder, "train", "--use-checkpoint-args", *AGAIN.split(), "--load", "whole", "--train-iters", "5")
    assert again.returncode == 0, again.stderr


def test_a_plain_module_is_refused_by_name_over_tensor_parallel_ranks(folder: Path) -> None:
    done = run(
        folder, "train", *WORDS.split(), "--model", "recurrent", "--nproc", "2", "--tensor-model-parallel-size", "2"
    )
    assert done.returncode == 2
    said = done.stderr + done.stdout
    assert "--tensor-model-parallel-size" in said and "model.layers.1.mix.weight_ih_l0" in said


def test_a_subclass_of_ours_has_every_layout(folder: Path) -> None:
    alone = losses(folder, "alone", "extended")
    for name, words in {
        "tp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        "pp": ["--pipeline-model-parallel-size", "2"],
        "cp": ["--context-parallel-size", "2"],
        "zero1": ["--use-distributed-optimizer"],
    }.items():
        assert losses(folder, name, "extended", "--nproc", "2", *words) == pytest.approx(alone, rel=1e-5), name
    rest = losses(folder, "rest", "extended", "--load", "tp", "--ckpt-step", "2")
    assert rest == pytest.approx(alone[2:], rel=1e-5)
