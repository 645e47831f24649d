"""Keys, offsets and common state of the torch_dist format, without files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.content import Chunk, share_of
from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.torch_dist import (
    LocalTensor,
    Stacking,
    dense,
    is_extra_state,
    model_chunks,
    optimizer_chunks,
    optimizer_common,
    read_optimizer_common,
    rng_object_key,
    weight_chunks,
)
from megalith.errors import CheckpointError, LayoutError
from megalith.nn.placement import Fused, GroupedHeads, Placement, Replicated, Split

NAMES = [
    ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight", None),
    ("output_layer.weight", "output_layer.weight", None),
    ("decoder.final_layernorm.bias", "decoder.final_layernorm.bias", None),
    (
        "decoder.layers.11.input_layernorm.bias",
        "decoder.layers.self_attention.linear_qkv.layer_norm_bias",
        11,
    ),
    ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight", 0),
    ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1.weight", 3),
    ("decoder.layers.3.self_attention.q_layernorm.weight", "decoder.layers.self_attention.q_layernorm.weight", 3),
]


@pytest.mark.parametrize(("name", "key", "layer"), NAMES)
def test_names_map_to_places(name: str, key: str, layer: int | None) -> None:
    slot = dense(12).slot(name)
    assert (slot.key, slot.index) == (key, () if layer is None else (layer,))
    assert len(slot.leading_dims) == parse_name(key).stacked_axes


EXPERT = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"


def test_experts_are_stacked_in_their_layer() -> None:
    alike, apart = (
        Stacking({"decoder": (4, 4)}).slot(EXPERT),
        Stacking({"decoder": (0, 4)}, non_homogeneous=True).slot(EXPERT),
    )
    assert (alike.key, alike.index, alike.leading_dims) == (
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        (1, 2),
        (2, 4),
    )
    assert (apart.key, apart.index, apart.leading_dims) == (
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        (2,),
        (4,),
    )
    for slot in (alike, apart):
        assert parse_name(slot.key).stacked_axes == len(slot.index)
    own = Stacking({"decoder": (0, 4)}, non_homogeneous=True).slot("decoder.layers.0.input_layernorm.weight")
    assert own.key == "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert parse_name(own.key).stacked_axes == 0


def test_empty_states_of_experts() -> None:
    """As Megatron 0.16 names them; where layers differ each has one of its own."""
    keys = Stacking({"decoder": (2, 2)}, shared=True).extra_state_objects([1])
    assert "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.1_2.2" in keys
    assert "decoder.layers.mlp.shared_experts.linear_fc1._extra_state/shard_1_2" in keys
    assert not any(".mlp.linear_fc1." in key for key in keys) and len(keys) == 2 + 4 + 2
    apart = Stacking({"decoder": (0, 2)}, non_homogeneous=True).extra_state_objects()
    assert "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1" in apart
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in apart
    assert all(map(is_extra_state, apart))


def test_chunks_are_views_that_a_load_fills() -> None:
    tensor = torch.zeros(6, 4, requires_grad=True)
    chunks = model_chunks([("decoder.layers.1.mlp.linear_fc1.weight", tensor, Fused(0, 2))], dense(3))
    assert [chunk.offset for chunk in chunks] == [(1, 0, 0), (1, 3, 0)]
    assert {chunk.global_shape for chunk in chunks} == {(3, 6, 4)}
    for value, chunk in enumerate(chunks, start=1):
        chunk.tensor.fill_(value)
    assert tensor.detach()[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def assemble(chunks: list[Chunk]) -> torch.Tensor:
    """The global tensor, with every element written exactly once."""
    whole = torch.full(chunks[0].global_shape, float("nan"))
    for chunk in chunks:
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offset, chunk.tensor.shape, strict=True))
        assert whole[box].isnan().all(), "two chunks overlap"
        whole[box] = chunk.tensor
    assert not whole.isnan().any(), "the chunks leave a gap"
    return whole


def shard(whole: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """The definition of a placement, written down independently of the code under test."""
    if isinstance(placement, Replicated):
        return whole
    if isinstance(placement, Split):
        return whole.chunk(size, placement.dim)[rank]
    parts = whole.chunk(placement.parts, placement.dim)
    return torch.cat([part.chunk(size, placement.dim)[rank] for part in parts], placement.dim)


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    placement=st.sampled_from([Split(0), Split(1), Fused(0, 2), Fused(1, 3)]),
    layer=st.sampled_from([None, 0, 1]),
)
def test_the_chunks_of_all_ranks_make_the_whole(size: int, placement: Placement, layer: int | None) -> None:
    whole = torch.arange(24.0 * 36).reshape(24, 36)
    name = "output_layer.weight" if layer is None else f"decoder.layers.{layer}.mlp.linear_fc1.weight"
    chunks = [
        chunk
        for rank in range(size)
        for chunk in model_chunks(
            [(name, shard(whole, placement, rank, size), placement)], dense(1 + (layer or 0)), rank=rank, size=size
        )
    ]
    if layer is not None:
        chunks = [Chunk(c.key, c.tensor[0], c.offset[1:], c.global_shape[1:]) for c in chunks if c.offset[0] == layer]
    assert torch.equal(assemble(chunks), whole)


def test_replicated_tensors_have_one_place_on_all_ranks() -> None:
    places = {
        model_chunks([("decoder.final_layernorm.weight", torch.ones(4), Replicated())], dense(1), rank=r, size=2)[
            0
        ].offset
        for r in range(2)
    }
    assert places == {(0,)}


def test_counted_once_what_several_ranks_hold_is_the_first_ones() -> None:
    named = [
        ("decoder.final_layernorm.weight", torch.ones(4), Replicated()),
        ("decoder.layers.0.self_attention.linear_qkv.weight", torch.ones(3, 2), GroupedHeads(1, 2, 1)),
    ]
    boxes, placements = (
        [LocalTensor(name, tensor) for name, tensor, _ in named],
        {name: found for name, _, found in named},
    )
    first, second = (weight_chunks(boxes, placements, dense(1), rank=rank, size=2, dedup=True) for rank in range(2))
    assert [chunk.key.split(".")[-2] for chunk in first] == ["final_layernorm", "linear_qkv", "linear_qkv"]
    assert [(chunk.key.split(".")[-2], chunk.offset) for chunk in second] == [("linear_qkv", (0, 1, 0))]
    assert torch.equal(assemble([*first[1:], *second]), torch.ones(1, 4, 2))
    all_of_second = model_chunks(named, dense(1), rank=1, size=2)
    assert sum(chunk.tensor.numel() for chunk in all_of_second) == 4 + 3 * 2


def test_boxes_of_optimizer_state_are_cut_at_the_parts_of_fused_tensors() -> None:
    """Rows 1 to 4 of [gate 0-2; up 3-5] on the second of two ranks are rows 4, 5 and 9, 10 of the whole."""

    @dataclass(frozen=True)
    class Rows:
        name: str
        tensor: torch.Tensor
        offset: tuple[int, ...]
        shape: tuple[int, ...]

    name = "decoder.layers.1.mlp.linear_fc1.weight"
    box = Rows(f"exp_avg.{name}", torch.arange(8.0).view(4, 2), (1, 0), (6, 2))
    chunks = optimizer_chunks([box], {name: Fused(0, 2)}, dense(2), rank=1, size=2)
    assert [(chunk.offset, chunk.global_shape) for chunk in chunks] == [
        ((1, 4, 0), (2, 12, 2)),
        ((1, 9, 0), (2, 12, 2)),
    ]
    assert [chunk.tensor.flatten().tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert chunks[0].tensor.data_ptr() == box.tensor.data_ptr(), "a load must fill the live state"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_a_partition_of_about_equal_bytes(size: int) -> None:
    chunks = [Chunk(str(n), torch.zeros(n % 5 + 1), (0,), (n % 5 + 1,)) for n in range(40)]
    shares = [share_of(chunks, index, size) for index in range(size)]
    assert sorted(int(chunk.key) for share in shares for chunk in share) == list(range(40))
    loads = [sum(chunk.nbytes for chunk in share) for share in shares]
    assert max(loads) - min(loads) <= 5 * 4


def test_optimizer_state_is_keyed_and_cut_like_its_parameter() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    chunks = optimizer_chunks([LocalTensor(f"exp_avg.{name}", torch.ones(4, 2))], {name: Fused(0, 2)}, dense(1))
    assert [chunk.key for chunk in chunks] == ["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"] * 2
    assert [chunk.offset for chunk in chunks] == [(0, 0, 0), (0, 2, 0)]


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(LayoutError, match="2 layers"):
        model_chunks([("decoder.layers.2.mlp.linear_fc2.bias", torch.ones(4), Replicated())], dense(2))
    with pytest.raises(LayoutError, match="2 parts"):
        model_chunks([("output_layer.weight", torch.ones(3, 4), Fused(0, 2))], dense(2))


def test_object_keys() -> None:
    assert rng_object_key() == "rng_state/shard_0.0_1.1"
    assert rng_object_key(tp_rank=1, tp_size=2, pp_rank=3, pp_size=4) == "rng_state/shard_3.1_4.2"
    keys = dense(3).extra_state_objects()
    assert len(keys) == 12 and "decoder.layers.mlp.linear_fc2._extra_state/shard_2_3" in keys
    assert all(map(is_extra_state, keys)) and not is_extra_state(rng_object_key())


GROUPS: list[dict[str, Any]] = [{"wd_mult": 1.0, "lr": 0.1, "betas": (0.9, 0.95)}, {"wd_mult": 0.0, "lr": 0.1}]
SCALER = {"scale": 65536.0, "growth_tracker": 7, "hysteresis_tracker": 1}


@pytest.mark.parametrize(
    ("precision", "scaler"), [("float32", None), ("bfloat16", None), ("float16", SCALER), ("float16", None)]
)
def test_optimizer_common_round_trip(precision: str, scaler: dict[str, Any] | None) -> None:
    found = read_optimizer_common(optimizer_common(GROUPS, 12, scaler, precision))
    assert (found.param_groups, found.step, found.scaler) == (GROUPS, 12, scaler)


def test_optimizer_common_nests_as_megatron_does() -> None:
    plain = optimizer_common(GROUPS, 3, None, "float32")
    assert set(plain) == {"state", "param_groups"}
    step = plain["state"]["common_step"]
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 3.0)
    half = optimizer_common([{**GROUPS[0], "params": [0, 1], "step": 3}], 3, SCALER, "float16")
    assert set(half) == {"optimizer", "grad_scaler"}
    assert half["optimizer"]["param_groups"] == [GROUPS[0]]
    assert half["grad_scaler"]["scale"].shape == (1,)


def test_a_step_in_the_groups_counts_where_there_is_no_common_one() -> None:
    found = read_optimizer_common({"param_groups": [{"lr": 0.1, "step": 9.0}]})
    assert (found.step, found.param_groups) == (9, [{"lr": 0.1}])


def test_bucket_space_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="param_state_sharding_type.*--no-load-optim"):
        read_optimizer_common({"param_state_sharding_type": "dp_reshardable"})


def test_flattened_ranges_are_read_in_model_space(tmp_path: Path) -> None:
    """Core 0.8 to 0.12: the state of a tensor [L, rows, columns] as a grid of boxes, each flattened."""
    layers, rows, columns, cuts = 2, 6, 4, 3
    whole = torch.arange(layers * rows * columns, dtype=torch.float32).view(layers, rows, columns)
    boxes = whole.view(layers, cuts, rows // cuts, columns).reshape(layers, cuts, 1, -1)
    key, state = "decoder.layers.mlp.linear_fc1.weight", "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    chunks = [
        Chunk(key, torch.zeros_like(whole), (0, 0, 0), tuple(whole.shape)),
        # Two replicas have a range each of every box, which they end where they like.
        Chunk(state, boxes[..., :3], (0, 0, 0, 0), tuple(boxes.shape)),
        Chunk(state, boxes[..., 3:], (0, 0, 0, 3), tuple(boxes.shape)),
    ]
    store = DirectoryStore(tmp_path)
    store.save(1, CheckpointContent(chunks), {})
    assert store.contents(1).tensors[state].shape == whole.shape
    part = torch.full((1, 3, 2), -1.0)
    store.load(1, CheckpointContent([Chunk(state, part, (1, 1, 2), tuple(whole.shape))]))
    assert torch.equal(part, whole[1:2, 1:4, 2:4])
