"""The linear layer, with everything that meets inside its backward pass in one function.

Shapes (T = all leading dimensions of x flattened, I = input size, O = output size):

| pass    | formula                  | shapes                         |
|---------|--------------------------|--------------------------------|
| forward | y = x W^T + b            | [T, I] x [O, I]^T -> [T, O]    |
| dgrad   | dx = dy W                | [T, O] x [O, I]   -> [T, I]    |
| wgrad   | dW = dy^T x, db = sum dy | [T, O]^T x [T, I] -> [O, I]    |

x is the only activation saved. In half precision the product is rounded before the bias is added, as Megatron's
separate bias does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalith.nn.placement import Placement, Replicated, Split
from megalith.nn.precision import product_dtype
from megalith.nn.sink import GradientSink


class _Linear(torch.autograd.Function):
    """y = x W^T + b whose weight gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        ctx.has_bias = bias is not None
        return _affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        dtype = product_dtype(grad)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(grad.to(dtype), weight.to(dtype)).to(x.dtype).view_as(x)
        if ctx.needs_input_grad[1]:
            ctx.sink.matmul(weight, grad, x.reshape(-1, x.shape[-1]))
        db = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, None, db, None


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: one rounding in fp32 and above, two (product, sum) in half precision."""
    dtype = product_dtype(x)
    if bias is None or x.dtype in (torch.float16, torch.bfloat16):
        product = nn.functional.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)
        return product if bias is None else product.add_(bias)
    return nn.functional.linear(x, weight, bias)


def linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, sink: GradientSink | None) -> Tensor:
    """Apply y = x W^T + b.

    Shapes: x [..., I], weight [O, I], bias [O] or None -> [..., O].

    With a sink the weight gradient is written to it and autograd sees none; the bias gradient is autograd's.
    """
    if sink is None or not torch.is_grad_enabled():
        return _affine(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, sink)
    return y


class Linear(nn.Module):
    """A linear layer that declares how its weight [O, I] and bias [O] are placed.

    Args:
        in_size: I, the local input size.
        out_size: O, the local output size.
        placement: of the weight: `Split(0)` or `Fused(0, n)` where outputs are sharded, `Split(1)` where inputs are.
        bias: Whether there is a bias. It follows the outputs: sharded where they are.
    """

    def __init__(
        self, in_size: int, out_size: int, placement: Placement, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None
        self.placement = placement
        self.sink: GradientSink | None = None

    def placements(self) -> dict[str, Placement]:
        """The placement of each parameter of this layer by its local name."""
        table: dict[str, Placement] = {"weight": self.placement}
        if self.bias is not None:
            table["bias"] = Replicated() if self.placement == Split(1) else self.placement
        return table

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return linear(x, self.weight, self.bias, self.sink)
