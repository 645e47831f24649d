"""The core as a library: build a small GPT, train it on mock data, save it and load it again. No globals, no flags.

python examples/simple_train_loop.py
"""

from __future__ import annotations

import tempfile

import torch

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.formats.torch_dist import model_chunks
from megalith.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.data.build import build_gpt_datasets
from megalith.data.loader import BatchLoader
from megalith.distributed.rng import RandomStreams
from megalith.models.gpt import GPT, named_placements
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer
from megalith.schedules.learning_rate import LearningRateSchedule
from megalith.schedules.parameters import ParameterSchedule
from megalith.schedules.weight_decay import WeightDecaySchedule
from megalith.tokenizers.null import NullTokenizer
from megalith.train.state import TrainState
from megalith.train.step import train_step

SEED, SEQUENCE, BATCH, STEPS = 123, 64, 8, 5


def build_model() -> GPT:
    config = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, max_position_embeddings=SEQUENCE)
    model = GPT(config, vocab_size=100)
    initialise(model, SEED)
    return model


def build_loader() -> BatchLoader:
    data = DataConfig(mock_data=True, seq_length=SEQUENCE)
    datasets = build_gpt_datasets(data, NullTokenizer(99), sizes=(1000, None, None), seed=SEED)
    assert datasets.train is not None
    return BatchLoader(datasets.train, micro_batch_size=BATCH, consumed_samples=0, num_workers=0)


def train(model: GPT) -> None:
    total = STEPS * BATCH
    schedule = ParameterSchedule(
        LearningRateSchedule(0.001, 0.001, total, "constant"), WeightDecaySchedule(0, 0, total)
    )
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    state = TrainState((model,), optimizer, RandomStreams(SEED), schedule)
    loader = build_loader()
    for _ in range(STEPS):
        result = train_step(state, loader, num_micro_batches=1)
        print(f"step {result.iteration}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")


def content_of(model: GPT) -> CheckpointContent:
    return CheckpointContent(chunks=model_chunks(named_placements(model), model.config.num_layers))


def main() -> None:
    model = build_model()
    train(model)
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        store.save(STEPS, content_of(model), {"example": "simple_train_loop"})
        copy = build_model()
        store.load(STEPS, content_of(copy))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    print(f"saved and loaded: {'every weight is equal' if same else 'the weights differ'}")


if __name__ == "__main__":
    main()
