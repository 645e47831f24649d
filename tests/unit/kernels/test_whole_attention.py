"""Attention over whole matrices of scores: the definition in both passes, dropout, and queries without a key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.kernels.cpu.attention import whole_attention
from megalith.kernels.dropout import Dropout

B, H, Q, S, K = 2, 3, 5, 7, 4
SCALE = 0.3


def _qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a joint projection, as a layer hands them over."""
    draws = torch.Generator().manual_seed(1)
    joint = [torch.randn(length, B, H, 3, K, generator=draws, dtype=dtype).requires_grad_() for length in (Q, S)]
    return joint[0][:, :, :, 0], joint[1][:, :, :, 1], joint[1][:, :, :, 2]


def _definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
    scores = torch.einsum("qbhk,sbhk->bhqs", q, k) * SCALE
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqs,sbhk->qbhk", scores.softmax(-1), v)


HIDDEN = {
    "nothing": None,
    "later keys": torch.ones(Q, S, dtype=torch.bool).triu(3),
    "padding": (torch.arange(S) >= torch.tensor([[S], [4]]))[:, None, None, :],
}


@pytest.mark.parametrize("hides", HIDDEN)
@pytest.mark.parametrize("shape", [None, (H, Q, S), (B, H, Q, S)])
def test_both_passes_are_the_definition(hides: str, shape: tuple[int, ...] | None) -> None:
    qkv = _qkv()
    bias = None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours = whole_attention(*qkv, bias=bias, hidden=HIDDEN[hides], scale=SCALE)
    wanted = _definition(*qkv, bias, HIDDEN[hides])
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    leaves, upstream = [*qkv, *([] if bias is None else [bias])], torch.randn_like(wanted)
    for mine, reference in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-12)


def test_a_bias_is_left_as_it_is() -> None:
    bias = torch.randn(B, H, Q, S, dtype=torch.float64)
    before = bias.clone()
    whole_attention(*_qkv(), bias=bias, scale=SCALE)
    assert torch.equal(bias, before)


def test_a_query_without_a_key_spreads_no_nan() -> None:
    qkv = _qkv()
    nothing_seen = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    nothing_seen[1] = True
    context = whole_attention(*qkv, hidden=nothing_seen, scale=SCALE)
    assert context.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(context.sum(), qkv))


def test_dropout_draws_the_same_masks_in_both_passes() -> None:
    qkv, bias = _qkv(), torch.randn(H, Q, S, dtype=torch.float64, requires_grad=True)
    leaves = (*qkv, bias)
    weights = torch.randn(Q, B, H, K, dtype=torch.float64)

    def total(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (whole_attention(q, k, v, bias=bias, dropout=0.4, scale=SCALE) * weights).sum()

    for index, gradient in enumerate(torch.autograd.grad(total(*leaves), leaves)):
        direction = torch.randn_like(gradient)
        moved, back = ([x.detach() for x in leaves] for _ in range(2))
        moved[index] = moved[index] + 1e-6 * direction
        back[index] = back[index] - 1e-6 * direction
        numeric = (total(*moved) - total(*back)) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-7)


def test_samples_are_masked_independently_and_the_mean_is_kept() -> None:
    q, k, v = (x.detach()[:, :1].expand(-1, B, -1, -1) for x in _qkv())
    torch.manual_seed(0)
    draws = torch.stack([whole_attention(q, k, v, dropout=0.4, scale=SCALE) for _ in range(3000)])
    assert not torch.equal(draws[0][:, 0], draws[0][:, 1])
    deviation = (draws.mean(0) - _definition(q, k, v, None, None)) / (draws.std(0) / 3000**0.5)
    assert deviation.abs().max() < 5.0


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_masks_keep_the_expectation(probability: float) -> None:
    like = torch.empty(1000, 1001, dtype=torch.float64)  # not a multiple of four elements
    mask = Dropout(probability, 7).masks(like.device).mask(like)
    assert mask.unique().numel() == 2
    deviation = (probability * (1 - probability) / like.numel()) ** 0.5
    assert abs(float((mask == 0).double().mean()) - probability) < 5 * deviation + 2**-17
    assert float(mask.mean()) == pytest.approx(1.0, abs=5 * deviation / (1 - probability))
