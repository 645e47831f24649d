"""Placement arithmetic: what ranks hold covers the global tensor, in the order that the layers compute with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import LayoutError
from megalith.nn.placement import (
    Fused,
    GroupedHeads,
    Placement,
    Replicated,
    Shard,
    Split,
    dim_of,
    global_shape,
    local_part,
    local_pieces,
    shard,
)

OTHER = 3  # extent of the dimension that is not cut


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, Tensor, int]:
    """A placement, a global tensor with distinct elements, and a number of ranks over which it can be cut."""
    size = draw(st.integers(1, 6))
    unit, dim = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    uneven = draw(st.integers(size, 20))
    parts = draw(st.integers(1, 3))
    whole_groups = GroupedHeads(unit * size, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    groups = draw(st.sampled_from([count for count in range(1, size + 1) if size % count == 0]))
    shared_groups = GroupedHeads(groups, size // groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    placement, extent = draw(
        st.sampled_from(
            [
                (Replicated(), unit),
                (Split(dim), size * unit),
                (Split(dim, uneven), uneven),
                (Fused(dim, parts), size * unit * parts),
                (whole_groups, whole_groups.extent),
                (shared_groups, shared_groups.extent),
            ]
        )
    )
    shape = (extent, OTHER) if dim_of(placement) == 0 else (OTHER, extent)
    return placement, torch.arange(float(extent * OTHER)).view(shape), size


def _by_definition(whole: Tensor, placement: Placement, size: int, index: int) -> Tensor:
    """What each placement means, written down without the function under test."""
    if isinstance(placement, Replicated):
        return whole
    if isinstance(placement, Split):
        return whole.tensor_split(size, placement.dim)[index]
    if isinstance(placement, Fused):
        parts = whole.chunk(placement.parts, placement.dim)
        return torch.cat([part.chunk(size, placement.dim)[index] for part in parts], placement.dim)
    groups, queries = placement.groups, placement.queries_per_group
    heads = whole.view(groups, queries + 2, placement.head_size, -1)
    if groups >= size:
        return heads.chunk(size)[index].flatten(0, 2)
    own = heads[index * groups // size]
    mine = own[:queries].chunk(size // groups)[index % (size // groups)]
    return torch.cat((mine, own[queries:])).flatten(0, 1)


@given(placed())
def test_a_part_is_what_its_placement_means(case: tuple[Placement, Tensor, int]) -> None:
    placement, whole, size = case
    for index in range(size):
        part = local_part(whole, placement, size, index)
        assert torch.equal(part, _by_definition(whole, placement, size, index))
        assert global_shape(part.shape, placement, size) == tuple(whole.shape)


@given(placed())
def test_the_pieces_of_all_ranks_are_the_whole(case: tuple[Placement, Tensor, int]) -> None:
    placement, whole, size = case
    extent = whole.shape[dim_of(placement)]
    holders: dict[int, list[int]] = {row: [] for row in range(extent)}
    said: dict[int, range] = {}
    for index in range(size):
        end = 0
        for piece in local_pieces(placement, extent, size, index):
            assert piece.local == end and piece.length > 0
            end += piece.length
            for row in range(piece.whole, piece.whole + piece.length):
                holders[row].append(index)
                assert said.setdefault(row, piece.holders) == piece.holders
    assert {row: list(ranks) for row, ranks in said.items()} == holders


def test_query_heads_of_a_group_are_divided_and_its_key_and_value_head_are_shared() -> None:
    placement = GroupedHeads(groups=2, queries_per_group=4, head_size=1)
    whole = torch.arange(12.0)[:, None]  # 0-3 queries, 4 key, 5 value of the first group; 6-9, 10, 11 of the second
    parts = [local_part(whole, placement, 4, index).flatten().tolist() for index in range(4)]
    assert parts == [[0, 1, 4, 5], [2, 3, 4, 5], [6, 7, 10, 11], [8, 9, 10, 11]]
    firsts = [[piece.holders[0] for piece in local_pieces(placement, 12, 4, index)] for index in range(4)]
    assert firsts == [[0, 0], [1, 0], [2, 2], [3, 2]]


def test_shards() -> None:
    assert [shard(7, 3, index, even=False) for index in range(3)] == [Shard(0, 3), Shard(3, 5), Shard(5, 7)]
    assert [shard(2, 4, index, share=True) for index in range(4)] == [Shard(i // 2, i // 2 + 1, 2) for i in range(4)]
    assert shard(8, 4, 1, share=True) == Shard(2, 4)


@pytest.mark.parametrize(
    ("extent", "options", "words"),
    [
        (7, {}, "7 does not divide over 4"),
        (3, {"even": False}, "3 does not divide over 4"),
        (3, {"share": True}, "use a multiple of 3"),
        (6, {"share": True}, "6 does not divide over 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(extent: int, options: dict[str, bool], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        shard(extent, 4, 0, **options)


def test_a_tensor_that_is_not_fused_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 .* 2 "):
        local_part(torch.ones(3, 1), Fused(0, 2), 1, 0)
