"""Self-attention with grouped key-value heads.

Shapes: S sequence, B batch, D hidden, H query heads, G key-value heads (H is a multiple of G), K head size.
The fused query-key-value projection holds, for each group, its H/G query heads, then its key head, then its value
head (Megatron's layout); with G = H that is q, k, v head by head.

The kernel is passed in, and so is what differs between layers (`nn.attend`).

`ContextParallelAttention` is the port of context parallelism: attention is the only part of the model that combines
positions of a sequence. All other layers work on the positions of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.attend import PLAIN, AttentionKernel, AttentionRule, Mask, attend_fused
from megalith.nn.cache import LayerCache
from megalith.nn.documents import Documents
from megalith.nn.linear import Linear, column, row
from megalith.nn.norm import build_norm
from megalith.nn.placement import GroupedHeads, Placement, Split
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.recompute import recomputed
from megalith.nn.region import Region
from megalith.nn.rope import Rotation, rotate


@dataclass(frozen=True)
class AttentionShape:
    """Global sizes and options of an attention layer, the same on all ranks.

    Attributes:
        hidden_size, num_heads, num_groups, head_size: D, H, G and K.
        qk_norm: kind of norm of each query and key head (nn.norm), "" for none.
        output_gate: each query head has a gate head, whose sigmoid its context is multiplied by.
        softmax_type: vanilla, off-by-one (a sink of score 0) or learnable (a sink of each head).
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    dropout: float = 0.0
    rotary_interleaved: bool = False
    qk_norm: str = ""
    norm_epsilon: float = 1e-5
    norm_around_one: bool = False
    output_gate: bool = False
    softmax_type: str = "vanilla"


class ContextParallelAttention:
    """Attention of the queries on this rank over their sequences; this base class has whole sequences on one rank.

    Attributes:
        parts: context-parallel size: each sequence is divided into this number of equal parts.
    """

    parts = 1

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions of sequences of `length` tokens, ascending: [length / parts], int64.

        Raises: LayoutError if sequences of this length cannot be divided so.
        """
        return torch.arange(length, device=device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of whole sequences along `dim`. [.., S, ..] -> [.., S / parts, ..]."""
        return x

    def attend_cached(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Attend to the KV cache, which stores the new keys and values. Shapes as in `attend`.

        Raises: LayoutError where sequences are divided.
        """
        return cache.attend(q, k, v, rule)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: AttentionKernel, rule: AttentionRule
    ) -> Tensor:
        """Attend from this rank's positions to those of their sequences that the rule allows.

        Shapes: q [S / parts, B, H, K], k and v [S / parts, B, G, K], all rotated -> [S / parts, B, H, K].
        `kernel` is that for whole sequences; the sinks of `rule` are those of the heads of q.
        """
        return kernel(q, k, v, dropout, rule)


class LocalAttention(ContextParallelAttention):
    """Whole sequences on one rank."""


class Sinks(nn.Module):
    """Learned sink scores of the heads on this rank. The parameter has the name of Megatron's attention core."""

    def __init__(self, num_heads: int, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.empty(num_heads, **factory))

    def placements(self) -> dict[str, Placement]:
        return {"softmax_offset": Split(0)}


class Attention(nn.Module):
    """Base class of attention layers: the kernel over the heads, optionally recomputed in the backward pass.

    Args:
        dropout: of the attention weights.
        region, mixer: how the layer shares its work with other ranks; alone by default.
        kernel: of the attention itself, from heads to their context.
        rule: which keys a query of this layer attends to.
        recompute_core: keep neither scores nor weights of the kernel for the backward pass.
    """

    is_one_graph = False  # compiled, together with the whole block
    has_sinks = False

    def __init__(
        self,
        dropout: float,
        region: Region,
        kernel: AttentionKernel,
        rule: AttentionRule,
        mixer: ContextParallelAttention | None,
        *,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        self.attention_dropout, self.region, self.kernel, self.rule = dropout, region, kernel, rule
        self.mixer, self.recompute_core = mixer or LocalAttention(), recompute_core

    def context(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the context of the queries, without a cache. Shapes as of `ContextParallelAttention.attend`."""
        dropout = self.attention_dropout if self.training else 0.0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self.region.local_rng(dropout):
                return self.mixer.attend(q, k, v, dropout, self.kernel, rule)

        if self.recompute_core and self.training and torch.is_grad_enabled():
            return recomputed(attend, q, k, v, region=self.region, in_graph=self.is_one_graph)
        return attend(q, k, v)


class SelfAttention(Attention):
    """Projection to queries, keys and values, attention, projection back. [S, B, D] -> [S, B, D].

    Arguments as of `Attention`; the sinks are added to the rule here.

    Args:
        shape: sizes and options of all layers.
        qkv_bias, bias: whether the projection to queries, keys and values has a bias, and the one back.
    """

    def __init__(
        self,
        shape: AttentionShape,
        region: Region,
        kernel: AttentionKernel = attend_fused,
        *,
        rule: AttentionRule = PLAIN,
        mixer: ContextParallelAttention | None = None,
        qkv_bias: bool,
        bias: bool,
        recompute_core: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__(shape.dropout, region, kernel, rule, mixer, recompute_core=recompute_core)
        self.shape = shape
        self.num_heads = region.shard(shape.num_heads).size
        self.num_groups = region.shard(shape.num_groups, share=True).size
        learned, self.has_sinks = shape.softmax_type == "learnable", shape.softmax_type != "vanilla"
        self.core_attention = Sinks(self.num_heads, **factory) if learned else None
        width = self.num_heads * shape.head_size
        self.linear_proj = Linear(width, shape.hidden_size, Split(1), bias=bias, **factory)
        heads = GroupedHeads(
            shape.num_groups, shape.num_heads // shape.num_groups, shape.head_size, gated=shape.output_gate
        )
        per_query = 2 if shape.output_gate else 1
        qkv_size = (per_query * self.num_heads + 2 * self.num_groups) * shape.head_size
        self.linear_qkv = Linear(shape.hidden_size, qkv_size, heads, bias=qkv_bias, **factory)
        self.q_layernorm = self._head_norm(**factory)
        self.k_layernorm = self._head_norm(**factory)

    def _head_norm(self, **factory: Unpack[FactoryKwargs]) -> nn.Module | None:
        shape = self.shape
        if not shape.qk_norm:
            return None
        around_one = shape.norm_around_one
        return build_norm(
            shape.qk_norm, shape.head_size, shape.norm_epsilon, around_one=around_one, of_heads=True, **factory
        )

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the fused projection into q [S, B, H, K], k and v [S, B, G, K], gates [S, B, H, K] or None."""
        queries = self.num_heads // self.num_groups
        gates = queries if self.shape.output_gate else 0
        grouped = qkv.view(*qkv.shape[:2], self.num_groups, queries + gates + 2, self.shape.head_size)
        q, gate, k, v = grouped.split((queries, gates, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3), gate.flatten(2, 3) if gates else None

    def rule_for(self, q: Tensor, documents: Documents | None = None, mask: Mask | None = None) -> AttentionRule:
        """Return the layer's rule with the documents or mask of a micro-batch, and its sinks."""
        rule = self.rule
        if documents is not None or mask is not None:
            rule = replace(rule, documents=documents, mask=mask)
        if self.shape.softmax_type == "off-by-one":
            return replace(rule, sink_H=q.new_zeros(self.num_heads))
        if self.core_attention is not None:
            return replace(rule, sink_H=self.core_attention.softmax_offset)
        return rule

    def forward(
        self,
        x_SBD: Tensor,
        rope: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Attend to the positions that the rule allows, if it is causal to this and earlier ones.

        Args:
            cache: Keys and values of earlier positions, which stores the new ones; there is no dropout with it, and
                no documents.
            documents: Those of the whole sequences, if attention stays inside of them.
            mask: Of the micro-batch; with a cache that of the new positions.
        """
        (qkv,) = column(x_SBD, self.region, self.linear_qkv)
        q, k, v, gate = self._heads(qkv)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rope is not None:
            q, k = (rotate(x, rope, interleaved=self.shape.rotary_interleaved) for x in (q, k))
        if cache is None and self.num_groups < self.num_heads:  # views would keep the projection for the backward pass
            k, v = k.contiguous(), v.contiguous()
        context = (
            self.context(q, k, v, self.rule_for(q, documents, mask))
            if cache is None
            else self.mixer.attend_cached(cache, q, k, v, self.rule_for(q, mask=mask))
        )
        if gate is not None:
            context = (context * torch.sigmoid(gate.to(at_least_fp32(gate.dtype)))).to(context.dtype)
        return row(context.flatten(2), self.region, self.linear_proj)
