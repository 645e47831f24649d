"""Documents of many lengths on a CUDA device: torch's flash kernel for all of them against one call for each."""

from __future__ import annotations

import pytest
import torch

from megalith.kernels.partial_attention import has_varlen
from megalith.models.attention_kernels import attend_by_device
from megalith.nn.attend import AttentionRule, attend_fused
from megalith.nn.documents import Documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_varlen_agrees_with_one_call_for_each(dtype: torch.dtype, tolerance: float) -> None:
    ids = torch.zeros(2, 512, dtype=torch.int32)
    ids[0, [1, 100, 101, 400]] = 1
    ids[1, 300] = 1
    rule = AttentionRule(scale=0.1, documents=Documents.of(ids.cumsum(1), torch.device("cuda")))
    q, k, v, grad = (torch.randn(512, 2, 4, 64, device="cuda").to(dtype) for _ in range(4))
    if not has_varlen(q):
        pytest.skip("torch has no flash kernel for this GPU")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours, wanted = attend_by_device(*inputs, 0.0, rule), attend_fused(*exact, 0.0, rule)
    pairs = [(ours, wanted)]
    pairs += zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    )
    for mine, reference in pairs:
        assert (mine.double() - reference).abs().max() <= tolerance * reference.abs().max()
