"""Collectives over one axis, in place or as conjugate pairs for autograd.

torch.distributed is imported here, in `p2p.py`, `context.py` and `launch.py` only. On an axis of one rank all functions
return their input unchanged. They accept any strides, and every rank gets the same bits.

| forward                    | backward                   | used by                                   |
|----------------------------|----------------------------|-------------------------------------------|
| `copy_in` (identity)       | sum over ranks             | tensor parallel, operator f               |
| `sum_out` (sum over ranks) | identity                   | tensor parallel, operator g               |
| `gather_in` (all-gather)   | reduce-scatter             | sequence parallel, in front of a column   |
| `scatter_out` (red.-scat.) | all-gather                 | sequence parallel, after a row layer      |
| `exchange` (all-to-all)    | all-to-all back            | Ulysses                                   |
| `exchange_rows` (the same, of uneven parts) | the same, back | experts                              |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.device import is_host
from megalith.distributed.context import Axis
from megalith.distributed.p2p import AsyncHandle

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# 2.13 deprecates the long names, 2.11 lacks the short ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LARGE = 1 << 18  # bytes; below, an all-gather of gloo takes no longer than broadcasts


def _start(axis: Axis, operation: str, tensor: Tensor | None, call: Callable[[], Any], detail: str = "") -> Any:
    if axis.group is None:
        if axis.planned is None:  # torch would take all ranks instead, without an error
            raise RuntimeError(f"{operation} on axis {axis.name} of {axis.size} ranks, which has no process group")
        return axis.planned(operation, axis, tensor)
    if axis.observer is not None:
        axis.observer.before(operation, axis, tensor, detail)
    work = call()
    if axis.observer is not None:
        axis.observer.after(operation, axis)
    return work


class _Works:
    """Several work handles as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> AsyncHandle:
    """Start reducing contiguous `x` in place ("sum", "max" or "min"); do not touch its memory until `wait`."""
    if axis.size == 1:
        return AsyncHandle(x)
    assert x.is_contiguous(), "a collective in place needs contiguous memory"
    work = _start(
        axis,
        "all_reduce",
        x,
        lambda: dist.all_reduce(x, _OPERATIONS[operation], group=axis.group, async_op=True),
        operation,
    )
    return AsyncHandle(x, work, axis.observer, keep=x)


def all_reduce(x: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """Reduce `x` over the ranks, in place if it is contiguous; return the result."""
    return start_all_reduce(x.contiguous(), axis, operation).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0, out: Tensor | None = None) -> AsyncHandle:
    """Start concatenating the equal chunks of all ranks along `dim`; into `out` (dim 0 only) if given."""
    if axis.size == 1:
        return AsyncHandle(x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty(axis.size * part.shape[0], *part.shape[1:]) if out is None else out
    gather = _gather_in_place if is_host(part.device) and whole.nbytes >= _LARGE else _gather
    work = _start(axis, "all_gather", part, lambda: gather(whole, part, axis))
    return AsyncHandle(
        whole, work, axis.observer, keep=part, finish=None if dim == 0 else lambda whole: whole.movedim(0, dim)
    )


def _gather(whole: Tensor, part: Tensor, axis: Axis) -> Any:
    return _all_gather(whole, part, group=axis.group, async_op=True)


def _gather_in_place(whole: Tensor, part: Tensor, axis: Axis) -> _Works:
    """Broadcast the chunk of each rank: gloo gathers into a copy, which takes up to 4 times as long."""
    chunks = whole.detach().view(-1).view(torch.uint8).chunk(axis.size)  # bytes, whatever dtypes gloo knows
    if chunks[axis.index].data_ptr() != part.data_ptr():
        chunks[axis.index].copy_(part.detach().view(-1).view(torch.uint8))
    return _Works(
        [dist.broadcast(chunk, group_src=rank, group=axis.group, async_op=True) for rank, chunk in enumerate(chunks)]
    )


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return the equal chunks of all ranks, concatenated along `dim`."""
    return start_all_gather(x, axis, dim).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> AsyncHandle:
    """Start summing `x` over the ranks, keeping this rank's chunk of dimension 0; if in `out`, `x` is overwritten."""
    if axis.size == 1:
        return AsyncHandle(x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
    whole = x.contiguous()
    assert whole.shape[0] % axis.size == 0, f"dimension 0 of {tuple(x.shape)} over {axis.size} ranks"
    if is_host(whole.device):
        return _reduce_in_place(whole.clone() if out is None and whole is x else whole, axis, out)
    part = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:]) if out is None else out
    work = _start(axis, "reduce_scatter", whole, lambda: _reduce_scatter(part, whole, group=axis.group, async_op=True))
    return AsyncHandle(part, work, axis.observer, keep=whole)


def _reduce_in_place(whole: Tensor, axis: Axis, out: Tensor | None) -> AsyncHandle:
    """Sum all of it: gloo's reduce-scatter does the same, in a copy, and takes up to twice as long."""
    own = own_part(whole, axis)
    in_place = out is not None and own.data_ptr() == out.data_ptr()
    work = _start(axis, "reduce_scatter", whole, lambda: dist.all_reduce(whole, group=axis.group, async_op=True))
    return AsyncHandle(
        own,
        work,
        axis.observer,
        keep=whole,
        finish=None if in_place else lambda own: own.clone() if out is None else out.copy_(own),
    )


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Split `x` along `split_dim`, send chunk r to rank r, and concatenate what is received along `concat_dim`."""
    if axis.size == 1:
        return x
    sent = torch.stack(x.chunk(axis.size, dim=split_dim))
    received = torch.empty_like(sent)
    _start(axis, "all_to_all", sent, lambda: dist.all_to_all_single(received, sent, group=axis.group))
    return torch.cat(received.unbind(0), dim=concat_dim)


def all_to_all_rows(x: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
    """Send `send_counts[r]` consecutive rows of `x` to each rank r; return the rows received, in rank order."""
    if axis.size == 1:
        return x
    sent, received = x.contiguous(), x.new_empty(sum(receive_counts), *x.shape[1:])
    _start(
        axis,
        "all_to_all_rows",
        None,
        lambda: dist.all_to_all_single(received, sent, receive_counts, send_counts, group=axis.group),
        f"rows of {list(x.shape[1:])} {x.dtype}",
    )
    return received


def start_ring_shift(x: Tensor, axis: Axis) -> AsyncHandle:
    """Start sending `x` to the next rank of the axis and receiving a tensor of its shape from the previous one.

    The last rank sends to the first. Do not write to `x` until `wait`. Send and receive are posted together, so that no
    order of the ranks can deadlock; all ranks of the axis call this equally often.
    """
    if axis.size == 1:
        return AsyncHandle(x)
    sent = x.contiguous()
    received = torch.empty_like(sent)
    to, source = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]

    def call() -> _Works:
        both = [
            dist.P2POp(dist.isend, sent, to, group=axis.group),
            dist.P2POp(dist.irecv, received, source, group=axis.group),
        ]
        return _Works(dist.batch_isend_irecv(both))

    work = _start(axis, "ring_shift", sent, call)
    return AsyncHandle(received, work, axis.observer, keep=sent)


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite contiguous `x` with that of the `source`-th rank of the axis."""
    if axis.size > 1:
        assert x.is_contiguous(), "a collective in place needs contiguous memory"
        _start(axis, "broadcast", x, lambda: dist.broadcast(x, axis.ranks[source], group=axis.group))
    return x


def all_gather_objects(item: Any, axis: Axis) -> list[Any]:
    """Return the objects of all ranks of the axis, in order. Uses pickle: for our own ranks, never for files."""
    if axis.size == 1:
        return [item]
    items: list[Any] = [None] * axis.size
    _start(axis, "all_gather_objects", None, lambda: dist.all_gather_object(items, item, group=axis.group))
    return items


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this."""
    if axis.size > 1:
        _start(axis, "barrier", None, lambda: dist.barrier(group=axis.group))


def own_part(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's equal chunk along `dim`."""
    return x.chunk(axis.size, dim=dim)[axis.index] if axis.size > 1 else x


class _Pair(torch.autograd.Function):
    """Operation whose backward pass is its conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, do: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.undo = undo
        y = do(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.undo(grads[0]), None, None


def _apply(x: Tensor, axis: Axis, do: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor]) -> Tensor:
    if axis.size == 1:
        return x
    y: Tensor = _Pair.apply(x, do, undo)
    return y


def _same(x: Tensor) -> Tensor:
    return x


def _summed(axis: Axis) -> Callable[[Tensor], Tensor]:
    return lambda x: all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def copy_in(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`; sum the gradient over the ranks."""
    return _apply(x, axis, _same, _summed(axis))


def sum_out(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over the ranks; pass the gradient through."""
    return _apply(x, axis, _summed(axis), _same)


def gather_in(x: Tensor, axis: Axis) -> Tensor:
    """Gather along dimension 0 (all-gather); reduce-scatter the gradient."""
    return _apply(x, axis, lambda x: all_gather(x, axis), lambda g: start_reduce_scatter(g, axis).wait())


def scatter_out(x: Tensor, axis: Axis) -> Tensor:
    """Reduce over the ranks and scatter along dimension 0 (reduce-scatter); all-gather the gradient."""
    return _apply(x, axis, lambda x: start_reduce_scatter(x, axis).wait(), lambda g: all_gather(g, axis))


def exchange(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Run `all_to_all`; send the gradient back in the same way."""
    return _apply(
        x,
        axis,
        lambda x: all_to_all(x, axis, split_dim, concat_dim),
        lambda g: all_to_all(g, axis, concat_dim, split_dim),
    )


def exchange_rows(x: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
    """Run `all_to_all_rows`; send the gradient back in the same way."""
    return _apply(
        x,
        axis,
        lambda x: all_to_all_rows(x, axis, send_counts, receive_counts),
        lambda g: all_to_all_rows(g, axis, receive_counts, send_counts),
    )
