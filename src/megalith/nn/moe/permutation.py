"""The way of tokens to their experts and back: rows in the order of the experts, and the sum of what comes back.

Each of the two movements is the transpose of the other, and both are gathers, forward and backward: nothing is added
in an order that a device chooses, so that a repetition gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.nn.moe.routing import count_choices


@dataclass(frozen=True)
class Order:
    """Rows of tokens in the order of their experts.

    Attributes:
        slot_N: the choice of each row, counted through [T, K].
        row_TK: the row of each choice of each token, N where the choice is dropped.
        counts_E: rows of each expert.
    """

    slot_N: Tensor
    row_TK: Tensor
    counts_E: list[int]

    @property
    def token_N(self) -> Tensor:
        """Token of each row; a token is in as many rows as experts take it."""
        return torch.div(self.slot_N, self.row_TK.shape[1], rounding_mode="floor")

    @property
    def dropped(self) -> bool:
        """True if any choice is left out."""
        return self.slot_N.numel() < self.row_TK.numel()

    def rows_of(self, values_TK: Tensor) -> Tensor:
        """Return the entries of the choices in the order of the rows, [N]; the gradient passes."""
        return values_TK.flatten().index_select(0, self.slot_N)


def order_by_expert(experts_TK: Tensor, experts: int, counts_E: list[int] | None = None) -> Order:
    """Sort the choices [T, K] by expert, tokens of one expert in their own order.

    A choice of an expert beyond the last, number `experts`, is dropped. `counts_E` are the numbers of tokens of the
    experts; where they are left out, the host waits for the device to read them.
    """
    tokens, chosen = experts_TK.shape
    flat = experts_TK.flatten()
    slots = flat.sort(stable=True).indices
    counts = count_choices(flat, experts + 1).tolist()[:experts] if counts_E is None else counts_E
    rows = sum(counts)
    row_of_slot = torch.empty_like(slots)
    row_of_slot[slots] = torch.arange(slots.numel(), device=slots.device)
    return Order(slots[:rows], row_of_slot.clamp_(max=rows).view(tokens, chosen), counts)


def _sum_of_rows(x_ND: Tensor, order: Order) -> Tensor:
    """Sum the rows of each token: [N, D] -> [T, D]."""
    if order.dropped:
        x_ND = torch.cat([x_ND, x_ND.new_zeros(1, x_ND.shape[1])])
    total_TD = x_ND.index_select(0, order.row_TK[:, 0])
    for choice in range(1, order.row_TK.shape[1]):
        total_TD += x_ND.index_select(0, order.row_TK[:, choice])
    return total_TD


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x_TD.index_select(0, order.token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_of_rows(grads[0], ctx.order), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _sum_of_rows(x_ND, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.order.token_N), None


def to_experts(x_TD: Tensor, order: Order) -> Tensor:
    """Permute tokens into the order of their experts. [T, D] -> [N, D]."""
    y: Tensor = _ToExperts.apply(x_TD, order)
    return y


def from_experts(x_ND: Tensor, order: Order) -> Tensor:
    """Sum the outputs of each token's experts. [N, D] -> [T, D]; zeros for a token that all dropped."""
    y: Tensor = _FromExperts.apply(x_ND, order)
    return y
