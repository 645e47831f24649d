"""GELU without a tanh against torch's, in fp64, fp32 and half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.kernels.cpu import gelu as module
from megalith.kernels.cpu.gelu import gelu_tanh
from megalith.nn import feed_forward


def _both_passes(function: object, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)  # type: ignore[operator]
    return y.detach(), torch.autograd.grad(y, x, upstream)[0]


def _torch(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (3, 5, 8), (40, 50)])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_passes_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], transposed: bool
) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    monkeypatch.setattr(module, "_LEAST_PIECE", 100)  # several pieces, the last one shorter
    draws = torch.Generator().manual_seed(1)
    x, upstream = (3.0 * torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    if transposed and len(shape) > 1:
        x, upstream = x.transpose(0, 1), upstream.transpose(0, 1)
    for found, wanted in zip(_both_passes(gelu_tanh, x, upstream), _both_passes(_torch, x, upstream), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_large_inputs_have_the_limits_of_the_function() -> None:
    x = torch.tensor([30.0, -30.0, 1e4, -1e4, 1e15, -1e15, 0.0])
    y, slope = _both_passes(gelu_tanh, x, torch.ones_like(x))
    assert torch.equal(y, torch.tensor([30.0, 0.0, 1e4, 0.0, 1e15, 0.0, 0.0]))
    assert torch.equal(slope, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5]))


def test_fp32_is_as_exact_as_torch() -> None:
    x = torch.linspace(-9.0, 9.0, 20_001)
    exact = _both_passes(_torch, x.double(), torch.ones_like(x, dtype=torch.float64))
    ours, theirs = (_both_passes(function, x, torch.ones_like(x)) for function in (gelu_tanh, _torch))
    for found, other, wanted in zip(ours, theirs, exact, strict=True):
        assert (found - wanted).abs().max() <= max(3.0 * (other - wanted).abs().max(), 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_in_each_pass(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(module, "_LEAST_PIECE", 1000)
    monkeypatch.setattr(module, "_PIECE", 1000)
    x = torch.linspace(-9.0, 9.0, 20_001).to(dtype)
    wide, ones = x.float(), torch.ones_like(x)
    ours, exact = _both_passes(gelu_tanh, x, ones), _both_passes(gelu_tanh, wide, ones.float())
    for found, wanted in zip(ours, exact, strict=True):
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_without_gradient_has_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(300, 200, dtype=dtype, requires_grad=True)
    y = gelu_tanh(x)
    with torch.no_grad():
        assert torch.equal(gelu_tanh(x), y)
    assert torch.equal(gelu_tanh(x.detach()), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("elements", [100, 1 << 17])
def test_the_layer_takes_it_for_large_tensors(dtype: torch.dtype, elements: int) -> None:
    x = torch.randn(elements).to(dtype)
    expected = gelu_tanh(x) if dtype != torch.float64 and elements > 100 else _torch(x)
    assert torch.equal(feed_forward.gelu_tanh(x), expected)
