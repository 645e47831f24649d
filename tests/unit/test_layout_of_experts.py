"""Where the ranks of expert parallelism are: in Megatron's order, tensor fastest, then expert, then data."""

from __future__ import annotations

import pytest

from megalith.layout import Layout

LAYOUTS = [
    Layout(tp=2, cp=2, dp=2, pp=2, ep=2),
    Layout(tp=2, cp=2, dp=3, ep=3),
    Layout(cp=3, dp=2, ep=2),
    Layout(dp=4, pp=2, ep=4),
    Layout(tp=4, dp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_of_experts_are_megatrons(layout: Layout) -> None:
    same = layout.cp * layout.dp // layout.ep

    def rank(tp: int, ep: int, edp: int, pp: int) -> int:
        return tp + layout.tp * (ep + layout.ep * (edp + same * pp))

    places = [(tp, pp) for pp in range(layout.pp) for tp in range(layout.tp)]
    share = {tuple(rank(tp, ep, edp, pp) for ep in range(layout.ep)) for tp, pp in places for edp in range(same)}
    alike = {tuple(rank(tp, ep, edp, pp) for edp in range(same)) for tp, pp in places for ep in range(layout.ep)}
    assert set(layout.groups("ep")) == share
    assert set(layout.groups("edp")) == alike
    assert sorted(rank for ranks in layout.groups("ep") for rank in ranks) == list(range(layout.world_size))


def test_expert_parallelism_adds_no_ranks_and_is_named() -> None:
    assert Layout(dp=4, ep=2).world_size == 4
    assert str(Layout(dp=4, ep=2)) == "dp4 x ep2"
