"""Layer normalisation and root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalith.nn.placement import Placement, Replicated


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450). [..., D] -> [..., D]."""

    def __init__(
        self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device, of_heads: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon, self._of_heads = epsilon, of_heads

    def placements(self) -> dict[str, Placement]:
        return {"weight": Replicated(partial=self._of_heads), "bias": Replicated(partial=self._of_heads)}

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467). [..., D] -> [..., D]."""

    def __init__(
        self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device, of_heads: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon, self._of_heads = epsilon, of_heads

    def placements(self) -> dict[str, Placement]:
        return {"weight": Replicated(partial=self._of_heads)}

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def build_norm(
    kind: str, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device, of_heads: bool = False
) -> nn.Module:
    """Build the norm that `--normalization` names ("LayerNorm" or "RMSNorm").

    Args:
        kind: its name.
        size: of what is normalised.
        epsilon: added to the variance.
        dtype: of its parameters.
        device: of its parameters.
        of_heads: it is applied to attention heads, of which each tensor-parallel rank has its own.
    """
    classes: dict[str, type[nn.Module]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    return classes[kind](size, epsilon, dtype=dtype, device=device, of_heads=of_heads)
