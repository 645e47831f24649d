"""The linear layer with a sink gives the gradients of the linear layer without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.nn.linear import Linear, column, row
from megalith.nn.placement import Fused, Replicated, Split
from megalith.nn.region import AsyncHandle, Solo
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


class Recording(Solo):
    """A region of two ranks on paper, which notes when what is moved is started and awaited."""

    size = 2

    def __init__(self) -> None:
        self.events: list[str] = []

    def _moved(self, name: str, x: Tensor) -> AsyncHandle:
        events = self.events
        events.append(f"start {name}")

        class Noted:
            def wait(self) -> Tensor:
                events.append(f"wait {name}")
                return x

        return Noted()

    def gather(self, x: Tensor) -> AsyncHandle:
        return self._moved("spread", x)

    def reduce(self, x: Tensor) -> AsyncHandle:
        return self._moved("collect", x)

    def accumulate_linear(
        self, parameter: torch.nn.Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        """As a sink, it notes when weight gradients are computed."""
        self.events.append("weight gradient")

    def accumulate_embedding(self, parameter: torch.nn.Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        raise AssertionError("a linear has no rows")


def test_the_input_gradient_travels_under_the_weight_gradients() -> None:
    region, layers = Recording(), [_layer(torch.float64), _layer(torch.float64)]
    for layer in layers:
        layer.sink = region
    first, second = column(torch.randn(3, 5, dtype=torch.float64, requires_grad=True), region, *layers)
    assert region.events == ["start spread", "wait spread"]  # one for both
    region.events.clear()
    (first + second).sum().backward()
    moved = ["start spread", "start collect", "wait spread"]  # the input arrives under the product of its gradient
    assert region.events == [*moved, "weight gradient", "weight gradient", "wait collect"]


def test_the_gradient_of_a_row_is_gathered_before_its_products() -> None:
    region, layer = Recording(), _layer(torch.float64)
    layer.sink = region
    y = row(torch.randn(3, 5, dtype=torch.float64, requires_grad=True), region, layer)
    assert region.events == ["start collect", "wait collect"]
    region.events.clear()
    y.sum().backward()
    assert region.events == ["start spread", "wait spread", "weight gradient"]


def test_frozen_weights_get_no_gradient() -> None:
    layer = _layer(torch.float64)
    region = layer.sink = Recording()
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    column(x, region, layer)[0].sum().backward()
    assert "weight gradient" not in region.events
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 5))


def test_placement_of_the_bias_follows_the_outputs() -> None:
    for placement, expected in ((Split(0), Split(0)), (Split(1), Replicated()), (Fused(0, 2), Fused(0, 2))):
        layer = Linear(4, 4, placement, bias=True, dtype=torch.float32, device=CPU)
        assert layer.placements() == {"weight": placement, "bias": expected}
