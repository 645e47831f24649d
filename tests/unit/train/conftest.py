"""A model of a few thousand weights and made-up batches: enough to train on in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed.rng import RandomStreams
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule
from megalith.train.loop import LoopConfig
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch

VOCABULARY, SEQUENCE, MICRO_BATCH = 64, 16, 2


def make_state(
    precision: PrecisionConfig | None = None, dtype: torch.dtype = torch.float32, dropout: float = 0.1
) -> TrainState:
    precision = precision or PrecisionConfig()
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=SEQUENCE,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    streams = RandomStreams(1234)
    model = GPT(config, VOCABULARY, dtype=dtype)
    initialise(model, 1234)
    schedule = ParameterSchedule(
        LearningRateSchedule(1e-3, 1e-4, 400, "cosine", 12), WeightDecaySchedule(0.1, 0.1, 400, "constant")
    )
    return TrainState((model,), build_optimizer(model, OptimizerConfig(), precision), streams, schedule)


def batches(seed: int = 0, masked: bool = False) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
        mask = torch.ones(MICRO_BATCH, SEQUENCE)
        if masked:
            mask = (torch.rand(MICRO_BATCH, SEQUENCE, generator=generator) < 0.5).float()
        positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions}


@pytest.fixture
def make_loop_config() -> Callable[..., LoopConfig]:
    def make(**changes: object) -> LoopConfig:
        values: dict[str, object] = {
            "train_iterations": 6,
            "global_batch_size": 2 * MICRO_BATCH,
            "num_micro_batches": 2,
            "log_interval": 2,
            "eval_interval": 3,
            "eval_iterations": 2,
            "flops_per_step": 1e6,
            "measured_peak_flops_per_s": 1e12,
        }
        return LoopConfig(**(values | changes))  # type: ignore[arg-type]

    return make
