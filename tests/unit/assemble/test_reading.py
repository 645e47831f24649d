"""Ranks that read a trained model."""

from __future__ import annotations

from typing import Any

import pytest

from megalith.assemble.reading import ranks_of
from megalith.config import ModelConfig
from megalith.errors import ConfigError

MODEL = ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=4, max_position_embeddings=16)


def _started(processes: int) -> dict[str, str]:
    place = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 6000}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_layers_need_not_divide_over_stages(stages: int) -> None:
    run = ranks_of(MODEL, {"pipeline_model_parallel_size": stages}, _started(stages))
    assert run.layout.pp == stages and run.layout.world_size == stages


def test_more_stages_than_layers_and_what_else_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        ranks_of(MODEL, {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 3}, _started(12))
    text = str(caught.value)
    assert "--pipeline-model-parallel-size 4" in text
    assert "--num-attention-heads 4" in text and "--tensor-model-parallel-size 3" in text


@pytest.mark.parametrize(
    "trained",
    [
        {"fp32_residual_connection": True},
        {"num_experts": 4, "moe_layer_freq": "[0,1,1]"},
        {"position_embedding_type": "rope", "no_rope_freq": "[0,1,1]"},
        {"window_size": "4,0", "window_attn_skip_freq": "[0,1,1]"},
        {"mtp_num_layers": 1},
    ],
    ids=str,
)
def test_rules_of_training_do_not_hold_for_reading_in_fp32_or_uneven_stages(trained: dict[str, Any]) -> None:
    model = ModelConfig(3, 16, 4, 32, **trained)
    assert ranks_of(model, {"pipeline_model_parallel_size": 2}, _started(2)).layout.pp == 2
