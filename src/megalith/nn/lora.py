"""LoRA: a trained product of two low-rank matrices beside a frozen linear layer (Hu et al. 2021, arXiv:2106.09685).

    y = x W^T + b + s B A dropout(x),    s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)

A fused projection has an adapter for each of its parts (query, key and value; gate and up), as models whose projections
are apart have: P matrices A, stacked, and one B, each row of which belongs to the part that its row of W belongs to.

|                      | beside `column`                    | beside `row`                                |
|----------------------|------------------------------------|---------------------------------------------|
| A [P r, I]           | replicated                         | split over the inputs, as W                 |
| B [O, r]             | placed as W                        | replicated                                  |
| z = A x, P r numbers | computed before it enters (f)      | partial sums, which leave (g); then B z     |

So ranks exchange r numbers for a token, and the gradient of what is replicated is complete on each tensor-parallel
rank, and under sequence parallelism a partial sum like that of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.nn.dropout import HiddenDropout
from megalith.nn.linear import Linear, linear
from megalith.nn.placement import Fused, GroupedHeads, Placement, Replicated, Split
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.region import Region, enter, leave


@dataclass(frozen=True)
class Lora:
    """Rank r, scale s of the product, and probability of the dropout of its input."""

    rank: int
    scale: float
    dropout: float = 0.0


def parts_of_rows(placement: Fused | GroupedHeads, rows: int) -> Tensor:
    """Return which part of a fused projection each of the rows of a rank belongs to, [O] from 0."""
    if isinstance(placement, Fused):
        return torch.arange(placement.parts).repeat_interleave(rows // placement.parts)
    heads = rows // placement.head_size
    groups = max(1, heads // placement.heads_per_group)  # several ranks may share the heads of a group
    kinds = torch.tensor([*(0,) * (heads // groups - 2), 1, 2])
    return kinds.repeat(groups).repeat_interleave(placement.head_size)


class Adapter(nn.Module):
    """The product beside a linear layer, which is built from its placement and sizes on this rank.

    Args:
        parts: Those of a fused projection that have an adapter, ascending; the rows of B of the others stay zero.
        device: Of the adapter, by default that of the layer.
    """

    def __init__(
        self, layer: Linear, lora: Lora, region: Region, parts: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        out_size, in_size = layer.weight.shape
        factory: FactoryKwargs = {"dtype": layer.weight.dtype, "device": device or layer.weight.device}
        self.scale, self.parts, divides_inputs = lora.scale, tuple(parts), layer.placement == Split(1)
        below: Placement = layer.placement if divides_inputs else Replicated()
        above: Placement = Replicated() if divides_inputs else layer.placement
        self.lora_A = Linear(in_size, len(parts) * lora.rank, below, bias=False, **factory)
        self.lora_B = Linear(lora.rank, out_size, above, bias=False, **factory)
        self.dropout = HiddenDropout(lora.dropout, region, own=divides_inputs)
        self.chosen: Tensor | None  # [O, P], the part of each row; None where each row has all of z
        rows = None
        if isinstance(layer.placement, Fused | GroupedHeads):
            of_rows = parts_of_rows(layer.placement, out_size).to(factory["device"])
            rows = of_rows[:, None] == torch.tensor(self.parts, device=factory["device"])
        self.register_buffer("chosen", rows, persistent=False)

    def column(self, y: Tensor, x: Tensor, region: Region) -> Tensor:
        """Add the adapter's output to that of the layer in `nn.linear.column`; shapes as there."""
        return y + self._up(enter(self._down(x), region))

    def row(self, y: Tensor, x: Tensor, region: Region) -> Tensor:
        """Add the adapter's output to that of the layer in `nn.linear.row`; shapes as there."""
        return y + self._up(leave(self._down(x), region))

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return s B A, [O, I], in at least fp32: what the layer's weight is without its adapter."""
        down, up, scale = self.factors()
        dtype = at_least_fp32(up.dtype)
        return scale * up.to(dtype) @ down.to(dtype)

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor, float]:
        """Return A [P r, I], B [O, P r], and s."""
        up = self.lora_B.weight.detach() if self.chosen is None else self._wide_B(self.chosen)
        return self.lora_A.weight.detach(), up, self.scale

    def _down(self, x: Tensor) -> Tensor:
        return self.lora_A(self.dropout(x)) * self.scale

    def _up(self, z: Tensor) -> Tensor:
        return self.lora_B(z) if self.chosen is None else linear(z, self._wide_B(self.chosen), None, None)

    def _wide_B(self, chosen: Tensor) -> Tensor:
        """Return B as [O, P r], zero but for the part of each row."""
        return (self.lora_B.weight[:, None] * chosen[..., None]).flatten(1)


Rows = Sequence[tuple[int, slice | Tensor]]
"""Numbers of adapters, and the rows of a batch that each is for."""


class AdapterBank:
    """The adapters of several fine-tunings beside one linear layer, of which each row of a batch has one or none.

    Only for inference: outputs are added in place.

    Attributes:
        factors: number of an adapter -> A, B and s; a layer may have fewer adapters than others.
    """

    def __init__(self, rows: Callable[[], Rows]) -> None:
        self._rows, self.factors = rows, dict[int, tuple[Tensor, Tensor, float]]()

    def column(self, y: Tensor, x: Tensor, region: Region) -> Tensor:
        """Add to the outputs of `nn.linear.column`; the first dimension is that of the rows."""
        return self._added(y, x, partial(enter, region=region))

    def row(self, y: Tensor, x: Tensor, region: Region) -> Tensor:
        """Add to the outputs of `nn.linear.row`; the first dimension is that of the rows."""
        return self._added(y, x, partial(leave, region=region))

    def _added(self, y: Tensor, x: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        for number, rows in self._rows():
            if number in self.factors:
                down, up, scale = self.factors[number]
                y[rows] += linear(exchange(linear(x[rows], down, None, None) * scale), up, None, None)
        return y


def adapt(
    module: nn.Module,
    lora: Lora,
    parts_of: Callable[[str], Sequence[int]],
    region: Region,
    device: torch.device | None = None,
) -> None:
    """Freeze a model, and give an adapter to each linear layer for whose name `parts_of` returns parts."""
    module.requires_grad_(False)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
    for name, layer in layers.items():
        if parts := parts_of(name):
            layer.adapter = Adapter(layer, lora, region, parts, device)


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Add the products of all adapters to the weights of their layers, and remove them."""
    for layer in [layer for layer in module.modules() if isinstance(layer, Linear)]:
        if isinstance(layer.adapter, Adapter):
            product = layer.adapter.product()
            layer.weight.copy_(layer.weight.to(product.dtype) + product)
            layer.adapter = None
