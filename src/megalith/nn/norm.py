"""Layer normalisation and root-mean-square normalisation over the last dimension.

Where the weight is kept `around_one` what is stored is the weight minus 1 (Megatron's `--apply-layernorm-1p`), so that
weight decay and half precision work on small numbers. An input of a wider dtype than the weight, the fp32 residual
stream, is normalised in its own dtype and handed on in that of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import at_least_fp32
from megalith.nn.rms_norm import rms_norm


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450). [..., D] -> [..., D]."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        around_one: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        of_heads: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon, self.around_one, self._of_heads = epsilon, around_one, of_heads

    def placements(self) -> dict[str, Placement]:
        return {"weight": Replicated(partial=self._of_heads), "bias": Replicated(partial=self._of_heads)}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.around_one else self.weight
        y = nn.functional.layer_norm(x, weight.shape, weight.to(x.dtype), self.bias.to(x.dtype), self.epsilon)
        return y.to(weight.dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467). [..., D] -> [..., D]."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        around_one: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        of_heads: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon, self.around_one, self._of_heads = epsilon, around_one, of_heads

    def placements(self) -> dict[str, Placement]:
        return {"weight": Replicated(partial=self._of_heads)}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.around_one else self.weight
        wide = weight.to(x.dtype)
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
            return rms_norm(x, wide, self.epsilon).to(weight.dtype)
        return nn.functional.rms_norm(x, weight.shape, wide, self.epsilon).to(weight.dtype)


class L2Norm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps), without parameters, in at least fp32: Llama 4's norm of query and key heads."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


def build_norm(
    kind: str,
    size: int,
    epsilon: float,
    *,
    around_one: bool = False,
    dtype: torch.dtype,
    device: torch.device,
    of_heads: bool = False,
) -> nn.Module:
    """Build the norm that `--normalization` names ("LayerNorm" or "RMSNorm"), or "L2Norm".

    Args:
        kind: its name.
        size: of what is normalised.
        epsilon: added to the variance.
        around_one: its parameter is the weight minus 1.
        dtype: of its parameters.
        device: of its parameters.
        of_heads: it is applied to attention heads, of which each tensor-parallel rank has its own.
    """
    if kind == "L2Norm":
        return L2Norm(epsilon)
    classes: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    return classes[kind](size, epsilon, around_one=around_one, dtype=dtype, device=device, of_heads=of_heads)
