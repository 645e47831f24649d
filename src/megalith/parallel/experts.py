"""Expert parallelism: the ranks of one axis hold a part of the experts each, the adapters of `nn.moe.dispatch`.

The ranks of the axis are data- and context-parallel ones (`layout`), with tokens of their own. Each holds an equal
range of the experts, E / n of n ranks. Two ways for the tokens, T of each rank with K choices, rows of D numbers:

| dispatcher  | forward, there                        | forward, back         | rows received, both ways     |
|-------------|---------------------------------------|-----------------------|------------------------------|
| `AllGather` | all tokens to all ranks               | sums reduce-scattered | 2 (n - 1) T                  |
| `AllToAll`  | each choice to the rank of its expert | the same way          | 2 K T (n - 1) / n on average |

Backward the same rows move the other way. No token can do with less than one row for each other rank that has an
expert of it; `AllToAll` sends one for each choice, so that it moves more than that only where two experts of a token
are on one rank. With few ranks and many choices, K > n, `AllGather` moves less.

Under tensor parallelism the layer's region is entered before and left behind: the ranks of the axis hold equal shards
of their experts then, and rows travel between ranks of the same shard.

Which rows an expert gets is decided where the router is, and so is a capacity: it holds for the tokens of each rank.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (GShard), section 3; the two ways are Megatron's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.errors import LayoutError
from megalith.layout import cut
from megalith.nn.moe.dispatch import HERE, Delivery, Dispatcher
from megalith.nn.moe.permutation import from_experts, order_by_expert, to_experts


class _Divided:
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
        axis, here = self._axis, self.here(experts)
        arriving = comm.start_all_gather(experts_TK, axis)
        x_TD, weights_TK = comm.gather_in(x_TD, axis), comm.gather_in(weights_TK, axis)
        own_TK = arriving.wait() - here.start
        order = order_by_expert(own_TK.where((own_TK >= 0) & (own_TK < len(here)), len(here)), len(here))
        return Delivery(
            to_experts(x_TD, order),
            order.rows_of(weights_TK),
            order.counts_E,
            lambda y_ND: comm.scatter_out(from_experts(y_ND, order), axis),
        )


class AllToAll(_Divided):
    """Every choice travels to the rank of its expert."""

    def deliver(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Delivery:
        axis, here = self._axis, self.here(experts)
        order = order_by_expert(experts_TK, experts)
        counts_RL = torch.tensor(order.counts_E, device=x_TD.device).view(axis.size, len(here))
        coming_RL = comm.all_to_all(counts_RL, axis, split_dim=0, concat_dim=0)
        experts_N = torch.arange(len(here), device=x_TD.device).repeat(axis.size).repeat_interleave(coming_RL.flatten())
        going, coming = counts_RL.sum(1).tolist(), coming_RL.sum(1).tolist()
        weights_N = comm.exchange_rows(order.rows_of(weights_TK), axis, going, coming)
        rows_ND = comm.exchange_rows(to_experts(x_TD, order), axis, going, coming)
        # They come rank by rank, those of each rank in the order of the experts.
        arrived = order_by_expert(experts_N.unsqueeze(1), len(here))
        return Delivery(
            to_experts(rows_ND, arrived),
            arrived.rows_of(weights_N),
            arrived.counts_E,
            lambda y_ND: from_experts(comm.exchange_rows(from_experts(y_ND, arrived), axis, coming, going), order),
        )


DISPATCHERS = {"allgather": AllGather, "alltoall": AllToAll}
"""By `--moe-token-dispatcher-type`."""


def dispatcher(kind: str, axis: Axis) -> Dispatcher:
    """How tokens reach the experts that the ranks of an axis share."""
    return HERE if axis.size == 1 else DISPATCHERS[kind](axis)
