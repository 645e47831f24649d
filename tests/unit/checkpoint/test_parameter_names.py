"""A parameter is known by its place in Megatron's names: one of a user that only resembles them is a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.content import Chunk
from megalith.checkpoint.formats.megatron_names import (
    entries,
    file_key,
    grouped_experts,
    is_computed,
    is_legacy_qkv,
    legacy_path,
    model_space_key,
    module_name,
    parse_name,
    with_family,
)
from megalith.checkpoint.formats.megatron_optimizer import members
from megalith.checkpoint.formats.per_rank_layout import of_experts
from megalith.checkpoint.formats.torch_dist import Stacking, dense, is_always_fp32, is_extra_state, is_of_experts
from megalith.checkpoint.sources.adapters import Upcycled, Upcycling, args_of, has_vocabulary_rows
from megalith.checkpoint.sources.bucket_space import registration_order
from megalith.config import ModelConfig
from megalith.config.from_args import model_from_args
from megalith.errors import ConfigError
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, initialise_as_megatron_cpu

from .memory_source import ARGS, MemorySource, model_source

MIXTURE = Stacking({"decoder": (4, 4)}, fused=True)
LATENT = Stacking({"decoder": (4, 4)}, latent=True, fused=True)
LAYER = "decoder.layers.1."
USERS = [
    "my.mlp.experts_gate.weight",
    "my.mlp.experts.gate.weight",
    "my.mlp.experts.experts.linear_fc1.weight",
    "my.mlp.experts.local_experts.0.linear_fc1.weight",
    "my.mlp.router.expert_bias",
    "my.pre_mlp_layernorm.weight",
    "my.input_layernorm.weight",
    "my.self_attention.linear_qkv.layer_norm_weight",
    "my.q_layernorm.weight",
    "my.final_norm.weight",
    "my.cross_attention.weight",
    "my.attention.query_key_value.weight",
    "my.embedding.word_embeddings.weight",
    "pre_layernorm_scale.weight",
    "my_output_layer.weight",
]
"""Parameters outside Megatron's layers."""
WITHIN = [
    "mlp.experts_gate.weight",
    "mlp.experts.0.weight",
    "mlp.inner.experts.experts.linear_fc1.weight",
    "mlp.inner.router.expert_bias",
    "mlp.inner.pre_mlp_layernorm.weight",
    "self_attention.input_layernorm.weight",
    "self_attention.inner.q_layernorm.weight",
    "pre_layernorm_scale.weight",
]
"""Parameters within a layer, in modules that a user registered."""


def test_what_is_megatrons_is_known() -> None:
    one = parse_name(f"{LAYER}mlp.experts.local_experts.5.linear_fc1.weight")
    assert (one.stack, one.layer, one.expert, one.routed, one.module) == ("decoder", 1, 5, True, "linear_fc1")
    stacked = parse_name("decoder.layers.mlp.experts.experts.linear_fc2.bias")
    assert (stacked.layer, stacked.expert, stacked.routed, stacked.stacked_axes) == (None, None, True, 2)
    apart = parse_name(f"{LAYER}mlp.experts.experts.linear_fc2.bias")
    assert (apart.layer, apart.stacked_axes) == (1, 1)
    ahead = parse_name("mtp.layers.0.transformer_layer.mlp.experts.local_experts.2.linear_fc2.weight")
    assert (ahead.stack, ahead.layer, ahead.expert, ahead.prefix) == ("mtp", 0, 2, "mtp.layers.0.transformer_layer.")
    grouped = parse_name(f"{LAYER}mlp.experts.weight2")
    assert (grouped.grouped, grouped.routed, grouped.module, grouped.stacked_axes) == (True, True, "linear_fc2", 0)
    shared = parse_name(f"{LAYER}mlp.shared_experts.linear_fc1.weight")
    assert (shared.routed, shared.module) == (False, "mlp.shared_experts.linear_fc1")
    for name in (one, stacked, apart, ahead, grouped, shared):
        assert parse_name(str(name)) == name


@pytest.mark.parametrize("name", [*USERS, *(LAYER + path for path in WITHIN)])
def test_a_users_parameter_is_a_plain_one(name: str) -> None:
    found = parse_name(name)
    assert str(found) == name and not found.routed and found.expert is None
    stored = name.replace(".layers.1.", ".layers.")  # its key in torch_dist
    for stacking in (MIXTURE, LATENT, dense(2)):
        slot = stacking.slot(name)
        assert slot.key == stored and len(slot.index) == parse_name(slot.key).stacked_axes
        assert stacking.written_keys([stored, f"optimizer.state.exp_avg.{stored}"]) == {}
    assert model_space_key(stored) == stored and module_name(name, range(2)) == name
    assert not is_of_experts(stored) and not is_of_experts(f"optimizer.state.exp_avg.{stored}")
    assert not is_always_fp32(stored) and not has_vocabulary_rows(stored) and not is_legacy_qkv(name)
    assert of_experts([{name: 1}], expert=True) == [{}] and of_experts([{name: 1}], expert=False) == [{name: 1}]
    assert grouped_experts(name, range(2)) == [] and legacy_path(name, range(2), "2023", tied=True) is None
    assert list(entries([name], range(2), last=False)) == [(name, name)]
    assert with_family({}, [name])["model_family"] == "gpt"
    order = [f"{LAYER}self_attention.linear_proj.weight", name, f"{LAYER}self_attention.linear_qkv.weight"]
    assert registration_order(order, fused=True, grouped=True, keys=()) == order


def test_norms_of_layers_are_found_among_a_users() -> None:
    keys = [f"decoder.layers.{path}" for path in ("mlp.linear_fc1.layer_norm_weight", "my.linear_fc1.layer_norm_bias")]
    assert MIXTURE.written_keys(keys) == {keys[0]: "decoder.layers.pre_mlp_layernorm.weight"}
    theirs = file_key("decoder.layers.self_attention.q_layernorm.weight", latent=True, fused=True, has_experts=False)
    assert theirs == "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight"
    assert model_space_key(theirs) == "decoder.layers.self_attention.q_layernorm.weight"


def test_a_dense_layer_with_modules_named_like_experts() -> None:
    name = f"{LAYER}mlp.experts.local_experts.0.linear_fc1.weight"
    slot = dense(2).slot(name)
    assert (slot.key, slot.index) == ("decoder.layers.mlp.experts.local_experts.0.linear_fc1.weight", (1,))


def test_empty_states_and_computed_tables_are_whole_words() -> None:
    assert is_extra_state("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2")
    assert not is_extra_state("my_extra_state/shard_weight") and not is_extra_state("my._extra_state/shard_of.weight")
    assert is_computed("rotary_pos_emb.inv_freq") and is_computed("decoder.layers.0.mlp.linear_fc1._extra_state")
    assert not is_computed("my.relative_inv_freq") and not is_computed("decoder.layers.0.mlp.my_extra_state")
    linears = [f"{LAYER}mlp.linear_fc1.weight", f"{LAYER}mlp.inner.linear_fc1.weight"]
    states = [raw for raw, name in entries(linears, range(2), last=False) if name is None]
    assert states == [f"{LAYER}mlp.linear_fc1._extra_state"]


def test_the_final_norm_and_the_tables_of_a_model() -> None:
    heads = ["encoder.layers.0.mlp.linear_fc1.weight", "lm_head.dense.weight"]
    assert with_family({}, [*heads, "encoder.final_layernorm.weight"])["final_layernorm"]
    assert not with_family({}, [*heads, "my.final_norm.weight"])["final_layernorm"]
    groups = [{"wd_mult": 1.0, "is_decoupled_lr": decoupled} for decoupled in (True, False)]
    names = ["output_layer.weight", "output_layer.weight_scale.weight"]
    assert members(groups, dict.fromkeys(names, (2, 2)), 1e-3) == [names[:1], names[1:]]


@pytest.mark.parametrize("name", USERS)
def test_a_users_parameter_comes_back_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    saved, loaded = torch.arange(4.0), torch.zeros(4)
    store = DirectoryStore(tmp_path)
    store.save(1, CheckpointContent([Chunk(name, saved, (0,), (4,))]), {})
    assert list(store.contents(1).tensors) == [name]
    store.load(1, CheckpointContent([Chunk(name, loaded, (0,), (4,))]))
    assert torch.equal(saved, loaded)


def test_upcycling_leaves_what_only_resembles_a_dense_layer() -> None:
    source = model_source(ARGS, states=False)
    others = {f"decoder.layers.mlp.{path}": torch.ones(4, 3) for path in ("linear_fc1.scale", "router.scale")}
    model = model_from_args(args_of(source.common()))
    upcycled = Upcycled(MemorySource({**source.tensors, **others}, source.common()), Upcycling(2), model, "the test")
    held = upcycled.contents().tensors
    assert {held[key].shape for key in others} == {(4, 3)} and "decoder.layers.mlp.linear_fc1.weight" not in held
    for key, values in others.items():
        read = torch.zeros(4, 3)
        upcycled.read(CheckpointContent([Chunk(key, read, (0, 0), (4, 3))]))
        assert torch.equal(read, values)


def _gpt(**fields: Any) -> GPT:
    config = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 16}
    return GPT(ModelConfig(**config, **fields), 48)


class _Users(nn.Module):
    """Parameters in a module of a user, with placements as Megalith's own."""

    def __init__(self) -> None:
        super().__init__()
        names = ("linear_proj", "my_linear_proj")
        self.parts = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})
        for part in self.parts.values():
            part.placements = dict  # type: ignore[assignment]  # so that its weights are drawn like Megalith's


def test_initial_weights_of_a_users_module() -> None:
    """The projections that end a residual branch are drawn narrower; one with a longer name is not."""
    model = _gpt()
    model.decoder.layers["0"].mine = _Users()
    table = model.placements
    own = {f"decoder.layers.0.mine.parts.{name}.weight": None for name in ("linear_proj", "my_linear_proj")}
    placement = table()["decoder.layers.0.input_layernorm.weight"]
    model.placements = lambda: {**table(), **dict.fromkeys(own, placement)}  # type: ignore[method-assign]
    initialise(model, 1)
    narrow, plain = (model.get_parameter(name).std().item() for name in own)
    assert plain == pytest.approx(0.02, rel=0.1) and narrow == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.1)


def test_weights_that_megatron_has_not_are_refused_under_its_own_draws() -> None:
    model = _gpt()
    model.decoder.layers["0"].self_attention.mlp = nn.Linear(4, 4, bias=False)
    table = model.placements
    name = "decoder.layers.0.self_attention.mlp.weight"
    placement = table()["decoder.layers.0.input_layernorm.weight"]
    model.placements = lambda: {**table(), name: placement}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=name):
        initialise_as_megatron_cpu(model, torch.Generator().manual_seed(1))
