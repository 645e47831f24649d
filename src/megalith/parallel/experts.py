"""Expert parallelism: the ranks of one axis hold a part of the experts each, the adapters of `nn.moe.dispatch`.

The ranks of the axis are data- and context-parallel ones (`layout`), with tokens of their own. Each holds an equal
range of the experts, E / n of n ranks. Two ways for the tokens, T of each rank with K choices, rows of D numbers:

| dispatcher  | forward, there                        | forward, back         | rows received, both ways |
|-------------|---------------------------------------|-----------------------|--------------------------|
| `AllGather` | all tokens to all ranks               | sums reduce-scattered | 2 (n - 1) T              |
| `AllToAll`  | to the ranks that have experts of it  | sums of each rank     | 2 T min(K, n - 1) at most |

Backward the same rows move the other way. `AllToAll` sends a token once to each other rank that has experts of it,
however many these are, and gets one sum back: no dispatcher can do with fewer rows. With many choices and few ranks
both send nearly all to all, and `AllGather` needs no numbers on the host first.

Under tensor parallelism the layer's region is entered before and left behind: the ranks of the axis hold equal shards
of their experts then, and rows travel between ranks of the same shard.

Which rows an expert gets is decided where the router is, and so is a capacity: it holds for the tokens of each rank.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (GShard), section 3; the two ways are Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.errors import LayoutError
from megalith.layout import cut
from megalith.nn.moe.balance import Peers
from megalith.nn.moe.dispatch import HERE, Delivery, Dispatcher
from megalith.nn.moe.permutation import Order, from_experts, order_by_expert, to_experts
from megalith.nn.region import SOLO
from megalith.parallel.tensor import SequenceParallel


class _Divided(Dispatcher):
    """Each rank of an axis has an equal range of the experts."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def here(self, experts: int) -> range:
        if experts % self._axis.size:
            raise LayoutError(
                f"--num-experts {experts} is not divisible by --expert-model-parallel-size {self._axis.size}"
            )
        return range(*cut(experts, self._axis.size, self._axis.index))


class AllGather(_Divided):
    """Every rank sees all tokens and computes what its experts give to them."""

    def deliver(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Delivery:
        axis = self._axis
        arriving = comm.start_all_gather(experts_TK, axis)
        x_TD, weights_TK = comm.gather_in(x_TD, axis), comm.gather_in(weights_TK, axis)
        order = _order_here(arriving.wait(), self.here(experts))
        return Delivery(
            to_experts(x_TD, order),
            order.rows_of(weights_TK),
            order.counts_E,
            lambda y_ND: comm.scatter_out(from_experts(y_ND, order), axis),
        )


class AllToAll(_Divided):
    """Every token travels to the ranks that have experts of it, once to each."""

    def deliver(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Delivery:
        axis, here = self._axis, self.here(experts)
        ranks_TK = experts_TK // len(here)  # a choice that is dropped has the number behind the last rank's
        again_TK = (ranks_TK.unsqueeze(2) == ranks_TK.unsqueeze(1)).tril(-1).any(2)
        leaving = order_by_expert(ranks_TK.masked_fill(again_TK, axis.size), axis.size)
        going = leaving.counts_E
        counts_R = torch.tensor(going, device=x_TD.device)
        coming: list[int] = comm.all_to_all(counts_R, axis, split_dim=0, concat_dim=0).tolist()
        numbers_RK = comm.all_to_all_rows(experts_TK.index_select(0, leaving.token_N), axis, going, coming)
        weights_RK = comm.exchange_rows(to_experts(weights_TK, leaving), axis, going, coming)
        rows_RD = comm.exchange_rows(to_experts(x_TD, leaving), axis, going, coming)
        order = _order_here(numbers_RK, here)
        return Delivery(
            to_experts(rows_RD, order),
            order.rows_of(weights_RK),
            order.counts_E,
            lambda y_ND: from_experts(comm.exchange_rows(from_experts(y_ND, order), axis, coming, going), leaving),
        )


def _order_here(experts_TK: Tensor, here: range) -> Order:
    """The choices of experts that are here, in their order; the others are left out."""
    own_TK = experts_TK - here.start
    return order_by_expert(own_TK.where((own_TK >= 0) & (own_TK < len(here)), len(here)), len(here))


DISPATCHERS: Mapping[str, Callable[[Axis], Dispatcher]] = {
    "allgather": AllGather,
    "alltoall": AllToAll,
    "flex": AllToAll,  # Megatron's kernels for some machines do the same
    "alltoall_seq": AllToAll,  # the same in another order of gathering
}
"""By `--moe-token-dispatcher-type`."""


def dispatcher(kind: str, axis: Axis) -> Dispatcher:
    """How tokens reach the experts that the ranks of an axis share."""
    return HERE if axis.size == 1 else DISPATCHERS[kind](axis)


class TokenPeers(Peers):
    """Sums over the axes whose ranks hold other tokens.

    Args:
        sequence_parallel: whether tensor-parallel ranks hold parts of the sequences.
        exchange: how tokens reach experts on other ranks, a key of `parallel.experts.DISPATCHERS`.

    Where experts are shared by other ranks than the layers, these have tokens of their own, be they parts of the same
    sequences or others: to an expert's layers they are what sequence-parallel ranks are.
    """

    def __init__(self, context: ParallelContext, *, sequence_parallel: bool, exchange: str = "allgather") -> None:
        self._sharing: list[Axis] = [context.cp, *([context.tp] if sequence_parallel else [])]
        self._replicas = context.dp
        self.sharing = prod(axis.size for axis in self._sharing)
        self.all = self.sharing * context.dp.size
        self.dispatcher = dispatcher(exchange, context.ep)
        if context.layout.expert_tp != context.layout.tp:
            self.region_of_experts = SOLO if context.etp.size == 1 else SequenceParallel(context.etp)

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
