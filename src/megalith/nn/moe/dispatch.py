"""Token dispatch, the port of expert parallelism: rows of tokens go to their experts and are combined again.

A rank holds a range of the experts of every layer. A dispatcher returns rows of tokens, its own and those of other
ranks, in the order of the local experts; their outputs go back to the ranks that sent the tokens, where the rows of a
token are summed. `LOCAL_DISPATCHER` is the dispatcher of a rank that holds all experts.

Shapes: T tokens of this rank, K experts for each, N rows for the local experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalith.nn.moe.permutation import from_experts, order_by_expert, to_experts


@dataclass(frozen=True)
class DispatchedTokens:
    """Rows of tokens in the order of the local experts.

    Attributes:
        counts: number of rows of each local expert; may be 0.
        combine: outputs of the experts [N, D] -> for each token of this rank the sum of its rows [T, D].
    """

    rows_ND: Tensor
    weights_N: Tensor
    counts: list[int]
    combine: Callable[[Tensor], Tensor]


class Dispatcher:
    """Exchange of tokens with the ranks that hold their experts; this base class has all experts on this rank."""

    def local_experts(self, experts: int) -> range:
        """Return the indices of the experts on this rank, of `experts` in the layer."""
        return range(experts)

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> DispatchedTokens:
        """Send tokens to their experts. Collective: every rank of the expert-parallel group calls it.

        Args:
            x_TD: hidden states of the tokens of this rank.
            experts_TK: indices of their experts; `experts` where a choice is dropped.
            weights_TK: router weights of the choices.
            experts: number of experts of the layer, over all ranks.
        """
        order = order_by_expert(experts_TK, experts)
        return DispatchedTokens(
            to_experts(x_TD, order),
            order.rows_of(weights_TK),
            order.counts_E,
            lambda y_ND: from_experts(y_ND, order),
        )


LOCAL_DISPATCHER = Dispatcher()
