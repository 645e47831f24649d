"""Messages between stages: in the order of each directed edge, whatever else is under way between the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed.context import Axis, ParallelContext
from megalith.distributed.p2p import Channel, receive, send
from megalith.layout import Layout

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Notes:
    """An observer that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.heard.append(operation)

    def after(self, operation: str, axis: Axis) -> None:
        pass

    def waiting(self, peer: int | None = None) -> None:
        self.heard.append("waiting")

    def waited(self) -> None:
        self.heard.append("waited")


def _value(source: int, direction: int, number: int) -> Tensor:
    """[2, 3 + number], not contiguous: the lengths differ, so that messages that are mixed up do not fit."""
    return (torch.arange(2.0 * (3 + number)).view(3 + number, 2) + 10 * source + 50 * direction).t()


def _around(dtype: torch.dtype) -> list[bool]:
    """Three messages each way to both neighbours, all receives posted first; whether each is what it should be."""
    notes = Notes()
    ctx = ParallelContext.create(Layout(pp=dist.get_world_size()), torch.device("cpu"), observer=notes)
    channels, rank, size = ctx.p2p_channels, ctx.rank, ctx.pp.size
    assert channels is not None

    def arriving(channel: Channel, number: int) -> Any:
        return receive(channel, (2, 3 + number), dtype, channels.device)

    both = [(arriving(channels.from_previous, n), arriving(channels.from_next, n)) for n in range(3)]
    sent = [
        send(_value(rank, direction, number).to(dtype), channel)
        for number in range(3)
        for direction, channel in ((1, channels.to_previous), (0, channels.to_next))
    ]
    same = [
        torch.equal(transfer.wait(), _value(source % size, direction, number).to(dtype))
        for number, pair in enumerate(both)
        for direction, (transfer, source) in enumerate(zip(pair, (rank - 1, rank + 1), strict=True))
    ]
    for transfer in sent:
        transfer.wait()
        transfer.wait()  # again: nothing
    assert notes.heard == ["waiting", "waited"] * 12
    return same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_keep_their_order_and_their_edge(ranks: Any, world_size: int, dtype: torch.dtype) -> None:
    assert ranks.run(world_size, _around, dtype) == [[True] * 6] * world_size


def _two_pipelines() -> tuple[int, int]:
    """The peers of a rank where data parallelism makes two pipelines."""
    ctx = ParallelContext.create(Layout(dp=2, pp=2), torch.device("cpu"))
    assert ctx.p2p_channels is not None
    return ctx.p2p_channels.to_next.peer, ctx.p2p_channels.from_next.peer


def test_each_pipeline_has_its_own_edges(ranks: Any) -> None:
    assert ranks.run(4, _two_pipelines) == [(2, 2), (3, 3), (0, 0), (1, 1)]
