"""The ranks that see other tokens, over which the load of experts is balanced, and that may hold other experts.

They are the port `nn.moe.balance.Peers`.

| ranks                        | hidden states that a router sees       |
|------------------------------|----------------------------------------|
| tensor parallel              | the same                               |
| sequence parallel, context parallel | parts of the same sequences     |
| data parallel                | other sequences                        |
"""

from __future__ import annotations

from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.nn.region import SOLO, Region
from megalith.parallel.experts import dispatcher
from megalith.parallel.tensor import SequenceParallel


class TokenPeers:
    """Sums over the axes whose ranks hold other tokens.

    Args:
        context: the ranks.
        sequence_parallel: whether tensor-parallel ranks hold parts of the sequences.
        exchange: how tokens reach experts on other ranks, a key of `parallel.experts.DISPATCHERS`.

    Where experts are shared by other ranks than the layers, these have tokens of their own, be they parts of the same
    sequences or others: to an expert's layers they are what sequence-parallel ranks are.
    """

    def __init__(self, context: ParallelContext, *, sequence_parallel: bool, exchange: str = "allgather") -> None:
        self._sharing: list[Axis] = [context.cp, *([context.tp] if sequence_parallel else [])]
        self._replicas = context.dp
        self.dispatcher = dispatcher(exchange, context.ep)
        self.region_of_experts: Region | None = None
        if context.layout.expert_tp != context.layout.tp:
            self.region_of_experts = SOLO if context.etp.size == 1 else SequenceParallel(context.etp)

    @property
    def sharing(self) -> int:
        size = 1
        for axis in self._sharing:
            size *= axis.size
        return size

    @property
    def all(self) -> int:
        return self.sharing * self._replicas.size

    def sum_of_micro_batch(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        for axis in self._sharing:
            x = comm.all_reduce(x, axis)
        return x

    def all_of_micro_batch(self, x: Tensor) -> Tensor:
        x = x.detach()
        for axis in self._sharing:
            x = comm.all_gather(x, axis)
        return x

    def sum_of_step(self, x: Tensor) -> Tensor:
        return comm.all_reduce(self.sum_of_micro_batch(x), self._replicas)
