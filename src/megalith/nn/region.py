"""The port through which tensor parallelism enters model code.

A tensor-parallel layer is an ordinary layer between two conjugate operators, f and g of Shoeybi et al. 2019
(arXiv:1909.08053). Both are made of the same two movements of data, which are the transposes of each other:

| region           | `spread`                   | `collect`               |
|------------------|----------------------------|-------------------------|
| `Solo`           | identity                   | identity                |
| tensor parallel  | identity                   | sum over ranks          |
| sequence parallel| all-gather of the sequence | reduce-scatter of it    |

`enter` (f) spreads forward and collects backward, `leave` (g) the reverse. A layer asks its region how much of each
dimension it holds and calls these around its math; it never names a rank, a group or a collective. The linears, whose
backward pass overlaps these movements with its products, are in `nn.linear` (`column`, `row`). What a sharded
vocabulary needs besides, a maximum and a sum over the ranks, is here too (docs/decisions/0005).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.nn.placement import Shard


class Pending(Protocol):
    """A tensor that may still be on its way."""

    def wait(self) -> Tensor:
        """The tensor, complete."""
        ...


@dataclass(slots=True)
class Ready:
    """A tensor that is there."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class Region:
    """What a layer may know of the ranks that share it; as it stands here, one device: nothing moves.

    Attributes:
        size: number of ranks that share the layer.
        index: of this rank among them.
        partial_gradients: gradients of replicated parameters are partial, to be summed over the ranks.
    """

    size = 1
    index = 0
    partial_gradients = False

    def shard(self, extent: int, *, even: bool = True, share: bool = False) -> Shard:
        """Return the part of `extent` held here; arguments and errors are those of `placement.shard`."""
        return Shard(0, extent)

    def spread(self, x: Tensor) -> Pending:
        """Start handing hidden states to the sharded layers; `x` stays untouched until the wait."""
        return Ready(x)

    def collect(self, x: Tensor) -> Pending:
        """Start making hidden states of the partial sums `x` of all ranks; may be done in the memory of `x`."""
        return Ready(x)

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, without a gradient."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; the gradient passes."""
        return x

    def own_sequence(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the part of a whole sequence along `dim` whose hidden states are on this rank."""
        return x

    def hidden_draws(self, dropout: float) -> AbstractContextManager[None]:
        """Enter around random draws for hidden states: equal on ranks that hold the same states, else separate.

        With a `dropout` probability of 0 there are no draws and nothing is done.
        """
        return nullcontext()

    def own_draws(self, dropout: float) -> AbstractContextManager[None]:
        """Enter around random draws for what only this rank computes, such as its attention heads."""
        return nullcontext()

    def replay(self) -> AbstractContextManager[None]:
        """Enter around a recomputation: `own_draws` repeats its draws in it, and continues afterwards as without."""
        return nullcontext()


class Solo(Region):
    """The region of one device."""


SOLO = Solo()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        y = region.spread(x).wait()
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.collect(grads[0].clone(memory_format=torch.contiguous_format)).wait(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.collect(x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.spread(grads[0]).wait(), None


def enter(x: Tensor, region: Region) -> Tensor:
    """The operator f: hands hidden states to sharded layers, and sums the gradients that these return."""
    if region.size == 1:
        return x
    y: Tensor = _Enter.apply(x, region)
    return y


def leave(x: Tensor, region: Region) -> Tensor:
    """The operator g: makes hidden states of the partial outputs of sharded layers."""
    if region.size == 1:
        return x
    y: Tensor = _Leave.apply(x, region)
    return y
