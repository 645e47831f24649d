"""Causal self-attention with grouped key-value heads.

Shapes: S sequence, B batch, D hidden, H query heads, G key-value heads (H is a multiple of G), K head size.
The fused query-key-value projection holds, for each group, its H/G query heads, then its key head, then its value
head (Megatron's layout); with G = H that is q, k, v head by head.

The kernel is passed in; two with the same meaning are here: `attend_fused` (torch SDPA, which stores no scores) and
`attend_unfused`, the arithmetic of Megatron's local implementation step by step, which repeats its half-precision
runs to the last digit.

`SequenceMixer` is the port through which context parallelism enters: attention is the one place of the model where the
positions of a sequence meet. All else works on the positions that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.nn.cache import LayerCache
from megalith.nn.linear import Linear, column, row
from megalith.nn.norm import build_norm
from megalith.nn.placement import GroupedHeads, Split
from megalith.nn.precision import at_least_fp32, matmul, product_dtype
from megalith.nn.region import Region
from megalith.nn.rope import Rotation, rotate

AttentionKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [Q, B, H, K], k [S, B, H, K], v [S, B, H, K], dropout) -> context [Q, B, H, K]; the last query sees every key."""

MASKED_SCORE = -10000.0  # Megatron's fill value; exp of it is 0 in every dtype


@dataclass(frozen=True)
class AttentionShape:
    """Global sizes and options of an attention layer, the same on all ranks."""

    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    dropout: float = 0.0
    rotary_interleaved: bool = False
    norm_epsilon: float = 1e-5


def expand_groups(x_SBGK: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for the query heads of its group. [S, B, G, K] -> [S, B, H, K]."""
    groups = x_SBGK.shape[2]
    return x_SBGK if groups == num_heads else x_SBGK.repeat_interleave(num_heads // groups, dim=2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[Q, S] mask, True where a query may not look: the last query sees every key."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.triu(num_keys - num_queries + 1)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal softmax(q k^T / sqrt(K)) v by torch SDPA. [Q, B, H, K], 2 x [S, B, H, K] -> [Q, B, H, K]."""
    dtype, source = product_dtype(q), q.dtype
    q_BHQK, k_BHSK, v_BHSK = (x.to(dtype).permute(1, 2, 0, 3) for x in (q, k, v))
    square = q.shape[0] == k.shape[0]
    mask = None
    if not square and q.shape[0] > 1:
        mask = ~causal_mask(q.shape[0], k.shape[0], q.device)
    context = nn.functional.scaled_dot_product_attention(
        q_BHQK, k_BHSK, v_BHSK, attn_mask=mask, dropout_p=dropout, is_causal=square
    )
    return context.permute(2, 0, 1, 3).to(source)


def attend_unfused(q: Tensor, k: Tensor, v: Tensor, dropout: float, softmax_in_fp32: bool) -> Tensor:
    """The same, with every intermediate rounded as Megatron's local implementation rounds it.

    Shapes: [Q, B, H, K], 2 x [S, B, H, K] -> [Q, B, H, K].
    Source: spec/training-behaviour.md section 11, point 11.
    """
    num_queries, batch, heads, size = q.shape
    q_NQK, k_NSK, v_NSK = (x.reshape(x.shape[0], batch * heads, size).transpose(0, 1) for x in (q, k, v))
    dtype = product_dtype(q)
    empty = torch.zeros(1, dtype=dtype, device=q.device)
    scores = torch.baddbmm(empty, q_NQK.to(dtype), k_NSK.to(dtype).transpose(1, 2), beta=0.0, alpha=size**-0.5)
    scores = scores.to(q.dtype)
    if softmax_in_fp32:
        scores = scores.to(at_least_fp32(q.dtype))
    scores = scores.masked_fill(causal_mask(num_queries, k.shape[0], q.device), MASKED_SCORE)
    probabilities = nn.functional.dropout(torch.softmax(scores, dim=-1).to(q.dtype), dropout)
    context_NQK = matmul(probabilities, v_NSK)
    return context_NQK.transpose(0, 1).reshape(num_queries, batch, heads, size)


class SequenceMixer(Protocol):
    """How the queries that are here meet the keys and values of their whole sequences."""

    @property
    def parts(self) -> int:
        """In how many parts of equal length each sequence is held."""
        ...

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """The positions that are here of sequences of `length` tokens, in the order in which they are held.

        Shapes: [length / parts], int64, ascending.
        Raises: LayoutError if sequences of this length cannot be divided so.
        """
        ...

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Of whole sequences along `dim` the positions that are here. [.., S, ..] -> [.., S / parts, ..]."""
        ...

    def recall(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to what the cache holds, which keeps the keys and values that are here. Shapes as in `mix`.

        Raises: LayoutError if whole sequences are not here.
        """
        ...

    def mix(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, attend: AttentionKernel) -> Tensor:
        """Causal attention of the positions that are here to all earlier ones of their sequences.

        Shapes: q [S / parts, B, H, K], k and v [S / parts, B, G, K] -> [S / parts, B, H, K].

        Args:
            q, k, v: of the positions that are here; rotated already.
            dropout: probability with which an attention weight becomes zero.
            attend: the kernel for whole sequences, for a mixer that has them.
        """
        ...


class LocalMixer:
    """Whole sequences are here."""

    parts = 1

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        return torch.arange(length, device=device)

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x

    def recall(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cache.attend(q, k, v)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, attend: AttentionKernel) -> Tensor:
        heads = q.shape[2]
        return attend(q, expand_groups(k, heads), expand_groups(v, heads), dropout)


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, causal attention, projection back. [S, B, D] -> [S, B, D]."""

    def __init__(
        self,
        shape: AttentionShape,
        region: Region,
        attend: AttentionKernel = attend_fused,
        *,
        mixer: SequenceMixer | None = None,
        qkv_bias: bool,
        bias: bool,
        norm: str | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the layer; `norm` is the kind of norm of each query and key head, none by default."""
        super().__init__()
        self.shape, self.region, self.attend = shape, region, attend
        self.mixer: SequenceMixer = mixer or LocalMixer()
        self.num_heads = region.shard(shape.num_heads).size
        self.num_groups = region.shard(shape.num_groups, share=True).size
        qkv_size = (self.num_heads + 2 * self.num_groups) * shape.head_size
        self.linear_proj = Linear(
            self.num_heads * shape.head_size, shape.hidden_size, Split(1), bias=bias, dtype=dtype, device=device
        )
        heads = GroupedHeads(shape.num_groups, shape.num_heads // shape.num_groups, shape.head_size)
        self.linear_qkv = Linear(shape.hidden_size, qkv_size, heads, bias=qkv_bias, dtype=dtype, device=device)
        self.q_layernorm = self._head_norm(norm, dtype, device)
        self.k_layernorm = self._head_norm(norm, dtype, device)

    def _head_norm(self, kind: str | None, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
        if kind is None:
            return None
        shape = self.shape
        return build_norm(kind, shape.head_size, shape.norm_epsilon, dtype=dtype, device=device, of_heads=True)

    def _heads(self, x_SBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, D] -> q [S, B, H, K], k and v [S, B, G, K]."""
        (qkv,) = column(x_SBD, self.region, self.linear_qkv)
        per_group = self.num_heads // self.num_groups
        grouped = qkv.view(*qkv.shape[:2], self.num_groups, per_group + 2, self.shape.head_size)
        q, k, v = grouped.split((per_group, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def forward(self, x_SBD: Tensor, turn: Rotation | None, cache: LayerCache | None = None) -> Tensor:
        """Attend to this and earlier positions.

        Args:
            x_SBD: Normalised hidden states of the new positions, those of them that are here.
            turn: Rotary cosines and sines of the new positions, or None.
            cache: Keys and values of earlier positions, which takes the new ones; there is no dropout with it.
        """
        q, k, v = self._heads(x_SBD)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if turn is not None:
            q, k = (rotate(x, turn, interleaved=self.shape.rotary_interleaved) for x in (q, k))
        if cache is not None:
            return row(self.mixer.recall(cache, q, k, v).flatten(2), self.region, self.linear_proj)
        dropout = self.shape.dropout if self.training else 0.0
        with self.region.own_draws(dropout):
            context = self.mixer.mix(q, k, v, dropout, self.attend)
        return row(context.flatten(2), self.region, self.linear_proj)
