"""Tensor and sequence parallelism: the regions in which the ranks of one axis share each layer.

| region             | hidden states between layers | `spread`   | `collect`      | source                         |
|--------------------|------------------------------|------------|----------------|--------------------------------|
| `TensorParallel`   | whole, alike on all ranks    | identity   | all-reduce     | arXiv:1909.08053, section 3    |
| `SequenceParallel` | a part of the sequence each  | all-gather | reduce-scatter | arXiv:2205.05198, section 4    |

Which rows of a parameter are where is said by its placement (nn.placement), how the movements overlap the products by
nn.linear and nn.loss. Here is what moves. What is left for the end of the backward passes, the sum of gradients of rows
that several ranks hold and of which each has computed a part, is in optim.copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.distributed.rng import Stream
from megalith.errors import LayoutError
from megalith.nn.placement import Shard, shard
from megalith.nn.region import Pending, Region


class TensorParallel(Region):
    """Each rank computes a part of every layer for the whole sequence.

    `stream` is where dropout of what only this rank computes draws from; needed where there is any.
    """

    def __init__(self, axis: Axis, stream: Stream | None = None) -> None:
        self.axis, self.stream = axis, stream
        self.size, self.index = axis.size, axis.index

    def shard(self, extent: int, *, even: bool = True, share: bool = False) -> Shard:
        return shard(extent, self.size, self.index, even=even, share=share)

    def collect(self, x: Tensor) -> Pending:
        return comm.start_all_reduce(x.contiguous(), self.axis)

    def largest(self, x: Tensor) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), self.axis, "max")

    def total(self, x: Tensor) -> Tensor:
        return comm.sum_out(x, self.axis)

    def own_draws(self, dropout: float) -> AbstractContextManager[None]:
        if dropout == 0.0:
            return nullcontext()
        if self.stream is None:
            raise LayoutError("dropout over tensor-parallel ranks needs a random stream of each: pass stream=")
        return self.stream.used()

    def replay(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else self.stream.replay()


class SequenceParallel(TensorParallel):
    """As `TensorParallel`, and between the layers each rank holds an equal part of the sequence (dim 0).

    Norms, residuals and dropout work on that part only; the gradients of their weights are parts of the whole ones.
    """

    partial_gradients = True

    def spread(self, x: Tensor) -> Pending:
        return comm.start_all_gather(x, self.axis)

    def collect(self, x: Tensor) -> Pending:
        self._check(x.shape[0])
        return comm.start_reduce_scatter(x, self.axis)

    def own_sequence(self, x: Tensor, dim: int = 0) -> Tensor:
        self._check(x.shape[dim])
        return comm.own_part(x, self.axis, dim)

    def hidden_draws(self, dropout: float) -> AbstractContextManager[None]:
        return self.own_draws(dropout)

    def _check(self, length: int) -> None:
        if length % self.size:
            raise LayoutError(
                f"a sequence of {length} tokens does not divide over {self.size} sequence-parallel ranks; "
                f"use a multiple of {self.size}, or leave --sequence-parallel out"
            )
