"""Grouped products: rows sorted by expert, each multiplied by the weight of its expert, as one operation.

| pass    | formula, of each expert e | shapes                           |
|---------|---------------------------|----------------------------------|
| forward | y_e = x_e W_e^T           | [N_e, I] x [O, I]^T -> [N_e, O]  |
| dgrad   | dx_e = dy_e W_e           | [N_e, O] x [O, I]   -> [N_e, I]  |
| wgrad   | dW_e = dy_e^T x_e         | to a sink, expert by expert      |

In bf16 on a GPU one kernel computes forward and dgrad (torch's grouped product); elsewhere they are a loop that writes
into one result. On a CPU a grouped product is the same loop inside of torch. An expert without rows passes a zero
gradient on, so that every rank counts the same number of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.device import capability_of
from megalith.kernels.transfer import to_device
from megalith.nn.linear import Linear, linear
from megalith.nn.precision import product_dtype
from megalith.nn.sink import GradientSink

_grouped_mm: Callable[..., Tensor] | None = getattr(torch.nn.functional, "grouped_mm", None)  # public from 2.10
_ALIGNMENT = 16  # bytes, of the rows of its factors


def _one_kernel(x_NI: Tensor, weights_OI: Sequence[Tensor]) -> bool:
    """Return whether torch has a grouped kernel for these factors."""
    sizes = weights_OI[0].shape
    return (
        _grouped_mm is not None
        and capability_of(x_NI.device).has_grouped_products
        and x_NI.dtype == weights_OI[0].dtype == torch.bfloat16
        and all(size * x_NI.element_size() % _ALIGNMENT == 0 for size in sizes)
    )


def _products(x_NI: Tensor, weights_OI: Sequence[Tensor], counts: list[int], *, transposed: bool) -> Tensor:
    """Return x W^T (transposed) or x W of each expert, in the dtype of x."""
    if _one_kernel(x_NI, weights_OI):
        assert _grouped_mm is not None
        stacked = torch.stack(list(weights_OI))
        ends = to_device(torch.tensor(counts), x_NI.device).cumsum(0, dtype=torch.int32)
        return _grouped_mm(x_NI.contiguous(), stacked.mT if transposed else stacked, offs=ends)
    wide = product_dtype(x_NI)
    y_NO = x_NI.new_empty(x_NI.shape[0], weights_OI[0].shape[0 if transposed else 1])
    for x, weight, y in zip(x_NI.split(counts), weights_OI, y_NO.split(counts), strict=True):
        factor = weight.t() if transposed else weight
        if wide == x.dtype:
            torch.mm(x, factor, out=y)
        else:
            y.copy_(torch.mm(x.to(wide), factor.to(wide)))
    return y_NO


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, counts: list[int], sinks: tuple[GradientSink | None, ...], *weights_OI: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_NI if any(ctx.needs_input_grad[3:]) else None, *weights_OI)
        ctx.counts, ctx.sinks, ctx.parameters = counts, sinks, weights_OI
        return _products(x_NI, weights_OI, counts, transposed=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_NI, *weights_OI = ctx.saved_tensors
        grad_NO = grads[0].contiguous()  # the gradient of a sum has no strides, which grouped products do not take
        dx_NI = _products(grad_NO, weights_OI, ctx.counts, transposed=False) if ctx.needs_input_grad[0] else None
        if x_NI is None:
            return dx_NI, None, None, *(None for _ in weights_OI)
        found: list[Tensor | None] = []
        parts = zip(ctx.parameters, ctx.sinks, grad_NO.split(ctx.counts), x_NI.split(ctx.counts), strict=True)
        for number, (parameter, sink, grad, x) in enumerate(parts):
            if not ctx.needs_input_grad[3 + number]:
                found.append(None)
            elif sink is not None:
                sink.accumulate_linear(parameter, grad, x)
                found.append(None)
            else:
                wide = product_dtype(grad)
                found.append(torch.mm(grad.to(wide).t(), x.to(wide)).to(parameter.dtype))
        return dx_NI, None, None, *found


def grouped(x_NI: Tensor, counts: list[int], layers: Sequence[Linear]) -> Tensor:
    """Multiply each layer's weight by its `counts` rows in turn, without bias. [N, I] -> [N, O]."""
    if not torch.is_grad_enabled():
        parts = zip(x_NI.split(counts), layers, strict=True)
        return torch.cat([linear(x, layer.weight, None, None) for x, layer in parts])
    sinks = tuple(layer.sink for layer in layers)
    y_NO: Tensor = _Grouped.apply(x_NI, counts, sinks, *(layer.weight for layer in layers))
    return y_NO


def add_biases(y_NO: Tensor, counts: list[int], layers: Sequence[Linear], weights_N: Tensor | None = None) -> Tensor:
    """Add to each row of `y` the bias of its layer, multiplied by the weight of the row if there are weights."""
    if layers[0].bias is None:
        return y_NO
    parts = []
    for y, layer, weights in zip(
        y_NO.split(counts),
        layers,
        [None] * len(counts) if weights_N is None else weights_N.split(counts),
        strict=True,
    ):
        bias = layer.bias if weights is None else layer.bias * weights.unsqueeze(-1)
        parts.append((y + bias).to(y.dtype))
    return torch.cat(parts)
