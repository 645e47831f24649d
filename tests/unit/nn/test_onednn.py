"""Products by oneDNN are those of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from megalith.kernels.cpu import products
from megalith.kernels.torch_private import onednn_linear

needs_it = pytest.mark.skipif(not products._HAS_ONEDNN, reason="this torch has no oneDNN operator for linear layers")


@needs_it
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 512), (3, 2, 512), (512,), (700, 512)])
def test_it_gives_what_torch_gives(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, generator=generator) for size in (shape, (520, 512)))
    offset = torch.randn(520, generator=generator) if bias else None
    assert products.uses_onednn(x, weight) == (x.numel() // 512 >= products._MIN_ROWS)
    exact = linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(onednn_linear(x, weight, offset).double(), exact, rtol=1e-5, atol=1e-4)
    strided = torch.stack((x, x), dim=-1)[..., 0]
    torch.testing.assert_close(onednn_linear(strided, weight, offset).double(), exact, rtol=1e-5, atol=1e-4)


def test_what_is_trained_or_small_or_of_another_precision_is_torchs() -> None:
    x, weight = torch.zeros(4, 512), torch.zeros(520, 512)
    assert not products.uses_onednn(x, weight.clone().requires_grad_())
    assert not products.uses_onednn(x.clone().requires_grad_(), weight)
    assert not products.uses_onednn(x.double(), weight.double())
    assert not products.uses_onednn(x.half(), weight.half())
    assert not products.uses_onednn(torch.zeros(4, 8), torch.zeros(8, 8))
    assert not products.uses_onednn(torch.zeros(0, 512), weight)


@needs_it
def test_a_single_row_is_torchs_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, weight = torch.zeros(1, 512), torch.zeros(2, 512), torch.zeros(520, 512)
    for fewest in (1, 2):
        monkeypatch.setattr(products, "_MIN_ROWS", fewest)
        assert products.uses_onednn(two, weight) and products.uses_onednn(one, weight) == (fewest == 1)
