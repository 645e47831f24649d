"""Multi-latent attention, MLA (DeepSeek-V2, arXiv:2405.04434): heads are projected from latent vectors per position.

Shapes: S sequence, B batch, D hidden, H heads, R size of the latent vectors; of a query or key head N channels without
position (nope) and P rotated channels (rope); V channels of a value head, K = max(N + P, V).

    queries:         x [D] -> latent [Rq] -> norm -> heads [H, N + P]        (or from x at once)
    keys, values:    x [D] -> latent [R]  -> norm -> heads [H, N] and [H, V]
                           -> [P], rotated, shared by all heads

Latent vectors are replicated over tensor-parallel ranks, heads are divided. Under sequence parallelism each rank
computes the latent vectors of its part of the sequence and gathers them, which is less than gathering hidden states.

Kernels and caches see heads of equal size K, padded with zeros, so that every `ContextParallelAttention` works with it.
Rotation is interleaved: neighbouring channels are pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.attend import PLAIN, AttentionKernel, AttentionRule, Mask, attend_fused
from megalith.nn.attention import Attention, ContextParallelAttention
from megalith.nn.cache import LayerCache
from megalith.nn.documents import Documents
from megalith.nn.linear import Linear, column, row
from megalith.nn.norm import build_norm
from megalith.nn.placement import Replicated, Split
from megalith.nn.precision import FactoryKwargs
from megalith.nn.recompute import RecomputedOutputs, recomputed
from megalith.nn.region import Region, enter
from megalith.nn.rope import Rotation, rotate


@dataclass(frozen=True)
class LatentShape:
    """Global sizes and options of an attention layer, the same on all ranks.

    Attributes:
        query_rank, rank: Rq (None: queries come from hidden states at once) and R.
        nope_dim, rope_dim, value_size: N, P and V.
        latent_norm: kind of norm of the latent vectors (nn.norm), "" for none.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_size: int
    dropout: float = 0.0
    latent_norm: str = ""
    norm_epsilon: float = 1e-5
    norm_around_one: bool = False

    @property
    def query_size(self) -> int:
        """N + P."""
        return self.nope_dim + self.rope_dim


class LatentAttention(Attention):
    """Projections to heads by latent vectors, attention, projection back. [S, B, D] -> [S, B, D].

    Arguments as of `attention.SelfAttention`; parameters carry Megatron's names.

    Args:
        recompute_heads: compute queries, keys and values again from the latent vectors in the backward pass.
    """

    def __init__(
        self,
        shape: LatentShape,
        region: Region,
        kernel: AttentionKernel = attend_fused,
        *,
        rule: AttentionRule = PLAIN,
        mixer: ContextParallelAttention | None = None,
        bias: bool,
        recompute_core: bool = False,
        recompute_heads: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        rule = replace(rule, scale=rule.scale_of(shape.query_size))
        super().__init__(shape.dropout, region, kernel, rule, mixer, recompute_core=recompute_core)
        self.shape, self.recompute_heads = shape, recompute_heads
        self.num_heads = self.num_groups = region.shard(shape.num_heads).size

        def to_heads(inputs: int, size: int) -> Linear:
            return Linear(inputs, self.num_heads * size, Split(0), bias=False, **factory)

        def to_latent(size: int) -> Linear:
            return Linear(shape.hidden_size, size, Replicated(), bias=False, **factory)

        width = self.num_heads * shape.value_size
        self.linear_proj = Linear(width, shape.hidden_size, Split(1), bias=bias, **factory)
        if shape.query_rank is None:
            self.linear_q_proj = to_heads(shape.hidden_size, shape.query_size)
        else:
            self.linear_q_down_proj = to_latent(shape.query_rank)
            self.linear_q_up_proj = to_heads(shape.query_rank, shape.query_size)
        self.linear_kv_down_proj = to_latent(shape.rank + shape.rope_dim)
        self.linear_kv_up_proj = to_heads(shape.rank, shape.nope_dim + shape.value_size)
        if shape.query_rank is not None:  # after the linears, as Megatron's buffers of the optimizer have them
            self.q_layernorm = self._norm(shape.query_rank, **factory)
        self.kv_layernorm = self._norm(shape.rank, **factory)

    def _norm(self, size: int, **factory: Unpack[FactoryKwargs]) -> nn.Module:
        shape = self.shape
        if not shape.latent_norm:
            return nn.Identity()
        return build_norm(shape.latent_norm, size, shape.norm_epsilon, around_one=shape.norm_around_one, **factory)

    def _latents(self, x_SBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed latent vectors of queries [S, B, Rq] (or x) and of keys and values [S, B, R], and k_rope.

        k_rope [S, B, P] is not rotated yet. All are of the positions on this rank.
        """
        shape = self.shape
        of_queries = x_SBD if shape.query_rank is None else self.q_layernorm(self.linear_q_down_proj(x_SBD))
        latent, k_rope = self.linear_kv_down_proj(x_SBD).split((shape.rank, shape.rope_dim), dim=-1)
        return of_queries, self.kv_layernorm(latent.contiguous()), k_rope

    def _heads(
        self, of_queries: Tensor, latent: Tensor, k_rope: Tensor, *, rope: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, rotated and padded: 3 x [S, B, H, K]."""
        shape = self.shape
        (q,) = column(
            of_queries, self.region, self.linear_q_proj if shape.query_rank is None else self.linear_q_up_proj
        )
        q = q.view(*q.shape[:2], self.num_heads, shape.query_size)
        (heads,) = column(latent, self.region, self.linear_kv_up_proj)
        heads = heads.view(*heads.shape[:2], self.num_heads, shape.nope_dim + shape.value_size)
        k_nope, v = heads.split((shape.nope_dim, shape.value_size), dim=-1)
        k_rope = enter(k_rope, self.region).unsqueeze(2)
        if rope is not None:
            q_nope, q_rope = q.split((shape.nope_dim, shape.rope_dim), dim=-1)
            q = torch.cat((q_nope, rotate(q_rope, rope, interleaved=True)), dim=-1)
            k_rope = rotate(k_rope, rope, interleaved=True)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.num_heads, -1)), dim=-1)
        size = max(shape.query_size, shape.value_size)
        return _filled(q, size), _filled(k, size), _filled(v, size)

    def forward(
        self,
        x_SBD: Tensor,
        rope: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Attend to this and earlier positions; arguments as of `SelfAttention.forward`."""
        latents, heads = self._latents(x_SBD), partial(self._heads, rope=rope)
        if cache is None:
            context = self._mixed(heads, latents, replace(self.rule, documents=documents, mask=mask))
        else:
            context = self.mixer.attend_cached(cache, *heads(*latents), replace(self.rule, mask=mask))
        return row(context[..., : self.shape.value_size].flatten(2), self.region, self.linear_proj)

    def _mixed(
        self,
        heads: Callable[..., tuple[Tensor, Tensor, Tensor]],
        latents: tuple[Tensor, Tensor, Tensor],
        rule: AttentionRule,
    ) -> Tensor:
        """Return the context of the heads, which are kept for the backward pass or recomputed."""
        if not (self.recompute_heads and self.training and torch.is_grad_enabled()):
            return self.context(*heads(*latents), rule)
        if self.recompute_core:  # which would keep them
            context: Tensor = recomputed(
                lambda *x: self.context(*heads(*x), rule), *latents, region=self.region, in_graph=self.is_one_graph
            )
            return context
        if self.is_one_graph and torch.compiler.is_compiling():
            q, k, v = recomputed(heads, *latents, region=self.region, in_graph=True)
            return self.context(q, k, v, rule)
        again = RecomputedOutputs(heads, *latents)
        q, k, v = again.outputs
        with again.not_kept():
            return self.context(q, k, v, rule)


def _filled(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x
