"""What other ranks hold of a stage's parameters, without any process."""

from __future__ import annotations

import torch

from megalith.config import ModelConfig
from megalith.distributed.context import Axis, ParallelContext
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.language_model import Stage
from megalith.optim.build import replicated_rows_of
from megalith.parallel.data import ReplicatedRows
from megalith.parallel.tensor import SequenceParallel, TensorParallel

CONFIG = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=4,
    max_position_embeddings=8,
    group_query_attention=True,
    num_query_groups=1,
)
TP = Axis("tp", (2, 3), 1)
ENDS = Axis("ends", (1, 3), 1)


def _replicated_rows(
    region: TensorParallel, stage: Stage, ends: Axis | None = None
) -> dict[str, tuple[ReplicatedRows, ...]]:
    solo = ParallelContext.solo()
    context = ParallelContext(Layout(tp=2, pp=2), 3, solo.device, {**solo.axes, frozenset(("tp",)): TP}, ends)
    return replicated_rows_of([GPT(CONFIG, 16, region=region, stage=stage, device=torch.device("meta"))], context)


def test_replicated_parameters_are_parts_under_sequence_parallelism_only() -> None:
    for region, partial in ((TensorParallel(TP), False), (SequenceParallel(TP), True)):
        table = _replicated_rows(region, Stage(range(1)))
        wanted = (ReplicatedRows(TP, is_first_replica=False, partial=partial),)
        assert table["decoder.layers.0.input_layernorm.weight"] == wanted
        assert table["embedding.position_embeddings.weight"] == wanted
        assert table["decoder.layers.0.mlp.linear_fc2.bias"] == wanted
        assert "decoder.layers.0.mlp.linear_fc2.weight" not in table
        assert "embedding.word_embeddings.weight" not in table


def test_shared_key_and_value_heads_are_always_parts() -> None:
    queries, keys = 4, 4  # rows: two heads of size 2; the key and the value head
    table = _replicated_rows(TensorParallel(TP), Stage(range(1)))
    for name in ("weight", "bias"):
        wanted = (
            ReplicatedRows(
                TP, rows=(queries, queries + keys), shard_index=0, num_shards=1, is_first_replica=False, partial=True
            ),
        )
        assert table[f"decoder.layers.0.self_attention.linear_qkv.{name}"] == wanted


def test_a_last_stage_without_layers() -> None:
    table = _replicated_rows(SequenceParallel(TP), Stage(range(1, 1), is_first=False), ENDS)
    assert table == {
        "decoder.final_layernorm.weight": (ReplicatedRows(TP, is_first_replica=False, partial=True),),
        "decoder.final_layernorm.bias": (ReplicatedRows(TP, is_first_replica=False, partial=True),),
        "output_layer.weight": (ReplicatedRows(ENDS, is_first_replica=False, partial=True),),
    }
