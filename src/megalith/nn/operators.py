"""Operators that torch.compile calls as they are within a graph: products, whose weight gradients go to a sink, and the
communication of a region.

Their kernels are those of uncompiled layers (nn.linear, nn.region). Biases are added outside of them, where they become
part of a generated kernel.

An operator receives tensors and constants only. A constant would be of one layer, and each layer would be compiled for
itself; so a layer is named by a number in a tensor, and only the region, which all layers share, by a constant. The
constant is in the keys of the caches on disk, and so has what shapes follow from: the kind of region and its size.

Importing this loads torch's compiler, which takes a second.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megalith.nn.linear import Linear, affine, column_backward, row_backward, row_forward
from megalith.nn.recompute import keep_inputs
from megalith.nn.region import SOLO, Region
from megalith.nn.sink import CopyingSink, GradientSink

keep_inputs_outside = torch.compiler.disable(keep_inputs)
"""`keep_inputs` between two graphs."""

_numbers = count()
_layers: WeakValueDictionary[int, Linear] = WeakValueDictionary()
_regions: WeakValueDictionary[str, Region] = WeakValueDictionary()


def name_region(region: Region) -> None:
    """Make the operators know a region; all of one device have one name, so that models share compilations."""
    if region.name is None:
        region.name = "one device" if region.size == 1 else f"{type(region).__name__} {region.size} {next(_numbers)}"
        _regions.setdefault(region.name, region)


def number_layers(module: torch.nn.Module, region: Region) -> None:
    """Let the linear layers below `module` use the operators where they are compiled; they share the region."""
    name_region(SOLO)
    name_region(region)
    for layer in module.modules():
        if isinstance(layer, Linear) and layer.number is None:
            number = next(_numbers)
            layer.number = torch.tensor([number])
            _layers[number] = layer


def _parts(region: str) -> int:
    """Return the number of ranks that hold parts of the hidden states between layers."""
    found = _regions[region]
    return found.size if found.needs_grad_reduce else 1


def _sink(layer: Linear) -> GradientSink:
    assert layer.sink is not None, "it was there when the graph was traced"
    return CopyingSink(layer.sink) if layer.sink.defers else layer.sink


_PRODUCT = "(Tensor x, Tensor weight, Tensor layer, str region, bool sunk) -> Tensor"
_GRADIENTS = "(Tensor grad, Tensor x, Tensor weight, Tensor layer, str region, bool sunk) -> (Tensor, Tensor)"


@torch.library.custom_op("megalith::column", mutates_args=(), schema=_PRODUCT)
def column(x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool) -> Tensor:
    """Compute gather(x) W^T of the layer of this number; with `sunk` its weight gradient goes to its sink."""
    return affine(_regions[region].gather(x).wait(), weight, None)


@column.register_fake
def _(x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool) -> Tensor:
    return x.new_empty(x.shape[0] * _parts(region), *x.shape[1:-1], weight.shape[0])


@torch.library.custom_op("megalith::column_backward", mutates_args=(), schema=_GRADIENTS)
def _column_backward(
    grad: Tensor, x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool
) -> tuple[Tensor, Tensor]:
    linear = _layers[int(layer)]
    sinks = (_sink(linear) if sunk else None,)
    wanted = (True, True, False)
    dx, dw, _ = column_backward(_regions[region], x, [weight], (linear.weight,), sinks, (grad,), wanted)
    assert dx is not None, "it is wanted"
    return dx, weight.new_empty(0) if dw is None else dw


@torch.library.custom_op("megalith::row", mutates_args=(), schema=_PRODUCT)
def row(x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool) -> Tensor:
    """Compute reduce(x W^T); as `column`."""
    return row_forward(x, _regions[region], weight)


@row.register_fake
def _(x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool) -> Tensor:
    return x.new_empty(x.shape[0] // _parts(region), *x.shape[1:-1], weight.shape[0])


@torch.library.custom_op("megalith::row_backward", mutates_args=(), schema=_GRADIENTS)
def _row_backward(
    grad: Tensor, x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool
) -> tuple[Tensor, Tensor]:
    linear = _layers[int(layer)]
    sink = _sink(linear) if sunk else None
    dx, dw, _ = row_backward(_regions[region], x, weight, linear.weight, sink, grad, (True, True, False))
    assert dx is not None, "it is wanted"
    return dx, weight.new_empty(0) if dw is None else dw


def _gradients_like(
    grad: Tensor, x: Tensor, weight: Tensor, layer: Tensor, region: str, sunk: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(0 if sunk else weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.region, ctx.sunk = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(product: Any, gradients: Any) -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = gradients(grad, *ctx.saved_tensors, ctx.region, ctx.sunk)
        return dx, None if ctx.sunk else dw, None, None, None

    gradients.register_fake(_gradients_like)
    product.register_autograd(backward, setup_context=_keep)


_differentiate(column, _column_backward)
_differentiate(row, _row_backward)


@torch.library.custom_op("megalith::gather", mutates_args=(), schema="(Tensor x, str region) -> Tensor")
def gather(x: Tensor, region: str) -> Tensor:
    """Gather hidden states for sharded layers; the gradient is reduced."""
    y = _regions[region].gather(x).wait()
    return y.clone() if y is x else y


@gather.register_fake
def _(x: Tensor, region: str) -> Tensor:
    return x.new_empty(x.shape[0] * _parts(region), *x.shape[1:])


@torch.library.custom_op("megalith::reduce", mutates_args=(), schema="(Tensor x, str region) -> Tensor")
def reduce(x: Tensor, region: str) -> Tensor:
    """Reduce partial sums to hidden states; the gradient is gathered."""
    return _regions[region].reduce(x.clone(memory_format=torch.contiguous_format)).wait()


@reduce.register_fake
def _(x: Tensor, region: str) -> Tensor:
    return x.new_empty(x.shape[0] // _parts(region), *x.shape[1:])


def _keep_region(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.region = inputs[1]


gather.register_autograd(lambda ctx, grad: (reduce(grad, ctx.region), None), setup_context=_keep_region)
reduce.register_autograd(lambda ctx, grad: (gather(grad, ctx.region), None), setup_context=_keep_region)


# By `define`, since `custom_op` takes no tags in every version: without this one draws that look alike are merged.
torch.library.define(
    "megalith::kept",
    "(Tensor x, float dropped, str region) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl("megalith::kept", "default")
def _draw(x: Tensor, dropped: float, region: str) -> Tensor:
    with _regions[region].hidden_rng(dropped):
        return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - dropped)


@torch.library.register_fake("megalith::kept")
def _(x: Tensor, dropped: float, region: str) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def kept(x: Tensor, dropped: float, region: str) -> Tensor:
    """Draw which hidden states are kept, bool as `x`, where ranks hold parts: from the region's random stream."""
    mask: Tensor = torch.ops.megalith.kept(x.detach(), dropped, region)
    return mask
