"""Gated activations that keep their input alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import device
from megalith.nn.feed_forward import ACTIVATIONS, Activation


def _kept_bytes(activation: Activation, x: Tensor) -> int:
    """Return the memory that is kept for the backward pass."""
    kept = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        activation(x)
    storages = [tensor.untyped_storage() for tensor in kept]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("offset", "clamp"), [(0.0, None), (1.0, None), (1.0, 0.7), (0.0, 0.7)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_accelerator_computes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, offset: float, clamp: float | None, dtype: torch.dtype
) -> None:
    activation = Activation(kind, gated=True, offset=offset, clamp=clamp)
    x, grad = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True), torch.randn(3, 5, 8, dtype=dtype)
    wanted = activation(x)
    (wanted_dx,) = torch.autograd.grad(wanted, x, grad)
    monkeypatch.setattr(device, "HOST_KINDS", ())
    found = activation(x)
    (found_dx,) = torch.autograd.grad(found, x, grad)
    assert torch.equal(found, wanted) and torch.equal(found_dx, wanted_dx)
    assert not torch.equal(wanted_dx, torch.zeros_like(x))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_an_accelerator_keeps_the_input_alone(kind: str) -> None:
    activation = Activation(kind, gated=True)
    on_host, elsewhere = (
        _kept_bytes(activation, torch.empty(64, 2 * 96, device=where, requires_grad=True)) for where in ("cpu", "meta")
    )
    assert elsewhere == 64 * 2 * 96 * 4 < on_host
