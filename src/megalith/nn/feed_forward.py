"""The feed-forward layer: up-projection, activation, down-projection; optionally gated (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from megalith.nn.linear import Linear, column, row
from megalith.nn.placement import Fused, Split
from megalith.nn.region import Region


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half. [..., 2F] -> [..., F]."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_erf(x: Tensor) -> Tensor:
    """x * Phi(x), the exact form (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation, which GPT-2 and Megatron's fused bias-GELU use."""
    return gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "gelu_erf": gelu_erf, "gelu_tanh": gelu_tanh}


class FeedForward(nn.Module):
    """[S, B, D] -> [S, B, F] -> [S, B, D]; the up-projection is twice as wide when gated, [gate; up]."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: str,
        region: Region,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region, self.activation = region, ACTIVATIONS[activation]
        local = region.shard(ffn_size).size
        gated = activation == "swiglu"
        self.linear_fc1 = Linear(
            hidden_size,
            2 * local if gated else local,
            Fused(0, 2) if gated else Split(0),
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = Linear(local, hidden_size, Split(1), bias=bias, dtype=dtype, device=device)

    def forward(self, x_SBD: Tensor) -> Tensor:
        (inner,) = column(x_SBD, self.region, self.linear_fc1)
        return row(self.activation(inner), self.region, self.linear_fc2)
