"""Random streams: who draws alike and who does not, and that a state continues where it was taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import DROPOUT, RandomStreams
from megalith.kernels.dropout import dropout
from megalith.layout import Layout

Draws = dict[str, float]


def _draw(streams: RandomStreams) -> Draws:
    default = torch.rand(()).item()
    with streams.own.used():
        own = torch.rand(()).item()
    return {"default": default, "own": own, "after": torch.rand(()).item()}


def _streams(sizes: dict[str, int]) -> dict[str, Any]:
    context = ParallelContext.create(Layout(**sizes), torch.device("cpu"))
    streams = RandomStreams(1234, context)
    weights = torch.rand(2, generator=streams.weights).tolist()
    first = _draw(streams)
    state = streams.state()
    then = _draw(streams)
    streams.load_state(state)
    comm.barrier(context.world)  # a rank that leaves while another one still connects is an error there
    return {"weights": weights, "first": first, "then": then, "again": _draw(streams)}


@pytest.mark.parametrize(
    ("axis", "shared"), [("tp", {"weights", "default"}), ("cp", {"weights"}), ("dp", {"weights"}), ("pp", set())]
)
def test_who_draws_alike(ranks: Any, axis: str, shared: set[str]) -> None:
    a, b = ranks.run(2, _streams, {axis: 2})
    for result in (a, b):
        assert result["again"] == result["then"] != result["first"]
    assert (a["weights"] == b["weights"]) == ("weights" in shared)
    for place in ("first", "then"):
        assert (a[place]["default"] == b[place]["default"]) == ("default" in shared)
        assert (a[place]["after"] == b[place]["after"]) == ("default" in shared)
        assert a[place]["own"] != b[place]["own"]


def test_one_process_draws_from_the_seed_as_megatron_does(ranks: Any) -> None:
    (solo,) = ranks.run(1, _streams, {})
    generator = torch.Generator().manual_seed(1234)
    assert solo["weights"] == torch.rand(2, generator=generator).tolist()
    assert solo["first"]["default"] == torch.rand((), generator=generator).item()
    assert solo["first"]["after"] == torch.rand((), generator=generator).item(), "the own stream leaves the default be"
    own = torch.Generator().manual_seed(1234 + 2718)
    assert solo["first"]["own"] == torch.rand((), generator=own).item()


def test_a_state_of_another_kind_of_device_is_passed_over() -> None:
    streams = RandomStreams(7)
    state = streams.state()
    before = _draw(streams)
    streams.load_state(state | {"rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)}})
    after = _draw(streams)
    assert (after["default"], after["own"] == before["own"]) == (before["default"], False)


def test_a_run_goes_on_with_the_dropout_that_it_began_with() -> None:
    x = torch.ones(1000)
    streams = RandomStreams(1)
    state, first = streams.state(), dropout(x, 0.5)
    streams.load_state({key: value for key, value in state.items() if key != DROPOUT})  # saved before there was another
    before = dropout(x, 0.5)
    torch.set_rng_state(state["torch_rng_state"])
    assert torch.equal(before, torch.dropout(x, 0.5, True)) and not torch.equal(before, first)
    assert streams.state().keys() == state.keys() - {DROPOUT}
    streams.load_state(state)
    assert torch.equal(dropout(x, 0.5), first)
    assert RandomStreams(1).state().keys() == state.keys(), "another run draws its own way"
