"""Layer normalisation and root-mean-square normalisation over the last dimension.

With `around_one` the stored parameter is the weight minus 1 (Megatron's `--apply-layernorm-1p`), so that weight decay
and half precision work on small numbers. An input of a wider dtype than the weight, such as the fp32 residual stream,
is normalised in its own dtype and returned in the dtype of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.device import is_host
from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.rms_norm import rms_norm
from megalith.registry import Registered


class _Norm(nn.Module):
    """A norm with a weight [D]. [..., D] -> [..., D].

    Args:
        size: D.
        epsilon: added to the variance.
        around_one: the parameter is the weight minus 1.
        of_heads: it is applied to attention heads, of which each tensor-parallel rank has its own.
    """

    _has_bias = False

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        around_one: bool = False,
        of_heads: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory))
        if self._has_bias:
            self.bias = nn.Parameter(torch.empty(size, **factory))
        self.epsilon, self.around_one, self._of_heads = epsilon, around_one, of_heads

    def placements(self) -> dict[str, Placement]:
        return {name: Replicated(partial=self._of_heads) for name, _ in self.named_parameters()}

    def _weight(self) -> Tensor:
        return self.weight + 1.0 if self.around_one else self.weight


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450); arguments as of `_Norm`."""

    _has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight()
        y = nn.functional.layer_norm(x, weight.shape, weight.to(x.dtype), self.bias.to(x.dtype), self.epsilon)
        return y.to(weight.dtype)


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight()
        wide = weight.to(x.dtype)
        if is_host(x.device) and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
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
    of_heads: bool = False,
    **factory: Unpack[FactoryKwargs],
) -> nn.Module:
    """Build the norm that `--normalization` names ("LayerNorm", "RMSNorm", a registered one), or "L2Norm".

    Arguments as of `_Norm`; a registered one takes size, epsilon, dtype and device.
    """
    if isinstance(kind, Registered):
        norm: nn.Module = kind(size, epsilon, **factory)
        return norm
    if kind == "L2Norm":
        return L2Norm(epsilon)
    build = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind]
    return build(size, epsilon, around_one=around_one, of_heads=of_heads, **factory)
