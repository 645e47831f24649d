"""Gradients of experts have replicas of their own, and start to be summed without waiting for those of dense layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.distributed.comm import AsyncHandle
from megalith.distributed.context import Axis
from megalith.optim.gradients import GradientBuffers
from megalith.optim.norms import GlobalNorms

NAMES = ("early", "expert", "late")


class _Noted:
    """Data parallelism that notes what is reduced."""

    shards_optimizer = False

    def __init__(self, kind: str, notes: list[tuple[str, int]]) -> None:
        self.kind, self.notes, self.axis = kind, notes, Axis(kind, (0, 1))

    def owned_range(self, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def reduce(self, grads: Tensor) -> AsyncHandle:
        self.notes.append((self.kind, int(grads.count_nonzero())))
        return AsyncHandle(grads)

    def gather(self, parameters: Tensor) -> AsyncHandle:
        return AsyncHandle(parameters)


def _buffers(notes: list[tuple[str, int]]) -> tuple[dict[str, Parameter], GradientBuffers]:
    named = {name: Parameter(torch.ones(2, number + 2)) for number, name in enumerate(NAMES)}
    buffers = GradientBuffers(
        list(named.items()),
        torch.float32,
        data=_Noted("dense", notes),
        experts={"expert"},
        expert_data=_Noted("experts", notes),
        bucket_size=1,
    )
    return named, buffers


def test_each_bucket_goes_to_its_replicas_as_soon_as_it_is_complete() -> None:
    notes: list[tuple[str, int]] = []
    named, buffers = _buffers(notes)
    for step in range(2):
        notes.clear()
        buffers.begin(1)
        for name in reversed(NAMES):
            named[name].sum().backward()
            if step:  # the first one learns how many writes there are
                assert len(notes) == len(NAMES) - NAMES.index(name)
        buffers.finish()
    assert notes == [("dense", 8), ("experts", 6), ("dense", 4)]


def test_what_another_replica_counts_is_left_out_of_norms() -> None:
    named, buffers = _buffers([])
    tensors = {name: torch.ones_like(parameter) for name, parameter in named.items()}
    assert GlobalNorms(buffers, {}, Axis("world")).squared_norm(tensors) == pytest.approx(18.0)
    assert GlobalNorms(buffers, {}, Axis("world"), ["expert"]).squared_norm(tensors) == pytest.approx(12.0)
