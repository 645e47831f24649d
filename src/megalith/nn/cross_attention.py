"""Attention of a decoder to the output of an encoder.

Shapes: S positions of the decoder, E of the encoder, B batch, D hidden, H heads, K head size. The projection of the
encoder's output holds, for each head, its key and then its value (Megatron's layout).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalith.nn.attend import AttentionKernel, AttentionRule, Mask
from megalith.nn.attention import AttentionShape
from megalith.nn.linear import Linear, column, row
from megalith.nn.placement import Split
from megalith.nn.recompute import recomputed
from megalith.nn.region import Region


@dataclass(frozen=True, eq=False)
class Encoded:
    """What an encoder gave, as the layers of a decoder attend to it.

    Attributes:
        states_EBD: its hidden states, those that are here.
        mask: where its input is padding.
        kept: where a layer keeps its keys and values, so that a generation computes them once; None to keep none.
    """

    states_EBD: Tensor
    mask: Mask | None = None
    kept: dict[CrossAttention, tuple[Tensor, Tensor]] | None = None


class CrossAttention(nn.Module):
    """Queries of the decoder, keys and values of the encoder. [S, B, D], [E, B, D] -> [S, B, D].

    Args:
        shape: sizes of all layers; each head has its own keys and values.
        region: how it shares its work with other ranks.
        attend: the kernel.
        rule: of the scores; not causal.
        bias: whether the projections have biases.
        recompute_core: keep neither scores nor weights of the kernel for the backward pass.
    """

    def __init__(
        self,
        shape: AttentionShape,
        region: Region,
        attend: AttentionKernel,
        rule: AttentionRule,
        *,
        bias: bool,
        recompute_core: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert not rule.causal and shape.num_groups == shape.num_heads, "a rule of the configuration"
        self.shape, self.region, self.attend, self.rule = shape, region, attend, rule
        self.recompute_core = recompute_core
        self.num_heads = region.shard(shape.num_heads).size
        width = self.num_heads * shape.head_size
        self.linear_proj = Linear(width, shape.hidden_size, Split(1), bias=bias, dtype=dtype, device=device)
        self.linear_q = Linear(shape.hidden_size, width, Split(0), bias=bias, dtype=dtype, device=device)
        self.linear_kv = Linear(shape.hidden_size, 2 * width, Split(0), bias=bias, dtype=dtype, device=device)

    def keys_and_values(self, encoded_EBD: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the encoder's output for the heads that are here. [E, B, D] -> 2 x [E, B, H, K]."""
        (kv,) = column(encoded_EBD, self.region, self.linear_kv)
        k, v = kv.view(*kv.shape[:2], self.num_heads, 2 * self.shape.head_size).chunk(2, dim=-1)
        return k, v

    def _keys_and_values(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        if encoded.kept is None:
            return self.keys_and_values(encoded.states_EBD)
        if self not in encoded.kept:
            encoded.kept[self] = self.keys_and_values(encoded.states_EBD)
        return encoded.kept[self]

    def forward(self, x_SBD: Tensor, encoded: Encoded) -> Tensor:
        """Attend to what the encoder gave; `x_SBD` are normalised hidden states of the decoder, those that are here."""
        keys_values = self._keys_and_values(encoded)
        (q,) = column(x_SBD, self.region, self.linear_q)
        q_SBHK = q.view(*q.shape[:2], self.num_heads, self.shape.head_size)
        dropout, rule = self.shape.dropout if self.training else 0.0, replace(self.rule, mask=encoded.mask)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self.region.own_draws(dropout):
                return self.attend(q, k, v, dropout, rule)

        if self.recompute_core and self.training and torch.is_grad_enabled():
            context = recomputed(mix, q_SBHK, *keys_values, region=self.region)
        else:
            context = mix(q_SBHK, *keys_values)
        return row(context.flatten(2), self.region, self.linear_proj)
