"""Architecture of a checkpoint, and the configuration of the ranks that will load it, before tensors are read."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.checkpoint import DirectoryStore, split_path
from megalith.checkpoint.sources.source import damaged
from megalith.checkpoint.store.store import nothing_in
from megalith.config import ModelConfig, RunConfig, all_settings, from_values
from megalith.config.families import Objective
from megalith.config.from_args import model_from_args
from megalith.errors import CheckpointError, ConfigError, NewerFormatError, OtherModelError
from megalith.registry import EMPTY, Registry


def saved_args(checkpoint: Path, iteration: int | None = None) -> Mapping[str, Any]:
    """Return Megatron's arguments from a checkpoint: the given one, or the newest readable one.

    `checkpoint` is a save folder, one checkpoint in it, or a Hugging Face folder.

    Raises:
        CheckpointError: there is none.
    """
    folder, wanted = split_path(checkpoint, iteration)
    store = DirectoryStore(folder)
    there = store.iterations()
    if not there:
        raise CheckpointError(nothing_in(checkpoint))
    if wanted is not None and wanted not in there:
        raise CheckpointError(f"{folder} holds no iteration {wanted}; it holds {', '.join(map(str, there))}")
    candidates = [wanted] if wanted is not None else there[::-1]
    for number in candidates:
        try:
            return vars(store.common(number).get("args", Namespace()))
        except (NewerFormatError, OtherModelError):
            raise
        except CheckpointError as error:
            if number == candidates[-1]:
                raise damaged(store.folder(number), [str(error)]) from error
    raise AssertionError("the last candidate has returned or raised")


def model_in(args: Mapping[str, Any], checkpoint: Path, registry: Registry = EMPTY) -> ModelConfig:
    """Return the architecture that a checkpoint's arguments describe.

    Raises:
        CheckpointError: arguments are missing, or the architecture is not implemented.
    """
    try:
        return model_from_args(args, registry)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint}: its args have no {error}, so that its model cannot be known") from error


WHAT_WORKS: Mapping[Objective, str] = {
    "masked": "it does not continue text: megalith generate --prompt fills in its [MASK], and megalith "
    "evaluate --task masked measures it",
    "spans": "it does not continue text, it answers one: megalith serve and megalith generate write its answers, and "
    "megalith evaluate --task spans measures it",
}
"""Objective of models that do not continue text -> commands that work with them."""


def require_text_model(model: ModelConfig, checkpoint: Path | str, wanted: str, *, or_answers: bool = False) -> None:
    """Raise ConfigError unless the model continues text, or with `or_answers` generates any text."""
    if model.family.generates if or_answers else model.family.objective == "causal":
        return
    needed = "writes text, a GPT or a T5" if or_answers else "continues text, a GPT"
    raise ConfigError(
        f"{wanted} needs a model that {needed}, and {checkpoint} holds a {model.title}; "
        f"{WHAT_WORKS[model.family.objective]}"
    )


def ranks_of(model: ModelConfig, settings: Mapping[str, Any], environ: Mapping[str, str]) -> RunConfig:
    """Build the configuration for `assemble.ranks.join_ranks`; `settings` are layout and device.

    Inference does not require an even division of layers (`assemble.trained`); the number of layers is rounded up to
    satisfy training's rule.

    Raises:
        ConfigError: model or processes do not divide by these sizes.
    """
    of_training = {"micro_batch_size": 1, "train_iters": 1, "lr": 0.0, "data_path": ("none",)}
    no_tokenizer: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 1}
    if model.family.objective != "causal":
        no_tokenizer = {"tokenizer_type": "BertWordPieceCase", "vocab_file": "none", "vocab_extra_ids": 1}
    if model.family.encoder_decoder:
        of_training["decoder_seq_length"] = 1
    layers, stages = model.num_layers, settings.get("pipeline_model_parallel_size", 1)
    unit = max(1, stages)
    known = all_settings()  # a library object may have settings without a flag
    values = {
        **{name: value for name, value in dataclasses.asdict(model).items() if name in known},
        "lora_rank": None,  # adapters are merged when they are loaded
        "mtp_num_layers": None,
        "fp32_residual_connection": False,  # of half precision, and weights may be loaded in fp32
        "num_layers": -(-layers // unit) * unit,
        **{"moe_layer_freq": "1", "no_rope_freq": None, "window_attn_skip_freq": None},  # lists of all layers
        "seq_length": model.max_position_embeddings,
        **of_training,
        **no_tokenizer,
        **settings,
    }
    rule = (
        f"--pipeline-model-parallel-size {stages} is more than the {layers} layers of the model; give {layers} or less"
    )
    problems = [rule] if stages > layers else []
    try:
        run = from_values(values, environ=environ, files=False)
    except ConfigError as error:
        raise ConfigError([*problems, *error.violations]) from error
    if problems:
        raise ConfigError(problems)
    return run
