"""The port through which experts on other ranks enter the layer: tokens go to their experts, results come home.

A rank holds a range of the experts of every layer. What a dispatcher delivers are rows of tokens, its own and those of
other ranks, in the order of the experts that are here; what these compute goes back to the ranks that the tokens came
from, where the rows of a token are summed. `HERE` is the dispatcher of a rank that holds all experts.

Shapes: T tokens here, K experts for each, N rows that are delivered, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalith.nn.moe.permutation import from_experts, order_by_expert, to_experts


@dataclass(frozen=True)
class Delivery:
    """Rows of tokens in the order of the experts that are here.

    Attributes:
        counts: rows of each expert; any of them may be 0.
        home: what the experts made of the rows [N, D] -> for each token that was sent the sum of its rows [T, D].
    """

    rows_ND: Tensor
    weights_N: Tensor
    counts: list[int]
    home: Callable[[Tensor], Tensor]


class Dispatcher:
    """How tokens reach their experts, gradients the same ways back; here all experts are on this rank."""

    def here(self, experts: int) -> range:
        """Return the numbers of the experts on this rank, of `experts` in all."""
        return range(experts)

    def deliver(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Delivery:
        """Bring tokens to their experts. Every rank that shares the experts calls this equally often.

        Args:
            x_TD: hidden states of the tokens here.
            experts_TK: numbers of their experts, `experts` where a choice is dropped.
            weights_TK: of the choices.
            experts: of the layer, on all ranks.
        """
        order = order_by_expert(experts_TK, experts)
        return Delivery(
            to_experts(x_TD, order),
            order.rows_of(weights_TK),
            order.counts_E,
            lambda y_ND: from_experts(y_ND, order),
        )


HERE = Dispatcher()
