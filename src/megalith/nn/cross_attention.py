"""Attention of a decoder to the output of an encoder.

Shapes: S positions of the decoder, E of the encoder, B batch, D hidden, H heads, K head size. The projection of the
encoder's output holds, for each head, its key and then its value (Megatron's layout).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from typing_extensions import Unpack

from megalith.nn.attend import AttentionKernel, AttentionRule, Mask
from megalith.nn.attention import Attention, AttentionShape
from megalith.nn.linear import Linear, column, row
from megalith.nn.placement import Split
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region


@dataclass(frozen=True, eq=False)
class Encoded:
    """Output of an encoder, to which the layers of a decoder attend.

    Attributes:
        states_EBD: its hidden states; under sequence parallelism this rank's part of the sequence.
        mask: True where its input is padding.
    """

    states_EBD: Tensor
    mask: Mask | None = None


class EncodedCache(Protocol):
    """Keys and values of the encoder's output, computed once for an input and cached during generation."""

    def attend_across(self, layer: CrossAttention, q_SBHK: Tensor) -> Tensor:
        """Attend from each new token to the text of its sequence. [S, B, H, K] -> [S, B, H, K]."""
        ...


class CrossAttention(Attention):
    """Queries of the decoder, keys and values of the encoder. [S, B, D], [E, B, D] -> [S, B, D].

    Arguments as of `SelfAttention`; each head has its own keys and values, and the rule is not causal.
    """

    def __init__(
        self,
        shape: AttentionShape,
        region: Region,
        kernel: AttentionKernel,
        rule: AttentionRule,
        *,
        bias: bool,
        recompute_core: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__(shape.dropout, region, kernel, rule, None, recompute_core=recompute_core)
        assert not rule.causal and shape.num_groups == shape.num_heads, "a rule of the configuration"
        self.shape = shape
        self.num_heads = region.shard(shape.num_heads).size
        width = self.num_heads * shape.head_size
        self.linear_proj = Linear(width, shape.hidden_size, Split(1), bias=bias, **factory)
        self.linear_q = Linear(shape.hidden_size, width, Split(0), bias=bias, **factory)
        self.linear_kv = Linear(shape.hidden_size, 2 * width, Split(0), bias=bias, **factory)

    def keys_and_values(self, encoded_EBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the encoder's output for the heads of this rank. [E, B, D] -> 2 x [E, B, H, K]."""
        (kv,) = column(encoded_EBD, self.region, self.linear_kv)
        k, v = kv.view(*kv.shape[:2], self.num_heads, 2 * self.shape.head_size).chunk(2, dim=-1)
        return k, v

    def forward(self, x_SBD: Tensor, encoded: Encoded | EncodedCache) -> Tensor:
        """Attend to the encoder's output; `x_SBD` are this rank's normalised hidden states of the decoder."""
        (q,) = column(x_SBD, self.region, self.linear_q)
        q_SBHK = q.view(*q.shape[:2], self.num_heads, self.shape.head_size)
        if isinstance(encoded, Encoded):
            rule = replace(self.rule, mask=encoded.mask)
            context = self.context(q_SBHK, *self.keys_and_values(encoded.states_EBD), rule)
        else:
            context = encoded.attend_across(self, q_SBHK)
        return row(context.flatten(2), self.region, self.linear_proj)
