"""Checkpoints of a model with two stacks of layers: Megatron's keys of T5 in both formats."""

from __future__ import annotations

from typing import Any

import pytest

from megalith.checkpoint.formats.megatron_names import module_name
from megalith.checkpoint.formats.torch_dist import stacking_of
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.torch_dist import _in_model_space
from megalith.config import ModelConfig
from megalith.errors import LayoutError


@pytest.fixture(scope="module")
def params() -> GlobalParameters:
    model = ModelConfig(
        model_family="t5",
        num_layers=2,
        decoder_num_layers=3,
        hidden_size=8,
        num_attention_heads=2,
        max_position_embeddings=16,
        position_embedding_type="relative",
    )
    return GlobalParameters.from_config(model, 24)


def test_each_stack_has_its_own_layers(params: GlobalParameters) -> None:
    stacking = stacking_of(params.model)
    slots = {name: stacking.slot(name) for name in params.shapes}
    fused = slots["encoder.layers.1.input_layernorm.weight"]
    assert fused.key == "encoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert (fused.index, fused.leading_dims) == ((1,), (2,))
    across = slots["decoder.layers.2.cross_attention.linear_kv.weight"]
    assert across.key == "decoder.layers.cross_attention.linear_kv.weight"
    assert (across.index, across.leading_dims) == ((2,), (3,))
    assert slots["lm_head.output_layer.bias"].key == "lm_head.output_layer.bias"
    assert "encoder_relative_pos_emb.relative_attention_bias.weight" in slots
    with pytest.raises(LayoutError, match="2 layers"):
        stacking.slot("encoder.layers.2.mlp.linear_fc2.bias")


def test_extra_states_of_cross_attention_are_the_decoders(params: GlobalParameters) -> None:
    keys = set(stacking_of(params.model).extra_state_objects())
    assert "decoder.layers.cross_attention.linear_kv._extra_state/shard_2_3" in keys
    assert "encoder.layers.mlp.linear_fc1._extra_state/shard_1_2" in keys
    assert not any(key.startswith("encoder.layers.cross_attention") for key in keys)
    assert len(keys) == 2 * 4 + 3 * 7


def test_a_place_holds_both_stacks(params: GlobalParameters) -> None:
    layers = params.layers_in(range(2))
    assert layers == range(3)
    assert {module_name(name, layers) for name in params.shapes} == set(params.shapes)


LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
QKV_NORM, FC1_NORM = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"


def model_of_variant(variant: str, modules: str) -> GlobalParameters:
    fields: dict[str, Any] = {"qk_layernorm": True, "q_lora_rank": 6, **LATENT} if "latent" in variant else {}
    if "mixture" in variant:
        fields |= {"num_experts": 4, "moe_ffn_hidden_size": 8}
    if "apart" in variant:
        fields["moe_layer_freq"] = "[0,1]"
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        max_position_embeddings=16,
        position_embedding_type="rope",
        normalization="RMSNorm",
        transformer_impl=modules,
        **fields,
    )
    return GlobalParameters.from_config(model, 24)


@pytest.mark.parametrize(
    ("variant", "modules", "written"),
    [
        # Of Megatron's own modules: as core 0.16.1 names them (its GPTModel was built and asked for its keys).
        ("dense", "local", {}),
        ("mixture", "local", {}),
        ("latent", "local", {QKV_NORM: "input_layernorm.weight", FC1_NORM: "pre_mlp_layernorm.weight"}),
        ("latent mixture", "local", {QKV_NORM: "input_layernorm.weight", FC1_NORM: "pre_mlp_layernorm.weight"}),
        # Of TransformerEngine's: as its layer specifications say.
        ("dense", "transformer_engine", {}),
        ("mixture", "transformer_engine", {FC1_NORM: "pre_mlp_layernorm.weight"}),
        (
            "latent",
            "transformer_engine",
            {
                QKV_NORM: "input_layernorm.weight",
                "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
                "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
            },
        ),
    ],
)
def test_norms_are_written_as_megatrons_modules_name_them(variant: str, modules: str, written: dict[str, str]) -> None:
    params = model_of_variant(variant, modules)
    keys = [params.stacking.slot(name).key for name in params.shapes]
    for prefix in ("", "optimizer.state.exp_avg."):
        marked_layers = f"{prefix}decoder.layers."
        found = params.stacking.written_keys(prefix + key for key in keys)
        assert found == {marked_layers + ours: marked_layers + theirs for ours, theirs in written.items()}
        assert all(_in_model_space(theirs) == ours for ours, theirs in found.items())


def test_layers_with_keys_of_their_own_go_by_their_experts() -> None:
    params = model_of_variant("mixture apart", "transformer_engine")
    found = params.stacking.written_keys(params.stacking.slot(name).key for name in params.shapes)
    assert found == {f"decoder.layers.1.{FC1_NORM}": "decoder.layers.1.pre_mlp_layernorm.weight"}


def test_the_linear_modules_of_latent_attention_have_states_of_fp8() -> None:
    keys = model_of_variant("latent", "local").stacking.extra_state_objects()
    of_attention = {key.split(".")[3] for key in keys if ".self_attention." in key}
    down, up = {"linear_q_down_proj", "linear_kv_down_proj"}, {"linear_q_up_proj", "linear_kv_up_proj"}
    assert of_attention == {"linear_proj"} | down | up
