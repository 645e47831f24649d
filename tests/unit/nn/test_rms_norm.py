"""The root-mean-square norm in few passes against torch's."""

from __future__ import annotations

import pytest
import torch

from megalith.nn.norm import RMSNorm
from megalith.nn.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (4, 0, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_passes_are_those_of_torch(shape: tuple[int, ...], transposed: bool) -> None:
    draws = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(8, generator=draws, dtype=torch.float64, requires_grad=True)
    if transposed and len(shape) > 2:
        x, upstream = x.transpose(0, 1), upstream.transpose(0, 1)
    x = x.detach().requires_grad_()
    ours, wanted = rms_norm(x, weight, 0.1), torch.nn.functional.rms_norm(x, (8,), weight, 0.1)
    torch.testing.assert_close(ours, wanted, rtol=1e-13, atol=1e-14)
    for mine, reference in zip(
        torch.autograd.grad(ours, (x, weight), upstream),
        torch.autograd.grad(wanted, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("hidden", "weights"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("around_one", [False, True])
def test_the_module_hands_on_the_dtype_of_its_weight(
    hidden: torch.dtype, weights: torch.dtype, around_one: bool
) -> None:
    norm = RMSNorm(8, 1e-5, around_one=around_one, dtype=weights, device=torch.device("cpu"))
    torch.nn.init.uniform_(norm.weight)
    x = torch.randn(5, 8, dtype=hidden)
    y = norm(x)
    assert y.dtype == weights
    weight = norm.weight.float() + float(around_one)
    torch.testing.assert_close(y.float(), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5), rtol=2**-7, atol=1e-6)
