"""What the conversion tools say of the parts of a model."""

from __future__ import annotations

import torch

from megalith.checkpoint.content import Chunk
from megalith.compat.megatron.convert import Progress


def test_parts_of_bert_and_of_layers_that_stand_apart() -> None:
    said: list[str] = []
    progress = Progress(said.append)
    for key, place in (
        ("embedding.tokentype_embeddings.weight", 0),
        ("encoder.layers.mlp.linear_fc1.weight", 1),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0),
        ("encoder.final_layernorm.weight", 0),
        ("lm_head.dense.weight", 0),
    ):
        progress(Chunk(key, torch.empty(1, 1), (place, 0), (4, 1)))
    progress.finish()
    parts = ("embeddings", "transformer layer 1", "transformer layer 3", "final layernorm", "output layer")
    assert said == [f"{verb} {part}" for part in parts for verb in ("sending", "received")]
