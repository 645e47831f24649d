"""Zeros that the system clears: torch's, in all that can be seen of them."""

from __future__ import annotations

import copy

import pytest
import torch

from megalith.kernels.cpu.memory import lazy_zeros


@pytest.mark.parametrize("shape", [(0,), (3, 5), (700, 1000), (1 << 20,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zeros_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = lazy_zeros(shape, dtype, torch.device("cpu"))
    assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    again = copy.deepcopy(made.add_(1))
    assert torch.equal(again, torch.ones(shape, dtype=dtype))


def test_two_tensors_share_no_memory_and_live_as_long_as_their_views() -> None:
    first, second = (lazy_zeros((1 << 20,), torch.float32, torch.device("cpu")) for _ in range(2))
    first.fill_(1.0)
    view = first[10:20]
    del first
    assert view.tolist() == [1.0] * 10 and not second.any()
