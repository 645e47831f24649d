"""The tanh approximation of GELU on a CPU, without a tanh.

    t = k x (1 + c x^2), k = 2 sqrt(2 / pi), c = 0.044715        h = 1 / (1 + e^-t) = (1 + tanh(t / 2)) / 2
    y = x h        dy/dx = h + x h (1 - h) dt/dx        dt/dx = 3 k (1 + c x^2) - 2 k

Why: torch's kernel spends its time in a tanh, in the forward pass and again in the backward pass, and on a CPU e^-t by
a power of two takes a sixth of that. dy/dx is computed with y and kept instead of x, so that the backward pass is one
product. Half-precision input is computed in fp32, piece by piece, and both results are rounded once. Measurements:
benchmarks/results/README.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.kernels.torch_private import sigmoid_backward

# Elements; torch's one call takes less time than seven for fewer, or than nine in half precision.
_LEAST = {torch.float32: 1 << 15, torch.bfloat16: 1 << 17, torch.float16: 1 << 17}
_PIECE, _LEAST_PIECE = 1 << 17, 1 << 19  # elements per operation, for each thread and at least; they stay in the cache
_K, _C = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
_EXPONENT = -_K * math.log2(math.e)  # e^-t = 2^(_EXPONENT x (1 + _C x^2))


def is_faster_for(x: Tensor) -> bool:
    """Return whether `gelu_tanh` is faster than torch's kernel; a matter of dtype, device and size."""
    return is_host(x.device) and x.numel() >= _LEAST.get(x.dtype, math.inf)


def _compute(x: Tensor, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and, if asked for, dy/dx."""
    flat, dtype = x.reshape(-1), torch.promote_types(x.dtype, torch.float32)
    y, slope = torch.empty_like(flat), torch.empty_like(flat) if with_slope else None
    size = max(1, min(flat.numel(), max(_LEAST_PIECE, _PIECE * torch.get_num_threads())))
    buffers = [flat.new_empty(size, dtype=dtype) for _ in range(2 + with_slope + (dtype != x.dtype))]
    factor = flat.new_tensor(_EXPONENT, dtype=dtype)
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        own = slice(start, start + part.numel())
        a, h, *s = (buffer[: part.numel()] for buffer in buffers)
        if dtype != x.dtype:
            part = s.pop().copy_(part)
        torch.addcmul(factor, part, part, value=_EXPONENT * _C, out=a)
        torch.mul(a, part, out=h).exp2_().add_(1.0).reciprocal_()
        if slope is not None:
            sigmoid_backward(part, h, out=s[0])
            a.sub_(2.0 / 3.0 * _EXPONENT)  # dt/dx, apart from a factor
            torch.addcmul(h, s[0], a, value=3.0 * _K / _EXPONENT, out=slope[own])
        torch.mul(part, h, out=y[own])
    return y.view(x.shape), None if slope is None else slope.view(x.shape)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, slope = _compute(x, with_slope=True)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Any shape -> the same.

    Memory: the derivative is kept for the backward pass, where torch's kernel keeps x.
    Reference twin: `torch.nn.functional.gelu(x, approximate="tanh")`.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _compute(x, with_slope=False)[0]
    y: Tensor = _GeluTanh.apply(x)
    return y
