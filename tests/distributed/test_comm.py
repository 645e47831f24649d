"""Collectives and the adjoint law: for each pair, sum over ranks of <A x, y> = <x, A' y>."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.layout import Layout

PAIRS = ("copy_in", "sum_out", "gather_in", "scatter_out", "exchange")


def _context(layout: Layout) -> ParallelContext:
    return ParallelContext.create(layout, torch.device("cpu"))


def _products(name: str, dim: int) -> tuple[float, float]:
    """<A x, y> and <x, A' y>, summed over the ranks."""
    axis = _context(Layout(tp=dist.get_world_size())).tp
    size = 4 * axis.size
    together = torch.Generator().manual_seed(0)
    alone = torch.Generator().manual_seed(1 + axis.index)
    same_input, same_output = name == "copy_in", name == "sum_out"
    x = torch.randn(size, size, 3, dtype=torch.float64, generator=together if same_input else alone).requires_grad_()
    pair = getattr(comm, name)
    z = pair(x, axis, dim, 1 - dim) if name == "exchange" else pair(x, axis)
    y = torch.randn(z.shape, dtype=torch.float64, generator=together if same_output else alone)
    z.backward(y)
    assert x.grad is not None
    forward, backward = (z.detach() * y).sum(), (x.detach() * x.grad).sum()
    # What every rank holds alike stands for one vector, and counts once.
    weights = (1.0 if not same_output else 1.0 / axis.size, 1.0 if not same_input else 1.0 / axis.size)
    total = comm.all_reduce(torch.stack([forward * weights[0], backward * weights[1]]), axis)
    return float(total[0]), float(total[1])


@pytest.mark.parametrize(("name", "dim"), [*((name, 0) for name in PAIRS), ("exchange", 1)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_pairs_are_adjoint(ranks: Any, world_size: int, name: str, dim: int) -> None:
    for forward, backward in ranks.run(world_size, _products, name, dim):
        assert forward == pytest.approx(backward, rel=1e-12)
        assert abs(forward) > 1e-3


def _gathered(dtype: torch.dtype, rows: int) -> list[bool]:
    axis = _context(Layout(tp=dist.get_world_size())).tp
    whole = (torch.arange(axis.size * rows * 100) % 251).view(axis.size * rows, 100).to(dtype)
    part = comm.own_part(whole, axis)
    across = comm.own_part(whole, axis, 1).contiguous()
    into = torch.full_like(whole, 252)
    comm.own_part(into, axis).copy_(part)
    comm.start_all_gather(comm.own_part(into, axis), axis, out=into).wait()
    found = comm.all_gather(part, axis), comm.all_gather(across, axis, 1), into
    return [torch.equal(one, whole) for one in found]


@pytest.mark.parametrize("rows", [3, 2000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_chunks_of_any_size_and_dtype_are_gathered(ranks: Any, world_size: int, dtype: torch.dtype, rows: int) -> None:
    assert ranks.run(world_size, _gathered, dtype, rows) == [[True] * 3] * world_size


def _reduced(dtype: torch.dtype) -> list[bool]:
    axis = _context(Layout(tp=dist.get_world_size())).tp
    whole = torch.randn(axis.size * 2000, 100, generator=torch.Generator().manual_seed(axis.index)).to(dtype)
    kept, other, into = whole.clone(), whole.clone(), torch.empty_like(comm.own_part(whole, axis))
    wanted = comm.own_part(comm.all_reduce(whole.clone(), axis), axis)
    found = [comm.start_reduce_scatter(whole, axis).wait(), comm.start_reduce_scatter(other, axis, out=into).wait()]
    alike = torch.equal(whole, kept) and found[1] is into
    own = comm.own_part(whole, axis)
    found += [comm.start_reduce_scatter(whole, axis, out=own).wait(), own]
    return [alike, *(torch.equal(one, wanted) for one in found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_of_chunks_are_bits_of_the_whole_sum_and_keep_their_input_unless_they_have_a_place(
    ranks: Any, world_size: int, dtype: torch.dtype
) -> None:
    assert ranks.run(world_size, _reduced, dtype) == [[True] * 5] * world_size


def _places() -> dict[str, Any]:
    context = _context(Layout(tp=2, dp=2))
    x = torch.tensor([float(context.rank)])
    return {
        "tp": comm.all_gather(x, context.tp).tolist(),
        "dp": comm.all_gather(x, context.dp).tolist(),
        "world": comm.all_reduce(x.clone(), context.world).tolist(),
        "objects": comm.all_gather_objects(context.rank, context.flatten_axes("cp", "dp")),
        "expanded": comm.all_reduce(torch.ones(1).expand(8), context.tp).tolist(),
        "broadcast": comm.broadcast(x.clone(), context.tp, 1).tolist(),
    }


def test_groups_follow_the_layout(ranks: Any) -> None:
    first, second, third, _ = ranks.run(4, _places)
    assert first == {
        "tp": [0.0, 1.0],
        "dp": [0.0, 2.0],
        "world": [6.0],
        "objects": [0, 2],
        "expanded": [2.0] * 8,
        "broadcast": [1.0],
    }
    assert second["dp"] == [1.0, 3.0]
    assert third["tp"] == [2.0, 3.0]


def test_one_process_needs_no_group() -> None:
    solo = ParallelContext.solo()
    x = torch.ones(3)
    assert comm.all_reduce(x, solo.tp) is x
    assert comm.gather_in(x, solo.flatten_axes("tp", "pp")) is x
    assert comm.all_gather_objects(1, solo.world) == [1]
