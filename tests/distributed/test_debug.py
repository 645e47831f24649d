"""`--debug-collectives`: mismatched shape, dtype, operation and order are errors on all ranks with both calls (F19)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.consistency import CollectiveCheck, Observers
from megalith.distributed.context import Axis
from megalith.errors import MegalithError


def checked_axis(observer: Any = None) -> Axis:
    observer = observer or CollectiveCheck(torch.device("cpu"))
    size = dist.get_world_size()
    return Axis("tp", tuple(range(size)), dist.get_rank(), dist.group.WORLD, observer)


def _mismatch(kind: str) -> str:
    axis = checked_axis()
    odd, x = axis.is_last, torch.ones(4)
    comm.all_reduce(torch.ones(2), axis)  # what is equal passes
    try:
        if kind == "shape":
            comm.all_reduce(x[: 3 if odd else 4], axis)
        elif kind == "dtype":  # as many bytes: gloo adds them without a word
            comm.all_reduce(x.int() if odd else x, axis)
        elif kind == "operation":
            comm.all_reduce(x, axis, "max" if odd else "sum")
        elif odd:
            comm.all_gather(x, axis)  # order
            comm.all_reduce(x, axis)
        else:
            comm.all_reduce(x, axis)
            comm.all_gather(x, axis)
    except MegalithError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("shape", "all_reduce of [4] torch.float32 (sum)", "all_reduce of [3] torch.float32 (sum)"),
        ("dtype", "all_reduce of [4] torch.float32 (sum)", "all_reduce of [4] torch.int32 (sum)"),
        ("operation", "all_reduce of [4] torch.float32 (sum)", "all_reduce of [4] torch.float32 (max)"),
        ("order", "all_reduce of [4] torch.float32 (sum)", "all_gather of [4] torch.float32"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch(ranks: Any, world_size: int, kind: str, first: str, last: str) -> None:
    messages = ranks.run(world_size, _mismatch, kind)
    assert len(set(messages)) == 1
    head, *calls = messages[0].splitlines()
    assert head.startswith("--debug-collectives: ") and "tp" in head and "number 2" in head
    assert len(calls) == world_size
    for rank, call in enumerate(calls):
        what = last if rank == world_size - 1 else first
        assert call.startswith(f"  rank {rank}: {what} at distributed/test_debug.py:") and "(_mismatch)" in call


class _Counting:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.calls.append(operation)

    def after(self, operation: str, axis: Axis) -> None:
        self.calls.append("after")

    def waiting(self, peer: int | None = None) -> None:
        self.calls.append("waiting")

    def waited(self) -> None:
        self.calls.append("waited")


def _all_collectives() -> tuple[list[str], Tensor]:
    counting = _Counting()
    axis = checked_axis(Observers([counting, CollectiveCheck(torch.device("cpu"))]))
    x = torch.arange(4.0).requires_grad_()
    y = comm.gather_in(comm.scatter_out(comm.copy_in(x, axis), axis), axis)
    y.sum().backward()
    comm.barrier(axis)
    comm.all_gather_objects("text", axis)
    comm.broadcast(torch.ones(1), axis)
    assert x.grad is not None
    return counting.calls, x.grad


def test_equal_calls_pass_and_the_numbers_are_the_same(ranks: Any) -> None:
    for calls, grad in ranks.run(2, _all_collectives):
        # The check is no collective of the run: observers hear of each call once.
        started = [call for call in calls if call not in ("after", "waiting", "waited")]
        reduced = ["reduce_scatter", "all_gather", "reduce_scatter", "all_gather", "all_reduce"]
        assert started == [*reduced, "barrier", "all_gather_objects", "broadcast"]
        assert calls.count("after") == len(started) and calls.count("waiting") == calls.count("waited") == 5
        torch.testing.assert_close(grad, torch.full((4,), 4.0))
