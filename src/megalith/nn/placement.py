"""Where the pieces of a parameter live: the vocabulary of every placement table.

A module declares, beside its math, one placement for each of its parameters. The readers are the seeded
initialisation, the checkpoint chunks, the import and export of foreign formats, the extra gradient sums,
the norms and counts, and the documentation. A placement says nothing of ranks: it says along which tensor
dimension the tensor-parallel axis cuts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole tensor."""


@dataclass(frozen=True)
class Split:
    """Tensor-parallel rank r holds the r-th equal part along tensor dimension `dim`."""

    dim: int


@dataclass(frozen=True)
class Fused:
    """`parts` tensors stacked along `dim`, each split on its own, so that a shard is [part 0 shard; part 1 shard; ...].

    The gate and up projections of a gated feed-forward layer are `Fused(dim=0, parts=2)`: cutting the stacked
    tensor into contiguous halves would give one rank all gates and the other all ups.
    """

    dim: int
    parts: int


Placement = Replicated | Split | Fused
