"""Attention in parts and inside documents: torch's flash kernels against the reference in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.kernels.dropout import Dropout
from megalith.kernels.partial_attention import attend_part, attend_part_backward, has_flash
from megalith.models.attention_kernels import attend_by_device
from megalith.nn.attend import AttentionRule, attend_fused
from megalith.nn.documents import Documents

TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


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
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_flash_agrees_with_the_reference(dtype: torch.dtype, keys: int, causal: bool, device: str) -> None:
    tensors = _tensors(keys, dtype, device)
    if not has_flash(tensors[0]):
        pytest.skip("torch has no flash kernel for this device")
    exact = _both_passes([x.double() for x in tensors], causal, flash=False)
    for mine, reference in zip(_both_passes(tensors, causal, flash=True), exact, strict=True):
        assert (mine.double() - reference).abs().max() <= TOLERANCES[dtype] * reference.abs().max()


def test_the_reference_is_that_of_sdpa(device: str) -> None:
    q, k, v, grad = _tensors(300, torch.float64, device)
    found = _both_passes([q, k, v, grad], causal=True, flash=False)
    leaves = [x.cpu().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(2, dim=1) for x in leaves[1:])]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    references = [wanted, *torch.autograd.grad(wanted, leaves, grad.cpu())]
    for mine, reference in zip((found[0], *found[2:]), references, strict=True):
        torch.testing.assert_close(mine.cpu(), reference, rtol=1e-10, atol=1e-11)


def test_dropout_repeats_by_its_seed(device: str) -> None:
    q, k, v, _ = _tensors(300, torch.bfloat16, device)
    first, again, other = (attend_part(q, k, v, causal=True, dropout=Dropout(0.2, seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
RULES = {
    "plain": AttentionRule(scale=0.1),
    "window": AttentionRule(window=100),
    "sink": AttentionRule(sink_H=SINK),
    "both": AttentionRule(scale=0.1, window=33, sink_H=SINK),
}


@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_documents_windows_and_sinks(dtype: torch.dtype, name: str, in_documents: bool, device: str) -> None:
    """On a GPU from sm_80 one call of the flash kernel, elsewhere calls for documents and for blocks of queries."""
    ids = torch.zeros(2, 512, dtype=torch.int32)
    ids[0, [1, 100, 101, 400]] = 1
    ids[1, 300] = 1
    documents = Documents.of(ids.cumsum(1), torch.device(device)) if in_documents else None
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(512, 2, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rules = [replace(RULES[name], documents=documents) for _ in range(2)]
    if (sink := rules[0].sink_H) is not None:
        for number, leaves in enumerate((inputs, exact)):
            leaves.append(sink.to(device, leaves[0].dtype).requires_grad_())
            rules[number] = replace(rules[number], sink_H=leaves[-1])
    ours, wanted = attend_by_device(*inputs[:3], 0.0, rules[0]), attend_fused(*exact[:3], 0.0, rules[1])
    pairs = [(ours, wanted)]
    pairs += zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    )
    for mine, reference in pairs:
        assert (mine.double() - reference).abs().max() <= TOLERANCES[dtype] * reference.abs().max()
