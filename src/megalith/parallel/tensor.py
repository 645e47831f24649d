"""Tensor and sequence parallelism: the regions in which the ranks of one axis share each layer.

| region             | hidden states between layers | `gather`   | `reduce`       | source                         |
|--------------------|------------------------------|------------|----------------|--------------------------------|
| `TensorParallel`   | whole, alike on all ranks    | identity   | all-reduce     | arXiv:1909.08053, section 3    |
| `SequenceParallel` | a part of the sequence each  | all-gather | reduce-scatter | arXiv:2205.05198, section 4    |

The placement of a parameter (nn.placement) says which rows are on which rank; nn.linear and nn.loss overlap the
communication with their products. Gradients of rows that several ranks hold, of which each has computed a partial sum,
are reduced after the backward passes (`parallel.data.reduce_partial_grads`).
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
from megalith.nn.region import AsyncHandle, Region


class TensorParallel(Region):
    """Each rank computes a part of every layer for the whole sequence.

    `stream` is the random stream for dropout in the shards of this rank, such as its attention heads; required if
    the dropout probability is not 0.
    """

    def __init__(self, axis: Axis, stream: Stream | None = None) -> None:
        self.axis, self.stream = axis, stream
        self.size, self.index = axis.size, axis.index

    def shard(self, extent: int, *, even: bool = True, share: bool = False) -> Shard:
        return shard(extent, self.size, self.index, even=even, share=share)

    def reduce(self, x: Tensor) -> AsyncHandle:
        return comm.start_all_reduce(x.contiguous(), self.axis)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), self.axis, "max")

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return comm.sum_out(x, self.axis)

    def local_rng(self, dropout: float) -> AbstractContextManager[None]:
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

    needs_grad_reduce = True

    def gather(self, x: Tensor) -> AsyncHandle:
        return comm.start_all_gather(x, self.axis)

    def reduce(self, x: Tensor) -> AsyncHandle:
        self._check(x.shape[0])
        return comm.start_reduce_scatter(x, self.axis)

    def local_sequence(self, x: Tensor, dim: int = 0) -> Tensor:
        self._check(x.shape[dim])
        return comm.own_part(x, self.axis, dim)

    def hidden_rng(self, dropout: float) -> AbstractContextManager[None]:
        return self.local_rng(dropout)

    def _check(self, length: int) -> None:
        if length % self.size:
            raise LayoutError(
                f"a sequence of {length} tokens does not divide over {self.size} sequence-parallel ranks; "
                f"use a multiple of {self.size}, or leave --sequence-parallel out"
            )
