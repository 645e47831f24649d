"""Attention inside documents against the mask that it stands for, with every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megalith.models.attention_kernels import attend_by_device
from megalith.nn.attend import AttentionRule, attend_fused, attend_unfused
from megalith.nn.documents import Documents

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 2, 3, 3, 3, 3, 3, 3]], dtype=torch.int32)
KERNELS = {
    "fused": attend_fused,
    "unfused": partial(attend_unfused, softmax_in_fp32=True),
    "by device": attend_by_device,
}
RULES = {
    "plain": AttentionRule(),
    "window": AttentionRule(scale=0.3, window=2),
    "sink": AttentionRule(sink_H=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)),
}


def masked(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Attention under the dense mask. [S, B, H, K] -> [S, B, H, K]."""
    length = q.shape[0]
    hidden = rule.hidden(length, length, q.device) | (IDS[:, None, :, None] != IDS[:, None, None, :])
    scores = torch.einsum("qbhk,sbhk->bhqs", q, k) * rule.scale_of(q.shape[-1])
    scores = scores.masked_fill(hidden, -torch.inf)
    if rule.sink_H is not None:
        sink = rule.sink_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return torch.einsum("bhqs,sbhk->qbhk", scores.softmax(-1)[..., :length], v)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_documents_are_the_mask(kernel: str, name: str) -> None:
    rule = RULES[name]
    documents = Documents.of(IDS)
    assert documents is not None
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(9, 2, 3, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    ours = KERNELS[kernel](*inputs, 0.0, replace(rule, documents=documents))
    wanted = masked(*inputs, rule)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    grads = [torch.autograd.grad(out, inputs, upstream) for out in (ours, wanted)]
    for grad, expected in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    inputs = [torch.randn(9, 2, 3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    rule = AttentionRule(documents=Documents.of(IDS))
    wanted = masked(*(x.float() for x in inputs), AttentionRule())
    kernels: list[Callable[..., Tensor]] = list(KERNELS.values())
    for kernel in kernels:
        torch.testing.assert_close(kernel(*inputs, 0.0, rule).float(), wanted, rtol=3e-2, atol=3e-2)


def test_where_documents_lie() -> None:
    documents = Documents.of(IDS)
    assert documents is not None
    assert documents.lengths == (3, 2, 4, 1, 1, 1, 6)
    assert (documents.longest, documents.offsets.tolist()) == (6, [0, 3, 5, 9, 10, 11, 12, 18])
    assert documents.offsets.dtype == torch.int32
    x = torch.arange(9 * 2 * 3.0).view(9, 2, 3, 1)
    assert torch.equal(documents.joined(documents.separated(x)), x)


def test_sequences_of_one_document_each_need_nothing() -> None:
    assert Documents.of(torch.zeros(3, 5, dtype=torch.int32)) is None
    # The last document of a row and the first of the next one are different even where their numbers are not.
    documents = Documents.of(torch.tensor([[0, 1], [1, 1]]))
    assert documents is not None and documents.lengths == (1, 1, 2)
