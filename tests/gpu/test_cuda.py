"""The same code on a CUDA device: numbers, precisions, and the whole command with a resume."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer
from megalith.train.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def _losses(device: str, precision: PrecisionConfig, config: ModelConfig = CONFIG, steps: int = 5) -> list[float]:
    model = GPT(config, 128, dtype=getattr(torch, precision.params_dtype), device=device)
    initialise(model, 3)
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    tokens = torch.randint(0, 128, (4, 65), generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        (loss * optimizer.loss_scale).backward()
        optimizer.step(1e-3, 0.1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_steps_equal_those_of_the_cpu(style: str) -> None:
    llama = dataclasses.replace(
        CONFIG, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
    )
    config = llama if style == "llama" else CONFIG
    precision = PrecisionConfig()
    assert _losses("cuda", precision, config) == pytest.approx(_losses("cpu", precision, config), rel=1e-4)


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(bf16=True), PrecisionConfig(fp16=True, initial_loss_scale=65536.0)],
    ids=["bf16", "fp16"],
)
def test_half_precision_follows_fp32(precision: PrecisionConfig) -> None:
    assert _losses("cuda", precision) == pytest.approx(_losses("cuda", PrecisionConfig()), rel=5e-3)


@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_a_resumed_run_repeats_the_uninterrupted_one(repository: Path, tmp_path: Path, precision: str) -> None:
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 511 --eval-iters 0 --log-interval 1 --save-interval 4 --train-iters 8 {precision}"
    ).split(" ")

    def train(folder: str, *extra: str) -> list[float]:
        command = [
            sys.executable,
            str(repository / "pretrain_gpt.py"),
            *flags,
            "--save",
            folder,
            "--load",
            folder,
            *extra,
        ]
        subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        records = read_metrics(tmp_path / folder / "run" / "metrics.jsonl")
        return [record["loss"] for record in records if record["event"] == "step"]

    whole = train("whole")
    train("halves", "--exit-interval", "4")
    assert train("halves") == whole
