"""Word and learned position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalith.nn.placement import Placement, Replicated, Split
from megalith.nn.sink import GradientSink


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient goes to a sink row by row instead of as a table of mostly zeros."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.sink = sink
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        weight, ids = ctx.saved_tensors
        ctx.sink.rows(weight, ids.flatten(), grads[0].reshape(-1, weight.shape[1]))
        return None, None, None


def lookup(weight: nn.Parameter, ids: Tensor, sink: GradientSink | None) -> Tensor:
    """Return the rows of `weight` that `ids` names. [V, D], [...] -> [..., D]."""
    if sink is None or not torch.is_grad_enabled():
        return nn.functional.embedding(ids, weight)
    rows: Tensor = _Lookup.apply(weight, ids, sink)
    return rows


class Embedding(nn.Module):
    """A table of `rows` vectors of `size` elements. [...] -> [..., size]."""

    def __init__(self, rows: int, size: int, placement: Placement, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype, device=device))
        self.placement = placement
        self.sink: GradientSink | None = None

    def placements(self) -> dict[str, Placement]:
        return {"weight": self.placement}

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(self.weight, ids, self.sink)


class TokenEmbedding(nn.Module):
    """Sum of word and (where positions are learned) position embeddings, sequence first, with dropout.

    Shapes: tokens and positions [B, S] -> [S, B, D].
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        max_positions: int | None,
        dropout: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.word_embeddings = Embedding(vocab_size, hidden_size, Split(0), dtype=dtype, device=device)
        self.position_embeddings = (
            None
            if max_positions is None
            else Embedding(max_positions, hidden_size, Replicated(), dtype=dtype, device=device)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        hidden = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(positions_BS)
        embedded: Tensor = self.dropout(hidden.transpose(0, 1).contiguous())
        return embedded
