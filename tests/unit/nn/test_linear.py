"""The linear layer with a sink gives the gradients of the linear layer without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.nn.linear import Linear
from megalith.nn.placement import Fused, Replicated, Split
from megalith.optim.gradients import GradientBuffers

CPU = torch.device("cpu")


def _layer(dtype: torch.dtype, bias: bool = True) -> Linear:
    torch.manual_seed(0)
    layer = Linear(5, 7, Split(0), bias=bias, dtype=dtype, device=CPU)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def _gradients(layer: Linear, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sink_receives_what_autograd_would(dtype: torch.dtype, bias: bool) -> None:
    x = torch.randn(3, 4, 5, dtype=dtype)
    plain, sunk = _layer(dtype, bias), _layer(dtype, bias)
    buffers = GradientBuffers(list(sunk.named_parameters()), torch.float64)
    sunk.sink = buffers
    expected = _gradients(plain, x) | {name: p.grad for name, p in plain.named_parameters()}
    actual = _gradients(sunk, x) | buffers.grads
    for name, value in expected.items():
        assert value is not None
        torch.testing.assert_close(
            actual[name].to(dtype),
            value,
            rtol=2e-2 if dtype != torch.float64 else 1e-12,
            atol=0.05 if dtype != torch.float64 else 1e-12,
        )
    assert all(p.grad is None for p in sunk.parameters())


def test_half_precision_bias_is_added_after_rounding() -> None:
    layer = _layer(torch.bfloat16)
    x = torch.randn(64, 5, dtype=torch.bfloat16)
    assert layer.bias is not None
    product = (x.float() @ layer.weight.float().t()).to(torch.bfloat16)
    assert torch.equal(layer(x), product + layer.bias)


def test_fp16_on_a_cpu_keeps_its_storage_and_rounding() -> None:
    layer = _layer(torch.float16, bias=False)
    x = torch.randn(64, 5, dtype=torch.float16)
    y = layer(x)
    assert y.dtype == torch.float16
    assert torch.equal(y, (x.float() @ layer.weight.float().t()).half())


def test_placement_of_the_bias_follows_the_outputs() -> None:
    for placement, expected in ((Split(0), Split(0)), (Split(1), Replicated()), (Fused(0, 2), Fused(0, 2))):
        layer = Linear(4, 4, placement, bias=True, dtype=torch.float32, device=CPU)
        assert layer.placements() == {"weight": placement, "bias": expected}
