"""The feed-forward layer: up-projection, activation, down-projection; optionally gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu
from typing_extensions import Unpack

from megalith.device import is_host
from megalith.kernels.cpu import gelu as gelu_on_cpu
from megalith.kernels.torch_private import silu_backward
from megalith.nn.linear import Linear, column, row
from megalith.nn.placement import Fused, Split
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region


def gelu_erf(x: Tensor) -> Tensor:
    """Compute x * Phi(x), the exact form (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the tanh approximation, which GPT-2 and Megatron's fused bias-GELU use.

    Large tensors on a CPU use a separate kernel, equal to torch's up to rounding.
    """
    if not torch.compiler.is_compiling() and gelu_on_cpu.is_faster_for(x):
        return gelu_on_cpu.gelu_tanh(x)
    return gelu(x, approximate="tanh")


def gelu_onnx(x: Tensor) -> Tensor:
    """Compute the erf form with the constant 1.41421 for sqrt(2), as Megatron's `--onnx-safe` does."""
    return x * 0.5 * (torch.erf(x / 1.41421) + 1.0)


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(1.702 x), the coarse approximation of the same paper."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "gelu_onnx": gelu_onnx,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
    "relu": relu,
}


@dataclass(frozen=True)
class Activation:
    """What lies between the two projections.

    Attributes:
        kind: a name of `ACTIVATIONS`.
        gated: f(first half) * (second half + offset) instead of f of all (Shazeer 2020, arXiv:2002.05202).
        offset: added to the second half, 1 in gpt-oss.
        clamp: largest value of the first half and largest size of the second, None for any.
    """

    kind: str
    gated: bool = False
    offset: float = 0.0
    clamp: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the activation: [..., 2F] -> [..., F] if gated, else [..., F] -> [..., F]."""
        if not self.gated:
            return ACTIVATIONS[self.kind](x)
        if x.requires_grad and torch.is_grad_enabled() and not (is_host(x.device) or torch.compiler.is_compiling()):
            y: Tensor = _Gated.apply(x, self)
            return y
        gate, up = self.factors(*x.chunk(2, dim=-1))
        return gate * up

    def factors(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the gated result."""
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return ACTIVATIONS[self.kind](gate), up + self.offset if self.offset else up


class _Gated(torch.autograd.Function):
    """A gated activation that keeps its input [..., 2F] alone, as Megatron's fused kernel does, and no factor of it.

    The backward pass computes the factors again, with the same bits. On a CPU both passes take 11 to 18 % longer so
    (benchmarks/results/README.md): only accelerators, whose memory is scarce, do it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, up = activation.factors(*x.chunk(2, dim=-1))
        return gate * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), (grad,), activation = ctx.saved_tensors, grads, ctx.activation
        gate, up = (half.detach().requires_grad_() for half in x.chunk(2, dim=-1))
        with torch.enable_grad():
            factors = activation.factors(gate, up)
        a, b = (factor.detach() for factor in factors)
        if activation.kind != "silu" or factors[1] is not up:
            return torch.cat(torch.autograd.grad(factors, (gate, up), (grad * b, grad * a)), dim=-1), None
        dx = torch.empty_like(x)  # where silu's gradient is computed in place: two matrices [..., F] less
        d_gate, d_up = dx.chunk(2, dim=-1)
        torch.mul(grad, a, out=d_up)
        silu_backward(torch.mul(grad, b, out=d_gate), gate.detach(), out=d_gate)
        return dx, None


class FeedForward(nn.Module):
    """[S, B, D] -> [S, B, F] -> [S, B, D]; the up-projection is twice as wide when gated, [gate; up]."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: Activation,
        region: Region,
        *,
        bias: bool,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.region, self.activation = region, activation
        local, gated = region.shard(ffn_size).size, activation.gated
        self.linear_fc1 = Linear(
            hidden_size, 2 * local if gated else local, Fused(0, 2) if gated else Split(0), bias=bias, **factory
        )
        self.linear_fc2 = Linear(local, hidden_size, Split(1), bias=bias, **factory)

    def forward(self, x_SBD: Tensor) -> Tensor:
        (inner,) = column(x_SBD, self.region, self.linear_fc1)
        return row(self.activation(inner), self.region, self.linear_fc2)
