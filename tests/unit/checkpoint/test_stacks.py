"""Checkpoints of a model with two stacks of layers: Megatron's keys of T5 in both formats."""

from __future__ import annotations

import pytest

from megalith.checkpoint.formats.megatron_names import module_name
from megalith.checkpoint.formats.stacking import stacking_of
from megalith.checkpoint.model_space import ModelSpace, model_space
from megalith.config import ModelConfig
from megalith.errors import LayoutError


@pytest.fixture(scope="module")
def space() -> ModelSpace:
    model = ModelConfig(
        model_family="t5",
        num_layers=2,
        decoder_num_layers=3,
        hidden_size=8,
        num_attention_heads=2,
        max_position_embeddings=16,
        position_embedding_type="relative",
    )
    return model_space(model, 24)


def test_each_stack_has_its_own_layers(space: ModelSpace) -> None:
    stacking = stacking_of(space.model)
    slots = {name: stacking.slot(name) for name in space.shapes}
    fused = slots["encoder.layers.1.input_layernorm.weight"]
    assert fused.key == "encoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert (fused.index, fused.extents) == ((1,), (2,))
    across = slots["decoder.layers.2.cross_attention.linear_kv.weight"]
    assert across.key == "decoder.layers.cross_attention.linear_kv.weight"
    assert (across.index, across.extents) == ((2,), (3,))
    assert slots["lm_head.output_layer.bias"].key == "lm_head.output_layer.bias"
    assert "encoder_relative_pos_emb.relative_attention_bias.weight" in slots
    with pytest.raises(LayoutError, match="outside a model of 2 layers"):
        stacking.slot("encoder.layers.2.mlp.linear_fc2.bias")


def test_extra_states_of_cross_attention_are_the_decoders(space: ModelSpace) -> None:
    keys = set(stacking_of(space.model).extra_state_objects())
    assert "decoder.layers.cross_attention.linear_kv._extra_state/shard_2_3" in keys
    assert "encoder.layers.mlp.linear_fc1._extra_state/shard_1_2" in keys
    assert not any(key.startswith("encoder.layers.cross_attention") for key in keys)
    assert len(keys) == 2 * 4 + 3 * 7


def test_a_place_holds_both_stacks(space: ModelSpace) -> None:
    layers = space.layers_in(range(2))
    assert layers == range(3)
    assert {module_name(name, layers) for name in space.shapes} == set(space.shapes)
