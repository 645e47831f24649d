"""Attention kernels agree with each other and with the definition; the cache does not change a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megalith.kernels.cpu.attention import BLOCK, blocked_causal_attention
from megalith.models.attention_kernels import attend_by_device
from megalith.nn import attend as attend_module
from megalith.nn.attend import PLAIN, AttentionRule, Mask, attend_fused, attend_unfused, expand_groups
from megalith.nn.rope import rotate, rotation


def _qkv(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(queries + keys)
    return [torch.randn(n, 2, 3, 8, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]


def _definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("qbhk,sbhk->bhqs", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(PLAIN.hidden(q.shape[0], k.shape[0], q.device), -math.inf)
    return torch.einsum("bhqs,sbhk->qbhk", scores.softmax(-1), v)


RULES = {
    "scale": AttentionRule(scale=0.3),
    "window": AttentionRule(window=2),
    "widest": AttentionRule(window=0),
    "sink": AttentionRule(sink_H=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)),
    "all": AttentionRule(scale=0.7, window=3, sink_H=torch.tensor([0.0, 1.0, -3.0], dtype=torch.float64)),
}


def _ruled(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sink_H: Tensor | None) -> Tensor:
    """Written out: each query's visible keys, and the sink in the denominator."""
    rows = []
    for i in range(q.shape[0]):
        own = k.shape[0] - q.shape[0] + i
        first = 0 if rule.window is None else max(0, own - rule.window)
        weights = (torch.einsum("bhk,sbhk->bhs", q[i], k[first : own + 1]) * rule.scale_of(q.shape[-1])).exp()
        total = weights.sum(-1, keepdim=True)
        if sink_H is not None:
            total = total + sink_H.exp()[None, :, None]
        rows.append(torch.einsum("bhs,sbhk->bhk", weights / total, v[first : own + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize("kernel", ["fused", "unfused", "by device"])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_kernels_follow_a_mask_in_both_passes(kernel: str, queries: int, keys: int, causal: bool, biased: bool) -> None:
    q, k, v = _qkv(queries, keys)
    hidden_BQS = torch.zeros(2, 1, keys, dtype=torch.bool)
    hidden_BQS[1, :, -2:] = True
    bias_HQS = torch.randn(3, queries, keys, dtype=torch.float64, requires_grad=True) if biased else None
    rule = AttentionRule(scale=0.3, causal=causal, mask=Mask(hidden_BQS, bias_HQS))
    scores = torch.einsum("qbhk,sbhk->bhqs", q, k) * 0.3
    if bias_HQS is not None:
        scores = scores + bias_HQS
    if causal:
        later = torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries
        scores = scores.masked_fill(later, -math.inf)
    weights = scores.masked_fill(hidden_BQS[:, None], -math.inf).softmax(-1)
    expected = torch.einsum("bhqs,sbhk->qbhk", weights, v)
    unfused = partial(attend_unfused, softmax_in_fp32=True)
    attend = {"fused": attend_fused, "unfused": unfused, "by device": attend_by_device}[kernel]
    found = attend(q, k, v, 0.0, rule)
    assert torch.allclose(found, expected, atol=1e-12)
    leaves = [q, k, v, *([] if bias_HQS is None else [bias_HQS])]
    along = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, along), torch.autograd.grad(expected, leaves, along), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("kernel", ["fused", "unfused"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (6, 6), (1, 6), (3, 7)])
def test_kernels_follow_the_rule_in_both_passes(kernel: str, name: str, queries: int, keys: int) -> None:
    q, k, v = _qkv(queries, keys)
    rule, leaves = RULES[name], [q, k, v]
    sink = None if rule.sink_H is None else rule.sink_H.clone().requires_grad_()
    leaves += [] if sink is None else [sink]
    rule = replace(rule, sink_H=sink)
    attend = attend_fused if kernel == "fused" else partial(attend_unfused, softmax_in_fp32=True)
    found, wanted = attend(q, k, v, 0.0, rule), _ruled(q, k, v, rule, sink)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(q)
    gradients = torch.autograd.grad(found, leaves, upstream)
    for mine, reference in zip(gradients, torch.autograd.grad(wanted, leaves, upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [0, 5, BLOCK - 1, BLOCK + 40])
def test_blocked_attention_in_a_window(window: int) -> None:
    q, k, v = _qkv(2 * BLOCK + 37, 2 * BLOCK + 37)
    upstream, rule = torch.randn_like(q), AttentionRule(scale=0.5, window=window)
    ours = blocked_causal_attention(q, k, v, scale=0.5, window=window)
    wanted = attend_fused(q, k, v, 0.0, rule)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    for mine, reference in zip(gradients, torch.autograd.grad(wanted, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fused": lambda q, k, v: attend_fused(q, k, v, 0.0),
    "unfused": lambda q, k, v: attend_unfused(q, k, v, 0.0, softmax_in_fp32=True),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 6), (3, 7)])
def test_kernels_follow_the_definition(kernel: str, queries: int, keys: int) -> None:
    q, k, v = _qkv(queries, keys)
    torch.testing.assert_close(KERNELS[kernel](q, k, v), _definition(q, k, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 37])
def test_blocked_attention_and_its_gradients(length: int) -> None:
    q, k, v = _qkv(length, length)
    upstream = torch.randn_like(q)
    ours, wanted = blocked_causal_attention(q, k, v), attend_fused(q, k, v, 0.0)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    for mine, reference in zip(gradients, torch.autograd.grad(wanted, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


def test_blocked_dropout_draws_the_same_masks_in_both_passes() -> None:
    q, k, v = _qkv(150, 150)

    def total(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (blocked_causal_attention(queries, keys, values, 0.3) * torch.arange(8)).sum()

    gradients = torch.autograd.grad(total(q, k, v), (q, k, v))
    for index, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        moved = [x.detach() + 1e-6 * direction * (i == index) for i, x in enumerate((q, k, v))]
        back = [x.detach() - 1e-6 * direction * (i == index) for i, x in enumerate((q, k, v))]
        numeric = (total(*moved) - total(*back)) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-6)


def test_blocked_dropout_keeps_the_mean_and_follows_the_default_stream() -> None:
    q, k, v = (x.detach() for x in _qkv(40, 40))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draws = [blocked_causal_attention(q, k, v, 0.4) for _ in range(600)]
    torch.testing.assert_close(torch.stack(draws).mean(0), attend_fused(q, k, v, 0.0), rtol=0, atol=0.25)
    assert not torch.equal(draws[0], draws[1])
    torch.set_rng_state(state)
    assert torch.equal(blocked_causal_attention(q, k, v, 0.4), draws[0])


def test_blocked_attention_in_bf16_is_as_exact_as_its_dtype() -> None:
    exact = _qkv(200, 200, torch.float32)
    ours = blocked_causal_attention(*(x.bfloat16() for x in exact)).float()
    wanted = attend_fused(*(x.bfloat16().float() for x in exact), 0.0)
    assert (ours - wanted).abs().max() <= 2**-6 * wanted.abs().max()


def test_groups_repeat_each_key_head_for_its_queries() -> None:
    x = torch.arange(2.0).view(1, 1, 2, 1)
    assert expand_groups(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("kernel", ["fused", "unfused", "by device", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [PLAIN, AttentionRule(window=3), AttentionRule(causal=False)], ids=str)
def test_groups_are_attended_to_as_their_copies(kernel: str, dtype: torch.dtype, rule: AttentionRule) -> None:
    attend = {
        "fused": attend_fused,
        "unfused": partial(attend_unfused, softmax_in_fp32=True),
        "by device": attend_by_device,
        "blocked": lambda q, k, v, dropout, rule: blocked_causal_attention(q, k, v, dropout, window=rule.window),
    }[kernel]
    if kernel == "blocked" and not rule.causal:
        pytest.skip("it is causal")
    torch.manual_seed(0)
    leaves = [torch.randn(BLOCK + 9, 2, heads, 8).to(dtype).requires_grad_() for heads in (6, 2, 2)]
    q, k, v = leaves
    found = attend(q, k, v, 0.0, rule)
    wanted = attend(q, expand_groups(k, 6), expand_groups(v, 6), 0.0, rule)
    assert torch.equal(found, wanted)
    upstream = torch.randn_like(q)
    gradients, right = (torch.autograd.grad(context, leaves, upstream) for context in (found, wanted))
    assert torch.equal(gradients[0], right[0])
    for ours, theirs in zip(gradients[1:], right[1:], strict=True):
        if dtype != torch.bfloat16:
            assert torch.equal(ours, theirs)
        else:  # where products are in fp32 the sum over a group is rounded once, and that of copies twice
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2.0**-7 * float(theirs.abs().max()))
    with torch.no_grad():
        copies = attend(q, expand_groups(k, 6), expand_groups(v, 6), 0.0, rule)
        assert torch.equal(attend(q, k, v, 0.0, rule), copies)


@pytest.mark.parametrize("attend", [attend_fused, blocked_causal_attention])
def test_no_copies_of_the_groups_are_kept(attend: Callable[..., Tensor]) -> None:
    q, k, v = (torch.randn(256, 2, heads, 16, requires_grad=True) for heads in (8, 2, 2))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(q, k, v, 0.0)
    of_queries, of_groups, of_sums = (x.numel() * x.element_size() for x in (q, k, q[..., 0]))
    assert sum(kept.values()) <= 2 * of_queries + 2 * of_groups + of_sums  # q and the context, k and v, the log-sum-exp


@pytest.mark.parametrize(("flash", "masked", "heads"), [(True, False, 2), (True, True, 6), (False, False, 6)])
def test_groups_are_repeated_where_a_gpu_s_kernel_takes_none(
    monkeypatch: pytest.MonkeyPatch, flash: bool, masked: bool, heads: int
) -> None:
    received: list[tuple[int, int, bool]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, *_: object, enable_gqa: bool, scale: float) -> Tensor:
        received.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(attend_module, "has_flash", lambda q: flash)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q, k, v = (torch.empty(5, 1, number, 8, device="meta") for number in (6, 2, 2))
    attend_fused(q, k, v, 0.0, AttentionRule(window=2) if masked else PLAIN)
    assert received == [(heads, heads, heads == 2)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_distance_only(interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        rope = rotation(torch.tensor([i, j]), 8, 10000, interleaved=interleaved, dtype=torch.float64)
        rotated = rotate(torch.cat((q, k)), rope, interleaved=interleaved)
        return float(rotated[0].flatten() @ rotated[1].flatten())

    assert score(3, 1) == pytest.approx(score(10, 8), rel=1e-12)
    assert score(3, 1) != pytest.approx(score(10, 7), rel=1e-3)


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    x = torch.randn(3, 1, 1, 8)
    rotated = rotate(x, rotation(torch.arange(3), 4, 10000, interleaved=False, dtype=x.dtype), interleaved=False)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert not torch.equal(rotated[1:, ..., :4], x[1:, ..., :4])
