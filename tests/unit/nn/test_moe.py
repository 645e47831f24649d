"""Mixtures of experts: choices by hand, capacity, the way of tokens there and back, balancing losses, whole layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.nn.feed_forward import Activation
from megalith.nn.linear import Linear
from megalith.nn.moe import grouped as grouped_module
from megalith.nn.moe.balance import Alone, Auxiliary, balancing_scores, switch_loss
from megalith.nn.moe.layer import MoE, MoESettings
from megalith.nn.moe.permutation import from_experts, order_by_expert, to_experts
from megalith.nn.moe.router import Router, RouterSettings
from megalith.nn.moe.routing import (
    Choice,
    RoutingRule,
    best_experts,
    choose,
    quantile_offsets,
    sinkhorn_plan,
    within_capacity,
)
from megalith.nn.placement import Split
from megalith.nn.region import SOLO
from megalith.registry import Entry, Registered

KIND: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
RULE = RoutingRule(experts=4)


def _logits(tokens: int = 6, experts: int = 4) -> Tensor:
    return torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_softmax_after_the_choice_sums_to_one_and_before_it_does_not() -> None:
    logits = _logits()
    after, before = choose(logits, RULE), choose(logits, dataclasses.replace(RULE, pre_softmax=True))
    assert torch.equal(after.experts_TK, before.experts_TK)
    assert torch.allclose(after.weights_TK.sum(-1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(before.weights_TK, logits.softmax(-1).gather(1, before.experts_TK))


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    rule, logits = dataclasses.replace(RULE, score="sigmoid", top_k=1, scaling=2.5), _logits()
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    choice = choose(logits, rule, bias_E=bias)
    assert choice.experts_TK.flatten().tolist() == [2] * 6
    assert torch.allclose(choice.weights_TK, 2.5 * logits[:, 2:3].sigmoid())


def test_roots_of_softplus_weigh_by_their_share() -> None:
    rule, logits = dataclasses.replace(RULE, score="sqrtsoftplus", top_k=2), _logits()
    scores = logits.exp().log1p().sqrt()
    choice = choose(logits, rule)
    chosen = scores.gather(1, choice.experts_TK)
    assert torch.equal(chosen.sum(-1), scores.topk(2).values.sum(-1))
    torch.testing.assert_close(choice.weights_TK, chosen / chosen.sum(-1, keepdim=True))
    shares, _ = balancing_scores(logits, rule)
    torch.testing.assert_close(shares, scores / scores.sum(-1, keepdim=True))


def test_roots_of_softplus_have_a_slope_far_down() -> None:
    logits = torch.tensor([[-300.0, 0.5, 1.0, -120.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(
        balancing_scores(logits, dataclasses.replace(RULE, score="sqrtsoftplus"))[0][0, 1], logits
    )
    assert gradient.isfinite().all()
    assert gradient[0, 1] > 0


def test_groups_are_ranked_by_the_sum_of_their_best() -> None:
    rule = RoutingRule(experts=6, top_k=2, groups=3, top_groups=1)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1]])
    assert sorted(best_experts(scores, rule)[0].tolist()) == [2, 3]  # not expert 0, the best of all


def test_quantiles_fill_every_expert_with_its_share() -> None:
    rule, logits = RoutingRule(experts=4, quantiles=True), _logits(tokens=400)
    logits[:, 1] += 2.0
    offsets = torch.zeros(4)

    def loads() -> list[int]:
        return torch.bincount(choose(logits, rule, bias_E=offsets).experts_TK.flatten(), minlength=4).tolist()

    assert max(loads()) > 300
    for _ in range(20):
        offsets = quantile_offsets(logits, rule, offsets)
    assert all(abs(load - 200) <= 4 for load in loads())
    choice = choose(logits, rule, bias_E=offsets)
    assert torch.equal(choice.weights_TK, logits.gather(1, choice.experts_TK).softmax(-1))  # of the plain logits
    for score, weigh in (("sigmoid", torch.sigmoid), ("softmax", lambda x: x.softmax(-1))):
        other = dataclasses.replace(rule, score=score, pre_softmax=True, top_k=1)
        chosen = choose(logits, other, bias_E=offsets)
        assert torch.equal(chosen.experts_TK, (logits - offsets).argmax(-1, keepdim=True))
        assert torch.equal(chosen.weights_TK, weigh(logits).gather(1, chosen.experts_TK))


def test_offsets_are_those_of_a_sort() -> None:
    rule, logits, offsets = RoutingRule(experts=4, quantiles=True), _logits(tokens=10), torch.tensor([0.5, -0.5, 0, 0])
    third = (logits - offsets).sort(-1, descending=True).values[:, 2:3]
    wanted = (logits - third).sort(0, descending=True).values[5]  # 10 tokens x 2 / 4 experts stand above
    assert torch.equal(quantile_offsets(logits, rule, offsets), wanted)


def test_inputs_that_are_weighed_are_not_weighed_again() -> None:
    rule = RoutingRule(experts=4, top_k=1, pre_softmax=True)
    layer = _layer(MoESettings(RouterSettings(rule), 6, weigh_inputs=True))
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    choice, tokens, found = layer.router(x), x.view(10, 8), layer(x).view(10, 8)
    for token, (expert, weight) in enumerate(zip(choice.experts_TK.flatten(), choice.weights_TK, strict=True)):
        torch.testing.assert_close(found[token], layer.experts.local_experts[int(expert)](weight * tokens[token]))


def test_random_choices_load_all_experts_and_the_router_still_learns() -> None:
    layer = _layer(MoESettings(RouterSettings(RULE, random=True), 6))
    with torch.no_grad():
        layer.router.weight[1] += 100.0
    x = torch.ones(2000, 1, 8, dtype=torch.float64)
    counts = torch.bincount(layer.router(x).experts_TK.flatten(), minlength=4)
    assert (counts - 1000).abs().max() < 150
    layer(x).square().sum().backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().sum() > 0


def test_a_plan_gives_all_experts_equal_shares() -> None:
    plan = sinkhorn_plan(5 * _logits(tokens=40), tolerance=1e-8)
    assert torch.allclose(plan.sum(0), torch.full((4,), 0.25, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(plan.sum(1), torch.full((40,), 1 / 40, dtype=torch.float64), atol=1e-5)


def test_sinkhorn_decides_in_training_only() -> None:
    rule = RoutingRule(experts=4, top_k=1, sinkhorn=True)
    logits = _logits(tokens=32)
    logits[:, 1] += 3.0
    counted = [
        torch.bincount(choose(logits, rule, training=t).experts_TK.flatten(), minlength=4) for t in (True, False)
    ]
    assert counted[0].max() < counted[1].max() == counted[1][1]


@pytest.mark.parametrize("by_position", [False, True])
def test_an_expert_keeps_the_tokens_it_has_room_for(by_position: bool) -> None:
    rule = RoutingRule(experts=2, top_k=1, capacity_factor=1.0, drop_by_position=by_position)
    weights = torch.tensor([[0.2], [0.9], [0.5], [0.5]])
    kept = within_capacity(Choice(torch.tensor([[0], [0], [0], [1]]), weights), rule)
    assert kept.flatten().tolist() == ([True, True, False, True] if by_position else [False, True, True, True])


def test_tokens_come_back_from_where_they_went() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [3, 1], [3, 3]])  # 3 stands for a dropped choice
    order = order_by_expert(experts, 3)
    assert order.counts_E == [1, 2, 2]
    assert order.token_N.tolist() == [0, 1, 2, 0, 1]
    x = torch.arange(4.0, dtype=torch.float64)[:, None].requires_grad_()
    rows = to_experts(x, order)
    assert rows.flatten().tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert from_experts(rows, order).flatten().tolist() == [0.0, 2.0, 2.0, 0.0]
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def whole(x: Tensor, weights: Tensor) -> Tensor:
        return from_experts(to_experts(x, order).sin() * order.rows_of(weights)[:, None], order)

    assert torch.autograd.gradcheck(whole, (x, weights))


def test_equal_shares_have_the_loss_one() -> None:
    scores, best = balancing_scores(torch.eye(4).repeat(3, 1), dataclasses.replace(RULE, top_k=1))
    assert switch_loss(scores, best.sum(0), dataclasses.replace(RULE, top_k=1), scored=12, counted=12) == pytest.approx(
        1
    )
    crowd, best = balancing_scores(torch.tensor([[9.0, 0, 0, 0]]).repeat(12, 1), dataclasses.replace(RULE, top_k=1))
    assert switch_loss(crowd, best.sum(0), dataclasses.replace(RULE, top_k=1), scored=12, counted=12) > 3.9


def test_an_attached_loss_gives_its_gradient_and_is_recorded_once() -> None:
    auxiliary = Auxiliary(scale=0.5)
    x, w = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0))
    y = auxiliary.attach(x * 1.0, w * w, 0.1, "load", 4, 7)
    assert float(y.detach()) == 2.0
    assert auxiliary.recorded == {}
    y.backward()
    assert (float(x.grad or 0), float(w.grad or 0)) == pytest.approx((1.0, 0.5 * 0.1 * 6.0))
    assert {name: {layer: float(v) for layer, v in layers.items()} for name, layers in auxiliary.recorded.items()} == {
        "load": {4: 9.0}
    }


def _layer(settings: MoESettings, auxiliary: Auxiliary | None = None) -> MoE:
    torch.manual_seed(1)
    layer = MoE(
        settings, 0, 8, Activation("silu", gated=True), SOLO, Alone(), auxiliary or Auxiliary(), bias=False, **KIND
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("shared", [None, 4])
def test_a_layer_is_the_weighted_sum_of_its_experts(shared: int | None) -> None:
    layer = _layer(MoESettings(RouterSettings(RULE), 6, shared_size=shared, shared_gate=True))
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    choice = layer.router(x)
    found, flat = layer(x).reshape(-1, 8), x.reshape(-1, 8)
    for token in range(10):
        wanted = sum(
            weight * layer.experts.local_experts[expert](flat[token : token + 1])
            for expert, weight in zip(choice.experts_TK[token].tolist(), choice.weights_TK[token], strict=True)
        )
        if layer.shared_experts is not None:
            wanted = wanted + layer.shared_experts(flat[token : token + 1])
        assert torch.allclose(found[token], wanted[0])


def test_experts_take_and_give_latent_vectors() -> None:
    layer = _layer(MoESettings(RouterSettings(RULE), 6, shared_size=4, latent_size=3))
    shapes = {name.split(".", 1)[1]: tuple(x.shape) for name, x in layer.experts.local_experts.named_parameters()}
    assert shapes == {"linear_fc1.weight": (12, 3), "linear_fc2.weight": (3, 6)}
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    choice, down, up = layer.router(x), layer.fc1_latent_proj, layer.fc2_latent_proj
    assert down is not None and up is not None and layer.shared_experts is not None
    z, y = down(x).reshape(10, 3), torch.zeros(10, 3, dtype=torch.float64)
    for token in range(10):
        for expert, weight in zip(choice.experts_TK[token].tolist(), choice.weights_TK[token], strict=True):
            y[token] += weight * layer.experts.local_experts[expert](z[token])
    torch.testing.assert_close(layer(x), up(y).view(5, 2, 8) + layer.shared_experts(x))


def test_a_token_without_room_passes_by() -> None:
    rule = dataclasses.replace(RULE, top_k=1, pre_softmax=True, capacity_factor=0.1)
    layer = _layer(MoESettings(RouterSettings(rule), 6))
    x = torch.randn(9, 1, 8, dtype=torch.float64)
    passed = (layer(x).reshape(9, 8) == 0).all(1)
    assert passed.sum() == 9 - torch.bincount(layer.router(x).experts_TK.flatten(), minlength=4).clamp(max=1).sum()


def test_losses_are_recorded_in_training_only() -> None:
    auxiliary = Auxiliary()
    settings = RouterSettings(RULE, balancing={"aux_loss": 0.1}, z_coefficient=0.1, biased=True)
    layer = _layer(MoESettings(settings, 6), auxiliary)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    layer.eval()(x).sum().backward()
    assert auxiliary.recorded == {}
    assert float(layer.router.load_E.sum()) == 0.0
    layer.train()(x).sum().backward()
    assert set(auxiliary.recorded) == {"load_balancing_loss", "z_loss"}
    assert float(layer.router.load_E.sum()) == 20.0
    layer.router.begin_step()
    assert float(layer.router.load_E.sum()) == 0.0


def test_jitter_changes_the_choice_in_training_only() -> None:
    router = Router(RouterSettings(RULE, jitter=0.5), 0, 8, SOLO, Alone(), Auxiliary(), **KIND)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(4, 1, 8, dtype=torch.float64)
    assert not torch.equal(router(x).weights_TK, router(x).weights_TK)
    router.eval()
    assert torch.equal(router(x).weights_TK, router(x).weights_TK)


def test_a_bias_of_the_router_moves_the_choice_and_learns() -> None:
    router = Router(RouterSettings(RULE, bias=True), 0, 8, SOLO, Alone(), Auxiliary(), **KIND)
    bias = router.bias
    assert isinstance(bias, torch.nn.Parameter)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(4, 1, 8, dtype=torch.float64)
    for wanted in (0, RULE.experts - 1):
        with torch.no_grad():
            bias.zero_()[wanted] = 100.0
        assert (router(x).experts_TK == wanted).any(-1).all()
    bias.data.zero_()
    router(x).weights_TK[:, 0].sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0.0


@pytest.mark.parametrize("one_kernel", [False, True])
def test_products_of_experts_are_those_of_each(monkeypatch: pytest.MonkeyPatch, one_kernel: bool) -> None:
    """The kernel is for bf16 on a GPU; what it is given is the same elsewhere."""
    dtype = torch.bfloat16 if one_kernel else torch.float64
    monkeypatch.setattr(grouped_module, "_one_kernel", lambda *_: one_kernel)
    layers = [Linear(16, 24, Split(0), bias=False, dtype=dtype, device=torch.device("cpu")) for _ in range(4)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
    counts = [3, 0, 5, 0]  # of two experts nothing is asked
    x = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    y = grouped_module.grouped(x, counts, layers)
    y.sum().backward()
    found = [y.detach(), x.grad, *(layer.weight.grad for layer in layers)]
    x.grad = None
    for layer in layers:
        layer.weight.grad = None
    parts = [layer(part) for layer, part in zip(layers, x.split(counts), strict=True)]
    torch.cat(parts).sum().backward()
    wanted = [torch.cat(parts).detach(), x.grad, *(layer.weight.grad for layer in layers)]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, rtol=2e-2 if one_kernel else 1e-12)


def test_the_bias_of_an_expert_is_weighed_with_its_result() -> None:
    torch.manual_seed(2)
    layer = MoE(
        MoESettings(RouterSettings(RULE), 6),
        0,
        8,
        Activation("gelu_erf"),
        SOLO,
        Alone(),
        Auxiliary(),
        bias=True,
        **KIND,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(5, 1, 8, dtype=torch.float64)
    choice, found = layer.router(x), layer(x).reshape(5, 8)
    for token in range(5):
        wanted = sum(
            weight * layer.experts.local_experts[expert](x[token])
            for expert, weight in zip(choice.experts_TK[token].tolist(), choice.weights_TK[token], strict=True)
        )
        assert torch.allclose(found[token], wanted[0])


def _own(thing: Any) -> Registered:
    return Registered(Entry("router", "mine", thing))


def test_a_registered_router_chooses_weighs_and_is_counted() -> None:
    def always_the_last(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        experts = torch.arange(4 - top_k, 4).expand(len(logits), top_k)
        return experts, logits.gather(1, experts).sigmoid()

    rule, auxiliary = dataclasses.replace(RULE, own=_own(always_the_last)), Auxiliary(scale=1.0)
    layer = _layer(MoESettings(RouterSettings(rule, balancing={"aux_loss": 0.1}), 8), auxiliary)
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = layer.router.logits(x.view(-1, 8))
    choice = choose(logits, rule, training=False)
    assert choice.experts_TK.tolist() == [[2, 3]] * 6
    torch.testing.assert_close(choice.weights_TK, logits[:, 2:].sigmoid())
    layer(x).sum().backward()
    assert layer.router.load_E.tolist() == [0, 0, 6, 6]
    assert layer.router.weight.grad is not None and bool(layer.router.weight.grad.any())
    (recorded,) = auxiliary.recorded["load_balancing_loss"].values()
    wanted = switch_loss(logits.softmax(-1), layer.router.load_E, rule, scored=6, counted=6)
    torch.testing.assert_close(torch.as_tensor(recorded).double(), wanted.detach(), check_dtype=False)


@pytest.mark.parametrize(
    "thing",
    [
        lambda logits, top_k: logits.topk(top_k).indices,
        lambda logits, top_k: (logits.topk(top_k).indices.int(), logits.topk(top_k).values),
        lambda logits, top_k: (logits.topk(3).indices, logits.topk(3).values),
    ],
)
def test_a_registered_router_that_returns_something_else_is_named(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"--moe-router mine.*\[6, 4\].*\[6, 2\]"):
        choose(_logits(), dataclasses.replace(RULE, own=_own(thing)))


def test_a_registered_router_that_chooses_an_expert_too_many_is_named() -> None:
    def one_behind(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        return torch.arange(1, 1 + top_k).expand(len(logits), top_k) + 2, logits[:, :top_k]

    with pytest.raises(ConfigError, match=r"--moe-router mine.*3 to 4.*--num-experts 4"):
        choose(_logits(), dataclasses.replace(RULE, own=_own(one_behind)))
