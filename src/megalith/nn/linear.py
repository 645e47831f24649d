"""The linear layers, with everything that meets inside their backward pass in one place.

Shapes (T = all leading dimensions of x flattened, I = input size, O = output size):

| pass    | formula                  | shapes                         |
|---------|--------------------------|--------------------------------|
| forward | y = x W^T + b            | [T, I] x [O, I]^T -> [T, O]    |
| dgrad   | dx = dy W                | [T, O] x [O, I]   -> [T, I]    |
| wgrad   | dW = dy^T x, db = sum dy | [T, O]^T x [T, I] -> [O, I]    |

`column` is linears with sharded outputs, `row` one with a sharded input. What a region moves (nn.region) is started
before the product that does not need it and awaited after it:

| pass            | `column`                                         | `row`                           |
|-----------------|--------------------------------------------------|---------------------------------|
| forward         | gather x; y_i = x W_i^T + b_i                    | y = x W^T; reduce y;  y + b     |
| backward        | gather x again under the dgrad;                  | gather dy under db;             |
|                 | reduce dx  = sum_i dy_i W_i under the wgrads     | dx = dy W; dW                   |

x, as it came in, is the only activation saved, and only for weights that are trained: under sequence parallelism a part
of the sequence, gathered again for the wgrad; the linears of one `column` share the gathers. The bias of `row` is added
once, to the sum. In half precision the product is rounded before the bias is added, as Megatron's separate bias does.

A sink knows a weight by identity, which a saved tensor need not have when it comes back (nn.recompute); so the weight
itself is remembered beside the saved one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.kernels.cpu.products import uses_onednn
from megalith.kernels.torch_private import onednn_linear
from megalith.nn.placement import Placement, Replicated, Split
from megalith.nn.precision import FactoryKwargs, is_row_for_mv, product_dtype
from megalith.nn.region import SOLO, Region
from megalith.nn.sink import GradientSink

if TYPE_CHECKING:
    from megalith.nn.lora import Adapter, AdapterBank

_FEW_ROWS = 64  # of a product in which widening the weight costs more than multiplying with it
_WIDENED_AT_ONCE = 1 << 18  # elements


def _weight_gradient(weight: nn.Parameter, sink: GradientSink | None, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Return dW = dy^T x; None if it is written to the sink."""
    if sink is None:
        dtype = product_dtype(grad_TO)
        return torch.mm(grad_TO.to(dtype).t(), x_TI.to(dtype)).to(weight.dtype)
    sink.accumulate_linear(weight, grad_TO, x_TI)
    return None


def _input_gradient(grads_TO: Sequence[Tensor], weights: Sequence[Tensor], wanted: torch.dtype) -> Tensor:
    """Return dx = sum_i dy_i W_i, [T, I]."""
    dtype = product_dtype(grads_TO[0])
    total = torch.mm(grads_TO[0].to(dtype), weights[0].to(dtype))
    for grad, weight in zip(grads_TO[1:], weights[1:], strict=True):
        total.addmm_(grad.to(dtype), weight.to(dtype))
    return total.to(wanted)


class _Column(torch.autograd.Function):
    """y_i = gather(x) W_i^T + b_i. The tensors are the weight and the bias of each layer, in turn."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, region: Region, sinks: tuple[GradientSink | None, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[::2], tensors[1::2]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3::2]) else None, *weights)
        ctx.region, ctx.parameters, ctx.sinks = region, weights, sinks
        whole = region.gather(x).wait()
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            assert weight is not None
            outputs.append(affine(whole, weight, bias))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]
        dx, *found = column_backward(ctx.region, x, weights, ctx.parameters, ctx.sinks, grads, wanted)
        return dx, None, None, *found


def column_backward(
    region: Region,
    x: Tensor | None,
    weights: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    sinks: Sequence[GradientSink | None],
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return dx, and the gradients of weight and bias of each layer in turn: None if not `wanted`, or for the sink.

    `x` may be None where no weight gradient is wanted.
    """
    arriving = None if x is None else region.gather(x)
    parts = [grad.reshape(-1, weight.shape[0]) for grad, weight in zip(grads, weights, strict=True)]
    leaving = None
    if wanted[0]:
        shape = (*grads[0].shape[:-1], weights[0].shape[1])
        leaving = region.reduce(_input_gradient(parts, weights, grads[0].dtype).view(shape))
    whole = None if arriving is None else arriving.wait().flatten(0, -2)
    found = list[Tensor | None]()
    for index, (weight, part, sink) in enumerate(zip(parameters, parts, sinks, strict=True)):
        of_weight, of_bias = wanted[1 + 2 * index : 3 + 2 * index]
        found.append(_weight_gradient(weight, sink, part, whole) if of_weight and whole is not None else None)
        found.append(part.sum(0) if of_bias else None)
    return [None if leaving is None else leaving.wait(), *found]


class _Row(torch.autograd.Function):
    """y = reduce(x W^T) + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, sink: GradientSink | None
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.region, ctx.parameter, ctx.sink = region, weight, sink
        y = row_forward(x, region, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        found = row_backward(ctx.region, x, weight, ctx.parameter, ctx.sink, grads[0], ctx.needs_input_grad)
        return *found, None, None


def row_forward(x: Tensor, region: Region, weight: Tensor) -> Tensor:
    """Return reduce(x W^T)."""
    return region.reduce(affine(x, weight, None)).wait()


def row_backward(
    region: Region,
    x: Tensor | None,
    weight: Tensor,
    parameter: nn.Parameter,
    sink: GradientSink | None,
    grad: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return dx, dW and db: None if not `wanted`, or for the sink. `x` may be None where dW is not wanted."""
    arriving = region.gather(grad)
    db = grad.reshape(-1, weight.shape[0]).sum(0) if wanted[2] else None
    gathered = arriving.wait()
    whole, shape = gathered.reshape(-1, weight.shape[0]), (*gathered.shape[:-1], weight.shape[1])
    dx = _input_gradient([whole], [weight], grad.dtype).view(shape) if wanted[0] else None
    dw = _weight_gradient(parameter, sink, whole, x.reshape(-1, x.shape[-1])) if wanted[1] and x is not None else None
    return dx, dw, db


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b: one rounding in fp32 and above, two (product, sum) in half precision."""
    dtype = product_dtype(x)
    if x.dtype in (torch.float16, torch.bfloat16):
        if is_row_for_mv(x):
            product = torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], -1)
        elif dtype != x.dtype and not torch.is_grad_enabled() and x.numel() <= _FEW_ROWS * x.shape[-1]:
            product = _few_rows(x, weight, dtype)
        else:
            product = nn.functional.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)
        return product if bias is None else product.add_(bias)
    if uses_onednn(x, weight):
        return onednn_linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _few_rows(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T in a wider dtype for the few tokens of a decoding step, whose cost is reading the weight.

    The weight is widened part by part, so that the copy stays in the processor's cache.
    """
    rows = max(1, _WIDENED_AT_ONCE // weight.shape[1])
    wide = x.to(dtype)
    return torch.cat([nn.functional.linear(wide, part.to(dtype)).to(x.dtype) for part in weight.split(rows)], dim=-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sink: GradientSink | None) -> Tensor:
    """Apply y = x W^T + b on one device.

    Shapes: x [..., I], weight [O, I], bias [O] or None -> [..., O].

    With a sink the weight gradient is written to it and autograd sees none; the bias gradient is autograd's.
    """
    if sink is None or not torch.is_grad_enabled():
        return affine(x, weight, bias)
    (y,) = _Column.apply(x, SOLO, (sink,), weight, bias)
    return cast("Tensor", y)


def _is_traced(region: Region, layer: Linear) -> bool:
    """Return whether torch.compile is tracing a layer that communicates or has a sink, and may use its operators."""
    if layer.number is None or region.name is None or not torch.compiler.is_compiling():
        return False
    return region.size > 1 or (layer.sink is not None and torch.is_grad_enabled())


def _in_graph(kind: str, x: Tensor, region: Region, layer: Linear) -> Tensor:
    """Return `column` or `row` by an operator of nn.operators; there is a rounding between product and bias."""
    from megalith.nn import operators  # it loads the compiler

    assert layer.number is not None and region.name is not None, "given before it was compiled"
    # An operator for a weight gradient alone would be dropped, since nothing in the graph needs it.
    sunk = layer.sink is not None and torch.is_grad_enabled() and x.requires_grad
    product = operators.column if kind == "column" else operators.row
    y: Tensor = product(x, layer.weight, layer.number, region.name, sunk)
    return y if layer.bias is None else y + layer.bias


def column(x: Tensor, region: Region, *linears: Linear) -> tuple[Tensor, ...]:
    """Apply column-parallel linears to the same hidden states.

    Shapes: x [..., I], a part of the sequence where the region holds parts -> [..., O_i] each, of the whole sequence.
    """
    if _is_traced(region, linears[0]):
        return tuple(_in_graph("column", x, region, layer) for layer in linears)
    outputs: list[Tensor] = []
    if region.size == 1:
        for layer in linears:  # as `linear`
            if layer.sink is None or not torch.is_grad_enabled():
                outputs.append(affine(x, layer.weight, layer.bias))
            else:
                outputs += _Column.apply(x, SOLO, (layer.sink,), layer.weight, layer.bias)
    else:
        tensors = [tensor for layer in linears for tensor in (layer.weight, layer.bias)]
        outputs += _Column.apply(x, region, tuple(layer.sink for layer in linears), *tensors)
    for number, layer in enumerate(linears):
        if layer.adapter is not None:
            outputs[number] = layer.adapter.column(outputs[number], x, region)
    return tuple(outputs)


def row(x: Tensor, region: Region, layer: Linear) -> Tensor:
    """Apply a linear layer whose input is sharded over the region; reduce the partial products, then add the bias.

    Shapes: x [..., I] -> [..., O], a part of the sequence where the region holds parts.
    """
    if _is_traced(region, layer):
        return _in_graph("row", x, region, layer)
    if region.size == 1:  # one rounding: the bias is added inside the product
        y = linear(x, layer.weight, layer.bias, layer.sink)
    else:
        y = _Row.apply(x, layer.weight, layer.bias, region, layer.sink)
    return y if layer.adapter is None else layer.adapter.row(y, x, region)


class Linear(nn.Module):
    """A linear layer that declares how its weight [O, I] and bias [O] are placed.

    Args:
        placement: of the weight: `Split(0)` or `Fused(0, n)` where outputs are sharded, `Split(1)` where inputs are.
        bias: Whether there is a bias. It follows the outputs: sharded where they are.

    Attributes:
        bias_placement: of the bias.
        number: int64 [1], by which the operators of compiled layers find this one (nn.operators); None without them.
        adapter: added to the output of `column` and `row`; None without LoRA. A server has several beside a layer.
    """

    def __init__(
        self, in_size: int, out_size: int, placement: Placement, *, bias: bool, **factory: Unpack[FactoryKwargs]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, **factory))
        self.bias = nn.Parameter(torch.empty(out_size, **factory)) if bias else None
        self.placement = placement
        self.bias_placement: Placement = Replicated() if placement == Split(1) else placement
        self.sink: GradientSink | None = None
        self.number: Tensor | None = None
        self.adapter: Adapter | AdapterBank | None = None

    def placements(self) -> dict[str, Placement]:
        """Return the placement of each parameter of this layer by its local name."""
        table: dict[str, Placement] = {"weight": self.placement}
        if self.bias is not None:
            table["bias"] = self.bias_placement
        return table

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. [..., I] -> [..., O]."""
        if _is_traced(SOLO, self):
            return _in_graph("column", x, SOLO, self)
        return linear(x, self.weight, self.bias, self.sink)
