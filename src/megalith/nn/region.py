"""The port through which tensor parallelism enters model code.

A tensor-parallel layer is an ordinary layer between two conjugate operators, f and g of Shoeybi et al. 2019
(arXiv:1909.08053). Both are made of the same two movements of data, which are the transposes of each other:

| region           | `gather`                   | `reduce`               |
|------------------|----------------------------|-------------------------|
| `Solo`           | identity                   | identity                |
| tensor parallel  | identity                   | sum over ranks          |
| sequence parallel| all-gather of the sequence | reduce-scatter of it    |

`enter` (f) gathers forward and reduces backward, `leave` (g) the reverse. A layer gets its shard of each dimension from
its region and calls these around its math; it never names a rank, a process group or a collective. The linears, whose
backward pass overlaps these movements with its products, are in `nn.linear` (`column`, `row`). A
sharded vocabulary also needs a maximum and a sum over the ranks (docs/decisions/0005).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.nn.placement import Shard


class AsyncHandle(Protocol):
    """Handle of a communication that may still be running, like `torch.distributed.Work` with its result."""

    def wait(self) -> Tensor:
        """Wait for the communication and return the tensor."""
        ...


@dataclass(slots=True)
class Ready:
    """An `AsyncHandle` that needs no wait."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class Region:
    """The tensor-parallel ranks that share a layer, as the layer sees them. This base class is one device.

    Attributes:
        size: number of ranks that share the layer.
        index: of this rank among them.
        needs_grad_reduce: gradients of replicated parameters are partial sums that are all-reduced over the ranks
            after the backward passes (sequence parallelism).
        name: by which the operators of compiled layers find this region (nn.operators); None without them.
    """

    size = 1
    index = 0
    needs_grad_reduce = False
    name: str | None = None

    def shard(self, extent: int, *, even: bool = True, share: bool = False) -> Shard:
        """Return the part of `extent` held here; arguments and errors are those of `placement.shard`."""
        return Shard(0, extent)

    def gather(self, x: Tensor) -> AsyncHandle:
        """Start gathering hidden states for the sharded layers; `x` must not be changed before the wait."""
        return Ready(x)

    def reduce(self, x: Tensor) -> AsyncHandle:
        """Start reducing the partial sums `x` of all ranks to hidden states; the memory of `x` may be reused."""
        return Ready(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, without a gradient."""
        return x

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; the gradient passes."""
        return x

    def local_sequence(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the part of a whole sequence along `dim` whose hidden states are on this rank."""
        return x

    def hidden_rng(self, dropout: float) -> AbstractContextManager[None]:
        """Enter around random draws for hidden states: equal on ranks that hold the same states, else separate.

        With a `dropout` probability of 0 there are no draws and nothing is done.
        """
        return nullcontext()

    def local_rng(self, dropout: float) -> AbstractContextManager[None]:
        """Enter around random draws for what only this rank computes, such as its attention heads."""
        return nullcontext()

    def replay(self) -> AbstractContextManager[None]:
        """Enter around a recomputation: `local_rng` repeats its draws in it, and continues afterwards as without."""
        return nullcontext()


class Solo(Region):
    """The region of one device."""


SOLO = Solo()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        y = region.gather(x).wait()
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.reduce(grads[0].clone(memory_format=torch.contiguous_format)).wait(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.reduce(x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.gather(grads[0]).wait(), None


def enter(x: Tensor, region: Region) -> Tensor:
    """Gather hidden states for sharded layers (operator f); backward sums the gradients over the ranks."""
    if region.size == 1:
        return x
    if region.name is not None and torch.compiler.is_compiling():
        from megalith.nn import operators  # it loads the compiler

        return operators.gather(x, region.name)
    y: Tensor = _Enter.apply(x, region)
    return y


def leave(x: Tensor, region: Region) -> Tensor:
    """Reduce the partial outputs of sharded layers to hidden states (operator g)."""
    if region.size == 1:
        return x
    if region.name is not None and torch.compiler.is_compiling():
        from megalith.nn import operators  # it loads the compiler

        return operators.reduce(x, region.name)
    y: Tensor = _Leave.apply(x, region)
    return y
