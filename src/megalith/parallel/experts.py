"""Expert parallelism: token dispatchers for ranks that each hold a part of the experts (port: `nn.moe.dispatch`).

The ranks of the axis are data- and context-parallel ones (`layout`), with different tokens. Each holds an equal
range of the experts, E / n of n ranks. Two exchanges, for T tokens of each rank with K choices, rows of D elements:

| dispatcher  | dispatch (forward)                    | combine (forward)     | rows received in both    |
|-------------|---------------------------------------|-----------------------|--------------------------|
| `AllGather` | all tokens to all ranks               | sums reduce-scattered | 2 (n - 1) T              |
| `AllToAll`  | to the ranks that hold its experts    | sums of each rank     | 2 T min(K, n - 1) at most |

The backward pass sends the same rows in the other direction. `AllToAll` sends a token once to each other rank that
holds any of its experts and receives one sum back, the fewest rows possible. With many choices and few ranks
both send nearly all rows to all ranks, and `AllGather` needs no synchronisation with the host for the row counts.

Under tensor parallelism the layer enters its region before dispatch and leaves it after combine: the ranks of the axis
hold equal shards of their experts, and rows are sent between ranks of the same shard.

Each rank's router chooses the experts of its tokens, and applies the capacity to them.

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
from megalith.layout import shard_range
from megalith.nn.moe.balance import Peers
from megalith.nn.moe.dispatch import LOCAL_DISPATCHER, DispatchedTokens, Dispatcher
from megalith.nn.moe.permutation import Order, from_experts, order_by_expert, to_experts
from megalith.nn.moe.routing import count_choices
from megalith.nn.region import SOLO
from megalith.parallel.tensor import SequenceParallel


class _ExpertParallelDispatcher(Dispatcher):
    """Each rank of an axis has an equal range of the experts."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def local_experts(self, experts: int) -> range:
        if experts % self._axis.size:
            raise LayoutError(
                f"--num-experts {experts} is not divisible by --expert-model-parallel-size {self._axis.size}"
            )
        return range(*shard_range(experts, self._axis.size, self._axis.index))


class AllGather(_ExpertParallelDispatcher):
    """Gather all tokens on every rank; reduce-scatter the outputs of its experts."""

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> DispatchedTokens:
        axis = self._axis
        arriving = comm.start_all_gather(experts_TK, axis)
        x_TD, weights_TK = comm.gather_in(x_TD, axis), comm.gather_in(weights_TK, axis)
        order = _order_local(arriving.wait(), self.local_experts(experts))
        return DispatchedTokens(
            to_experts(x_TD, order),
            order.rows_of(weights_TK),
            order.counts_E,
            lambda y_ND: comm.scatter_out(from_experts(y_ND, order), axis),
        )


class AllToAll(_ExpertParallelDispatcher):
    """Send every token to the ranks that hold its experts, once to each."""

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> DispatchedTokens:
        axis, here = self._axis, self.local_experts(experts)
        ranks_TK = experts_TK // len(here)  # a dropped choice has index axis.size, after the last rank
        again_TK = (ranks_TK.unsqueeze(2) == ranks_TK.unsqueeze(1)).tril(-1).any(2)
        chosen_TK = ranks_TK.masked_fill(again_TK, axis.size)
        going_R = count_choices(chosen_TK.flatten(), axis.size + 1)[: axis.size]
        coming_R = comm.all_to_all(going_R, axis, split_dim=0, concat_dim=0)
        going, coming = torch.stack((going_R, coming_R)).tolist()
        leaving = order_by_expert(chosen_TK, axis.size, going)
        numbers_RK = comm.all_to_all_rows(experts_TK.index_select(0, leaving.token_N), axis, going, coming)
        weights_RK = comm.exchange_rows(to_experts(weights_TK, leaving), axis, going, coming)
        rows_RD = comm.exchange_rows(to_experts(x_TD, leaving), axis, going, coming)
        order = _order_local(numbers_RK, here)
        return DispatchedTokens(
            to_experts(rows_RD, order),
            order.rows_of(weights_RK),
            order.counts_E,
            lambda y_ND: from_experts(comm.exchange_rows(from_experts(y_ND, order), axis, coming, going), leaving),
        )


def _order_local(experts_TK: Tensor, here: range) -> Order:
    """Sort the choices of local experts by expert; drop the others."""
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
    """Return the dispatcher of `--moe-token-dispatcher-type` for an expert-parallel group."""
    return LOCAL_DISPATCHER if axis.size == 1 else DISPATCHERS[kind](axis)


class TokenPeers(Peers):
    """Sums over the axes whose ranks hold other tokens.

    Args:
        sequence_parallel: whether tensor-parallel ranks hold parts of the sequences.
        exchange: token dispatcher, a key of `parallel.experts.DISPATCHERS`.

    If experts are sharded over other ranks than the layers (`--expert-tensor-parallel-size`), these ranks have
    different tokens, of the same sequences or of others: for the experts they are like sequence-parallel ranks.
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
