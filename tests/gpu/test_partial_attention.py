"""Parts of attention on a CUDA device: torch's flash kernel against the reference, and the reference against a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.kernels.dropout import Dropout
from megalith.kernels.partial_attention import attend_part, attend_part_backward, has_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def _tensors(keys: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and an upstream gradient: heads of size 64 as a view of sequence-first memory, two queries a group."""
    generator = torch.Generator().manual_seed(keys)
    shapes = [(300, 2, 4, 64), (keys, 2, 2, 64), (keys, 2, 2, 64), (300, 2, 4, 64)]
    return [torch.randn(shape, generator=generator).to(device, dtype).permute(1, 2, 0, 3) for shape in shapes]


def _both_passes(tensors: list[Tensor], causal: bool, flash: bool) -> tuple[Tensor, ...]:
    q, k, v, grad = tensors
    context, lse = attend_part(q, k, v, causal=causal, flash=flash)
    return context, lse, *attend_part_backward(grad, q, k, v, context, lse, causal=causal, flash=flash)


@pytest.mark.parametrize(("keys", "causal"), [(300, True), (150, False)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_flash_agrees_with_the_reference(dtype: torch.dtype, tolerance: float, keys: int, causal: bool) -> None:
    tensors = _tensors(keys, dtype, "cuda")
    if not has_flash(tensors[0]):
        pytest.skip("torch has no flash kernel for this GPU")
    exact = _both_passes([x.double() for x in tensors], causal, flash=False)
    for mine, reference in zip(_both_passes(tensors, causal, flash=True), exact, strict=True):
        assert (mine.double() - reference).abs().max() <= tolerance * reference.abs().max()


def test_the_reference_is_that_of_the_cpu() -> None:
    here = _both_passes(_tensors(300, torch.float64, "cuda"), causal=True, flash=False)
    there = _both_passes(_tensors(300, torch.float64, "cpu"), causal=True, flash=False)
    for mine, reference in zip(here, there, strict=True):
        torch.testing.assert_close(mine.cpu(), reference, rtol=1e-10, atol=1e-11)


def test_dropout_repeats_by_its_seed() -> None:
    q, k, v, _ = _tensors(300, torch.bfloat16, "cuda")
    first, again, other = (attend_part(q, k, v, causal=True, dropout=Dropout(0.2, seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
