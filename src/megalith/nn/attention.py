"""Causal self-attention with grouped key-value heads.

Shapes: S sequence, B batch, D hidden, H query heads, G key-value heads (H is a multiple of G), K head size.
The fused query-key-value projection holds, for each group, its H/G query heads, then its key head, then its value
head (Megatron's layout); with G = H that is q, k, v head by head.

The kernel is passed in; two with the same meaning are here: `attend_fused` (torch SDPA, which stores no scores) and
`attend_unfused`, the arithmetic of Megatron's local implementation step by step, which repeats its half-precision
runs to the last digit.

What differs between layers is an `AttentionRule`: the scale of the scores, a window, a sink; and between micro-batches
the documents that attention stays inside of.

`SequenceMixer` is the port through which context parallelism enters: attention is the one place of the model where the
positions of a sequence meet. All else works on the positions that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.nn.cache import LayerCache
from megalith.nn.documents import Documents
from megalith.nn.linear import Linear, column, row
from megalith.nn.norm import build_norm
from megalith.nn.placement import GroupedHeads, Placement, Split
from megalith.nn.precision import at_least_fp32, matmul, product_dtype
from megalith.nn.recompute import recomputed
from megalith.nn.region import Region
from megalith.nn.rope import Rotation, rotate

MASKED_SCORE = -10000.0  # Megatron's fill value; exp of it is 0 in every dtype


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees, and how its scores become weights.

    Attributes:
        scale: of the products of queries and keys; 1 / sqrt(K) if None.
        window: how many positions before its own a query sees; all of them if None.
        sink_H: score of one more key of each head, which every query sees and which has no value; none if None.
        documents: of the sequences, and no query sees a key of another one; None where each is one document.
        layer_scaling: the products are divided by this before they are rounded to the dtype of the queries, and the
            scores multiplied by it afterwards (Megatron's query-key layer scaling); it changes the rounding only.
    """

    scale: float | None = None
    window: int | None = None
    sink_H: Tensor | None = None
    layer_scaling: int = 1
    documents: Documents | None = None

    def scale_of(self, size: int) -> float:
        """The scale of the scores of heads of `size` elements."""
        return float(size**-0.5) if self.scale is None else self.scale

    def limits(self, num_keys: int) -> bool:
        """Whether a query may see fewer than all earlier keys."""
        return self.window is not None and self.window < num_keys - 1

    def hidden(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """[Q, S] mask, True where a query may not look: the last query's own key is the last one.

        With a window of 2:        # hidden      . seen

            . # # # #
            . . # # #
            . . . # #
            # . . . #
            # # . . .
        """
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        offset = num_keys - num_queries
        mask = ones.triu(offset + 1)
        if self.window is None or not self.limits(num_keys):
            return mask
        return mask | ones.tril(offset - self.window - 1)


PLAIN = AttentionRule()
"""Every earlier key, and nothing else."""

AttentionKernel = Callable[[Tensor, Tensor, Tensor, float, AttentionRule], Tensor]
"""(q [Q, B, H, K], k [S, B, H, K], v [S, B, H, K], dropout, rule) -> context [Q, B, H, K].

The last query's own key is the last one.
"""


@dataclass(frozen=True)
class AttentionShape:
    """Global sizes and options of an attention layer, the same on all ranks.

    Attributes:
        hidden_size, num_heads, num_groups, head_size: D, H, G and K.
        dropout: of the weights.
        rotary_interleaved: how rotary positions pair elements.
        head_norm: kind of norm of each query and key head (nn.norm), "" for none.
        norm_epsilon, norm_around_one: of these norms.
        output_gate: each query head has a gate head, whose sigmoid its context is multiplied by.
        softmax_type: vanilla, off-by-one (a sink of score 0) or learnable (a sink of each head).
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    dropout: float = 0.0
    rotary_interleaved: bool = False
    head_norm: str = ""
    norm_epsilon: float = 1e-5
    norm_around_one: bool = False
    output_gate: bool = False
    softmax_type: str = "vanilla"


def expand_groups(x_SBGK: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for the query heads of its group. [S, B, G, K] -> [S, B, H, K]."""
    groups = x_SBGK.shape[2]
    return x_SBGK if groups == num_heads else x_SBGK.repeat_interleave(num_heads // groups, dim=2)


def by_document(
    attend: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule
) -> Tensor:
    """A kernel on each document of `rule.documents` by itself. Shapes as of the kernel, as many queries as keys."""
    assert rule.documents is not None, "there are no documents"
    alone = replace(rule, documents=None)
    separated = zip(*map(rule.documents.separated, (q, k, v)), strict=True)
    return rule.documents.joined([attend(q, k, v, dropout, alone) for q, k, v in separated])


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same attention with a sink as one more key: a channel in which queries are 1 and that key is sink / scale.

    Shapes: [B, H, Q, K], 2 x [B, H, S, K], [Q, S] -> [B, H, Q, K + 8], 2 x [B, H, S + 1, K + 8], [Q, S + 1]; the
    kernels of GPUs want head sizes that are multiples of 8.
    """
    batch, heads, num_queries, _ = q.shape
    one = q.new_ones(batch, heads, num_queries, 1)
    q = torch.cat((q, one, one.new_zeros(batch, heads, num_queries, 7)), dim=-1)
    key = (sink_H.to(q.dtype) / scale).view(1, heads, 1, 1).expand(batch, heads, 1, 1)
    key = nn.functional.pad(key, (k.shape[-1], 7))
    k = torch.cat((nn.functional.pad(k, (0, 8)), key), dim=2)
    v = nn.functional.pad(v, (0, 8, 0, 1))
    return q, k, v, nn.functional.pad(seen, (0, 1), value=True)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN) -> Tensor:
    """Causal softmax(scale q k^T) v by torch SDPA. [Q, B, H, K], 2 x [S, B, H, K] -> [Q, B, H, K]."""
    if rule.documents is not None:
        return by_document(attend_fused, q, k, v, dropout, rule)
    dtype, source, size = product_dtype(q), q.dtype, q.shape[-1]
    q_BHQK, k_BHSK, v_BHSK = (x.to(dtype).permute(1, 2, 0, 3) for x in (q, k, v))
    square, scale = q.shape[0] == k.shape[0], rule.scale_of(size)
    special = rule.limits(k.shape[0]) or rule.sink_H is not None
    mask = None
    if special or (not square and q.shape[0] > 1):
        mask = ~rule.hidden(q.shape[0], k.shape[0], q.device)
    if mask is not None and rule.sink_H is not None:
        q_BHQK, k_BHSK, v_BHSK, mask = _with_sink(q_BHQK, k_BHSK, v_BHSK, mask, rule.sink_H, scale)
    context = nn.functional.scaled_dot_product_attention(
        q_BHQK, k_BHSK, v_BHSK, attn_mask=mask, dropout_p=dropout, is_causal=square and mask is None, scale=scale
    )
    return context[..., :size].permute(2, 0, 1, 3).to(source)


def attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN, *, softmax_in_fp32: bool
) -> Tensor:
    """The same, with every intermediate rounded as Megatron's local implementation rounds it.

    Shapes: [Q, B, H, K], 2 x [S, B, H, K] -> [Q, B, H, K].
    Source: spec/training-behaviour.md section 11, point 11.
    """
    if rule.documents is not None:
        return by_document(partial(attend_unfused, softmax_in_fp32=softmax_in_fp32), q, k, v, dropout, rule)
    num_queries, batch, heads, size = q.shape
    q_NQK, k_NSK, v_NSK = (x.reshape(x.shape[0], batch * heads, size).transpose(0, 1) for x in (q, k, v))
    dtype, alpha = product_dtype(q), rule.scale_of(size) / rule.layer_scaling
    empty = torch.zeros(1, dtype=dtype, device=q.device)
    scores = torch.baddbmm(empty, q_NQK.to(dtype), k_NSK.to(dtype).transpose(1, 2), beta=0.0, alpha=alpha)
    scores = scores.to(q.dtype)
    if softmax_in_fp32:
        scores = scores.to(at_least_fp32(q.dtype))
    if rule.layer_scaling != 1:
        scores = scores * rule.layer_scaling
    scores = scores.masked_fill(rule.hidden(num_queries, k.shape[0], q.device), MASKED_SCORE)
    if rule.sink_H is not None:
        sink_NQ1 = rule.sink_H.repeat(batch)[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, sink_NQ1.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    probabilities = nn.functional.dropout(weights.to(q.dtype), dropout)
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

    def recall(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Attention to what the cache holds, which keeps the keys and values that are here. Shapes as in `mix`.

        Raises: LayoutError if whole sequences are not here.
        """
        ...

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, attend: AttentionKernel, rule: AttentionRule
    ) -> Tensor:
        """Causal attention of the positions that are here to all earlier ones of their sequences.

        Shapes: q [S / parts, B, H, K], k and v [S / parts, B, G, K] -> [S / parts, B, H, K].

        Args:
            q, k, v: of the positions that are here; rotated already.
            dropout: probability with which an attention weight becomes zero.
            attend: the kernel for whole sequences, for a mixer that has them.
            rule: of the layer, its sinks those of the heads of q.
        """
        ...


class LocalMixer:
    """Whole sequences are here."""

    parts = 1

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        return torch.arange(length, device=device)

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x

    def recall(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return cache.attend(q, k, v, rule)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, attend: AttentionKernel, rule: AttentionRule
    ) -> Tensor:
        heads = q.shape[2]
        return attend(q, expand_groups(k, heads), expand_groups(v, heads), dropout, rule)


class Sinks(nn.Module):
    """The scores of the sinks of the heads that are here, learned. Named as Megatron's attention core names them."""

    def __init__(self, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.empty(num_heads, dtype=dtype, device=device))

    def placements(self) -> dict[str, Placement]:
        return {"softmax_offset": Split(0)}


class SelfAttention(nn.Module):
    """Projection to queries, keys and values, causal attention, projection back. [S, B, D] -> [S, B, D].

    Args:
        shape: sizes and options of all layers.
        region, mixer: how it shares its work with other ranks; alone by default.
        attend: the kernel.
        rule: which keys a query of this layer sees; the sinks are added to it here.
        qkv_bias, bias: whether the projection to queries, keys and values has a bias, and the one back.
        recompute_core: keep neither scores nor weights of the kernel for the backward pass.
    """

    def __init__(
        self,
        shape: AttentionShape,
        region: Region,
        attend: AttentionKernel = attend_fused,
        *,
        rule: AttentionRule = PLAIN,
        mixer: SequenceMixer | None = None,
        qkv_bias: bool,
        bias: bool,
        recompute_core: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape, self.region, self.attend, self.rule = shape, region, attend, rule
        self.mixer: SequenceMixer = mixer or LocalMixer()
        self.recompute_core = recompute_core
        self.num_heads = region.shard(shape.num_heads).size
        self.num_groups = region.shard(shape.num_groups, share=True).size
        learned = shape.softmax_type == "learnable"
        self.core_attention = Sinks(self.num_heads, dtype=dtype, device=device) if learned else None
        self.linear_proj = Linear(
            self.num_heads * shape.head_size, shape.hidden_size, Split(1), bias=bias, dtype=dtype, device=device
        )
        heads = GroupedHeads(
            shape.num_groups, shape.num_heads // shape.num_groups, shape.head_size, gated=shape.output_gate
        )
        per_query = 2 if shape.output_gate else 1
        qkv_size = (per_query * self.num_heads + 2 * self.num_groups) * shape.head_size
        self.linear_qkv = Linear(shape.hidden_size, qkv_size, heads, bias=qkv_bias, dtype=dtype, device=device)
        self.q_layernorm = self._head_norm(dtype, device)
        self.k_layernorm = self._head_norm(dtype, device)

    def _head_norm(self, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
        shape = self.shape
        if not shape.head_norm:
            return None
        return build_norm(
            shape.head_norm,
            shape.head_size,
            shape.norm_epsilon,
            around_one=shape.norm_around_one,
            dtype=dtype,
            device=device,
            of_heads=True,
        )

    def _heads(self, x_SBD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[S, B, D] -> q [S, B, H, K], k and v [S, B, G, K], gates [S, B, H, K] or None."""
        (qkv,) = column(x_SBD, self.region, self.linear_qkv)
        queries = self.num_heads // self.num_groups
        gates = queries if self.shape.output_gate else 0
        grouped = qkv.view(*qkv.shape[:2], self.num_groups, queries + gates + 2, self.shape.head_size)
        q, gate, k, v = grouped.split((queries, gates, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3), gate.flatten(2, 3) if gates else None

    def _rule(self, q: Tensor, documents: Documents | None = None) -> AttentionRule:
        rule = self.rule if documents is None else replace(self.rule, documents=documents)
        if self.shape.softmax_type == "off-by-one":
            return replace(rule, sink_H=q.new_zeros(self.num_heads))
        if self.core_attention is not None:
            return replace(rule, sink_H=self.core_attention.softmax_offset)
        return rule

    def forward(
        self,
        x_SBD: Tensor,
        turn: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attend to this and earlier positions.

        Args:
            x_SBD: Normalised hidden states of the new positions, those of them that are here.
            turn: Rotary cosines and sines of the new positions, or None.
            cache: Keys and values of earlier positions, which takes the new ones; there is no dropout with it, and
                no documents.
            documents: Those of the whole sequences, if attention stays inside of them.
        """
        q, k, v, gate = self._heads(x_SBD)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if turn is not None:
            q, k = (rotate(x, turn, interleaved=self.shape.rotary_interleaved) for x in (q, k))
        context = self._mix(q, k, v, documents) if cache is None else self.mixer.recall(cache, q, k, v, self._rule(q))
        if gate is not None:
            context = (context * torch.sigmoid(gate.to(at_least_fp32(gate.dtype)))).to(context.dtype)
        return row(context.flatten(2), self.region, self.linear_proj)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        dropout = self.shape.dropout if self.training else 0.0

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self.region.own_draws(dropout):
                return self.mixer.mix(q, k, v, dropout, self.attend, self._rule(q, documents))

        if self.recompute_core and self.training and torch.is_grad_enabled():
            return recomputed(mix, q, k, v, region=self.region)
        return mix(q, k, v)
