"""What commands that take a trained model by its folder ask of it before torch computes anything."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config import RunConfig, from_values
from megalith.config.foreign_args import model_of
from megalith.config.groups import ModelConfig
from megalith.errors import CheckpointError


def saved_args(checkpoint: Path, iteration: int | None) -> Mapping[str, Any]:
    """Megatron's arguments in the checkpoint that is meant, or in the newest that can be read.

    Raises:
        CheckpointError: there is none.
    """
    from megalith.checkpoint import DirectoryStore, split_path

    folder, named = split_path(checkpoint)
    store = DirectoryStore(folder)
    wanted = named if iteration is None else iteration
    there = store.iterations()
    if not there:
        raise CheckpointError(f"{checkpoint} holds no checkpoint; give the folder that --save named")
    for number in [wanted] if wanted is not None else reversed(there):
        try:
            return vars(store.common(number).get("args", argparse.Namespace()))
        except CheckpointError:
            if number in (wanted, there[0]):
                raise
    raise AssertionError("the first iteration has returned or raised")


def saved_model(checkpoint: Path, args: Mapping[str, Any]) -> ModelConfig:
    """The architecture.

    Raises:
        CheckpointError: the arguments do not say it.
    """
    try:
        return model_of(args)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint}: its args have no {error}, so that its model is unknown") from error


def ranks_of(model: ModelConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The processes that share a model, checked against it.

    Args:
        settings: of the launch and the layout, by name.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    values = {
        **dataclasses.asdict(model),
        "seq_length": model.max_position_embeddings,
        "micro_batch_size": 1,
        "train_iters": 1,
        "lr": 0.0,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 1,
        **settings,
    }
    return from_values(values, environ=os.environ, files=False)
