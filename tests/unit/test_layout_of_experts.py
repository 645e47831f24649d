"""Where the ranks of expert parallelism are: in Megatron's order, tensor fastest, then expert, then data."""

from __future__ import annotations

import itertools

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


FOLDED = [
    Layout(tp=2, dp=4, pp=2, ep=4, etp=1),
    Layout(tp=4, cp=2, ep=2, etp=2),
    Layout(dp=4, ep=2, etp=2),
    Layout(tp=2, dp=4, etp=8),
]


@pytest.mark.parametrize("layout", FOLDED, ids=str)
def test_experts_have_a_grid_of_their_own(layout: Layout) -> None:
    """Megatron's: of the ranks of a stage the parts of an expert are the fastest, then experts, then replicas."""
    etp, ep = layout.expert_tp, layout.ep
    same = layout.tp * layout.cp * layout.dp // (etp * ep)

    def rank(t: int, e: int, d: int, p: int) -> int:
        return t + etp * (e + ep * (d + same * p))

    sizes = {"etp": range(etp), "ep": range(ep), "edp": range(same), "pp": range(layout.pp)}
    for axis in ("etp", "ep", "edp"):
        fixed = [name for name in sizes if name != axis]
        wanted = set()
        for values in itertools.product(*(sizes[name] for name in fixed)):
            place = dict(zip(fixed, values, strict=True))
            ranks = [rank(*({**place, axis: at}[name] for name in sizes)) for at in sizes[axis]]
            wanted.add(tuple(ranks))
        assert set(layout.groups(axis)) == wanted


def test_expert_parallelism_adds_no_ranks_and_is_named() -> None:
    assert Layout(dp=4, ep=2).world_size == 4
    assert str(Layout(dp=4, ep=2)) == "dp4 x ep2"
    assert str(Layout(tp=2, dp=2, ep=2, etp=1)) == "tp2 x dp2 x ep2 x etp1"
