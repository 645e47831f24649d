"""Relative positions of T5: a learned number for each head and each bucket of distances is added to the scores.

Near distances have a bucket each, farther ones share buckets that grow with the logarithm, and all beyond a largest
distance share the last. Where queries see later keys too, half of the buckets are theirs.

Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region


def buckets(distances: Tensor, num_buckets: int, max_distance: int, *, both_ways: bool) -> Tensor:
    """Return the bucket of each distance, the position of the key minus that of the query. [...] -> [...], int64.

    The logarithms are in fp32 in the order of Megatron's operations, so that the borders of buckets fall alike.
    """
    first = torch.zeros_like(distances)
    if both_ways:
        num_buckets //= 2
        first = (distances > 0).to(torch.int64) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    grown = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + grown.to(torch.int64)).clamp(max=num_buckets - 1)
    return first + torch.where(distances < exact, distances, far)


class Buckets(nn.Module):
    """The table of all heads [buckets, heads], which every rank holds and applies to its own heads."""

    def __init__(self, num_buckets: int, num_heads: int, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, **factory))

    def placements(self) -> dict[str, Placement]:
        return {"weight": Replicated(partial=True)}


class RelativePositions(nn.Module):
    """What distances add to the scores of the heads that are here; one table for all layers of a stack.

    With `both_ways` queries see later keys too.
    """

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        num_heads: int,
        region: Region,
        *,
        both_ways: bool,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.both_ways = num_buckets, max_distance, both_ways
        self.heads = region.shard(num_heads)
        self.relative_attention_bias = Buckets(num_buckets, num_heads, **factory)

    def forward(self, queries: range, keys: int) -> Tensor:
        """Return the bias of queries at these positions to the first keys. -> [H, Q, S], H heads of this rank."""
        table = self.relative_attention_bias.weight[:, self.heads.start : self.heads.stop]
        here = torch.arange(queries.start, queries.stop, device=table.device)
        distances = torch.arange(keys, device=table.device) - here[:, None]
        chosen = buckets(distances, self.num_buckets, self.max_distance, both_ways=self.both_ways)
        return nn.functional.embedding(chosen, table).permute(2, 0, 1)
