"""Attention in parts merges into attention to all keys; flash kernels agree with the reference in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.cpu.attention import BLOCK
from megalith.kernels.dropout import Dropout
from megalith.kernels.partial_attention import attend_part, attend_part_backward, has_flash, merge_parts
from megalith.nn.attend import PLAIN, AttentionRule


def _tensors(queries: int, keys: int, groups: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and an upstream gradient as the model has them: heads are a view of sequence-first memory."""
    torch.manual_seed(queries + keys)
    shapes = [(queries, 2, 4, 8), (keys, 2, groups, 8), (keys, 2, groups, 8), (queries, 2, 4, 8)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3) for shape in shapes]


def _definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(PLAIN.hidden(q.shape[2], k.shape[2], q.device), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(6, 6, True), (5, 9, False), (BLOCK + 5, BLOCK + 5, True), (2 * BLOCK, 7, False)]
)
def test_a_part_follows_the_definition_in_both_passes(
    queries: int, keys: int, causal: bool, groups: int, flash: bool
) -> None:
    q, k, v, grad = _tensors(queries, keys, groups)
    assert has_flash(q)
    context, lse = attend_part(q, k, v, causal=causal, flash=flash)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = _definition(leaves[0], leaves[1], leaves[2], causal)
    torch.testing.assert_close(context, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-11, atol=1e-12)
    found = attend_part_backward(grad, q, k, v, context, lse, causal=causal, flash=flash)
    for mine, reference in zip(found, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-11)


def test_parts_in_a_window_merge_where_a_query_sees_no_key_of_one() -> None:
    q, k, v, grad = _tensors(12, 12, 2)
    hidden, cuts = AttentionRule(window=3).hidden(12, 12, q.device), [slice(0, 6), slice(6, 12)]
    context, lse = torch.zeros_like(q), torch.full(q.shape[:3], torch.finfo(q.dtype).min, dtype=q.dtype)
    options: list[dict[str, Any]] = [
        {"causal": False, "hidden": hidden[:, cut].__getitem__, "scale": 0.4} for cut in cuts
    ]
    for cut, option in zip(cuts, options, strict=True):
        part, of_part = attend_part(q, k[:, :, cut], v[:, :, cut], **option)
        unseen = slice(9, 12) if cut.start == 0 else slice(0, 6)
        assert bool(of_part[:, :, unseen].isneginf().all()) and not bool(part[:, :, unseen].any())
        merge_parts(context, lse, part, of_part)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(2, dim=1) for x in leaves[1:]]
    scores = (leaves[0] @ wide[0].transpose(2, 3) * 0.4).masked_fill(hidden, float("-inf"))
    wanted = scores.softmax(-1) @ wide[1]
    torch.testing.assert_close(context, wanted, rtol=1e-11, atol=1e-12)
    parts = [
        attend_part_backward(grad, q, k[:, :, cut], v[:, :, cut], context, lse, **option)
        for cut, option in zip(cuts, options, strict=True)
    ]
    dq, dk, dv = torch.autograd.grad(wanted, leaves, grad)
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=2), dk, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=2), dv, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("flash", [True, False])
def test_parts_merge_into_attention_to_all_keys(flash: bool) -> None:
    q, k, v, grad = _tensors(10, 23, 2)
    cuts = [slice(0, 4), slice(4, 17), slice(17, 23)]
    context, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    for cut in cuts:
        merge_parts(context, lse, *attend_part(q, k[:, :, cut], v[:, :, cut], causal=False, flash=flash))
    whole, whole_lse = attend_part(q, k, v, causal=False)
    torch.testing.assert_close(context, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-11, atol=1e-12)
    # The backward passes of the parts need nothing of each other but the context and the lse of all keys.
    parts = [
        attend_part_backward(grad, q, k[:, :, cut], v[:, :, cut], context, lse, causal=False, flash=flash)
        for cut in cuts
    ]
    dq, dk, dv = attend_part_backward(grad, q, k, v, whole, whole_lse, causal=False)
    torch.testing.assert_close(sum(part[0] for part in parts), dq, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=2), dk, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=2), dv, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2**-20), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("flash", [True, False])
def test_a_part_is_as_exact_as_its_dtype(flash: bool, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v, grad = _tensors(40, 40, 2, dtype)
    exact = [x.double() for x in (q, k, v, grad)]
    context, lse = attend_part(q, k, v, causal=True, flash=flash)
    assert lse.dtype == torch.float32
    found = (context, *attend_part_backward(grad, q, k, v, context, lse, causal=True, flash=flash))
    wanted_context, wanted_lse = attend_part(*exact[:3], causal=True, flash=False)
    wanted = attend_part_backward(exact[3], *exact[:3], wanted_context, wanted_lse, causal=True, flash=False)
    for mine, reference in zip(found, (wanted_context, *wanted), strict=True):
        assert (mine.double() - reference).abs().max() <= tolerance * reference.abs().max()


def test_dropout_draws_the_same_mask_in_both_passes() -> None:
    q, k, v, grad = _tensors(BLOCK + 20, 30)
    dropout = Dropout(0.3, seed=5)
    context, lse = attend_part(q, k, v, causal=False, dropout=dropout)
    gradients = attend_part_backward(grad, q, k, v, context, lse, causal=False, dropout=dropout)

    def total(tensors: list[Tensor]) -> Tensor:
        return (attend_part(*tensors, causal=False, dropout=dropout)[0] * grad).sum()

    for index, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        moved, back = (
            [x + step * direction if i == index else x for i, x in enumerate((q, k, v))] for step in (1e-6, -1e-6)
        )
        numeric = (total(moved) - total(back)) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-6)


def test_dropout_keeps_the_mean_and_its_blocks_differ() -> None:
    q, k, v, _ = _tensors(6, 12)
    exact, exact_lse = attend_part(q, k, v, causal=False)
    draws = [attend_part(q, k, v, causal=False, dropout=Dropout(0.4, 7).for_block(block)) for block in range(2000)]
    mean = torch.stack([context for context, _ in draws]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.12)
    assert (mean - exact).abs().mean() < 0.02
    assert not torch.equal(draws[0][0], draws[1][0])
    torch.testing.assert_close(draws[0][1], exact_lse)
