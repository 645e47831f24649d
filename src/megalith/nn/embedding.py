"""Word and learned position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.errors import ConfigError
from megalith.nn.dropout import HiddenDropout
from megalith.nn.placement import Placement, Replicated, Shard, Split
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region, leave
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
        ctx.sink.accumulate_embedding(weight, ids.flatten(), grads[0].reshape(-1, weight.shape[1]))
        return None, None, None


def lookup(weight: nn.Parameter, ids: Tensor, sink: GradientSink | None) -> Tensor:
    """Return the rows of `weight` that `ids` names. [V, D], [...] -> [..., D]."""
    if sink is None or not torch.is_grad_enabled():
        return nn.functional.embedding(ids, weight)
    rows: Tensor = _Lookup.apply(weight, ids, sink)
    return rows


def local_rows(ids: Tensor, part: Shard, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the rows of token ids in this rank's shard, and a mask of the ids of other shards.

    Shapes: [...] -> 2 x [...].

    Returns:
        The row of each id, and a mask that is True for ids of other shards. Their row is an arbitrary local one: values
        read from it are masked, and gradients added to it are zero. These rows are spread evenly, since GPUs are slow
        at adding many gradients to one row.

    An id outside the vocabulary stays outside the rows on every rank, so that looking it up fails there as it does on
    one device.
    """
    elsewhere = ((ids >= 0) & (ids < part.start)) | ((ids >= part.stop) & (ids < vocab_size))
    return torch.where(elsewhere, ids % part.size, ids - part.start), elsewhere


class Embedding(nn.Module):
    """A table of `rows` vectors of `size` elements. [...] -> [..., size]."""

    def __init__(self, rows: int, size: int, placement: Placement, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, **factory))
        self.placement = placement
        self.sink: GradientSink | None = None

    def placements(self) -> dict[str, Placement]:
        return {"weight": self.placement}

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(self.weight, ids, self.sink)


class TokenEmbedding(nn.Module):
    """Sum of word and (where there are any) position embeddings, sequence first, with dropout.

    Shapes: tokens and positions [B, S] -> [S, B, D]; where the region holds a part of the sequence, that part of it.
    `hidden_dtype` is that of the sum, and `multiplier` a factor of it; with `num_types` the type of each token (BERT's:
    which of two runs of text it is of) adds a third embedding.

    Each rank looks up the words whose rows it holds, with zeros for the others, and the results are summed over the
    ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        position_embeddings: nn.Module | None,
        dropout: float,
        region: Region,
        *,
        num_types: int = 0,
        multiplier: float = 1.0,
        hidden_dtype: torch.dtype | None = None,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.region, self.vocab_size, self.hidden_dtype = region, vocab_size, hidden_dtype or factory["dtype"]
        self.multiplier = multiplier
        self.part = region.shard(vocab_size, even=False)
        self.word_embeddings = Embedding(self.part.size, hidden_size, Split(0, vocab_size), **factory)
        self.position_embeddings = position_embeddings
        self.tokentype_embeddings = Embedding(num_types, hidden_size, Replicated(), **factory) if num_types else None
        self.dropout = HiddenDropout(dropout, region)

    def _words(self, tokens_BS: Tensor) -> Tensor:
        """Look up the words: [B, S] -> [B, S, D], zero where another rank holds the word."""
        if self.part.size == self.vocab_size:
            words: Tensor = self.word_embeddings(tokens_BS)
            return words
        rows, elsewhere = local_rows(tokens_BS, self.part, self.vocab_size)
        masked: Tensor = self.word_embeddings(rows).masked_fill(elsewhere[..., None], 0.0)
        return masked

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, types_BS: Tensor | None = None) -> Tensor:
        hidden = leave(self._words(tokens_BS).transpose(0, 1), self.region)
        if self.position_embeddings is not None:
            positions = self.region.local_sequence(positions_BS, dim=1)
            found_BSD = self.position_embeddings(positions)
            if found_BSD.shape != (*positions.shape, hidden.shape[-1]):  # of a registered one
                raise ConfigError(
                    f"--position-embedding-type: {type(self.position_embeddings).__name__} returns "
                    f"{list(found_BSD.shape)} for positions {list(positions.shape)}; return [B, S, D], "
                    f"{[*positions.shape, hidden.shape[-1]]}"
                )
            hidden = hidden + found_BSD.transpose(0, 1)
        if self.tokentype_embeddings is not None:
            assert types_BS is not None, "the type of each token is needed"
            types = self.region.local_sequence(types_BS, dim=1)
            hidden = hidden + self.tokentype_embeddings(types).transpose(0, 1)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        hidden = hidden.to(self.hidden_dtype).contiguous()
        if hidden.shape[1] == 1:  # with the strides of the outputs of layers, or the first layer is compiled apart
            hidden = hidden.view(hidden.shape)
        embedded: Tensor = self.dropout(hidden)
        return embedded
