"""The optimizer against torch's AdamW, its groups, clipping, master weights, overflow and state."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed.context import ParallelContext
from megalith.errors import ConfigError
from megalith.models.t5 import T5
from megalith.optim import Optimizer, build_optimizer
from megalith.optim.elementwise import AdamW
from megalith.optim.groups import make_groups
from megalith.optim.matrix_rules import COEFFICIENTS, AdaptiveMuon, Soap, newton_schulz
from megalith.optim.rules import UpdateBatch

FP16 = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1)).to(dtype)


def _backward(model: nn.Module, scale: float = 1.0) -> None:
    parameter = next(model.parameters())
    x = torch.linspace(-1, 2, 24, dtype=parameter.dtype).view(4, 6)
    (model(x).square().sum() * scale).backward()


def _step(model: nn.Module, optimizer: Optimizer, lr: float = 0.01, weight_decay: float = 0.1) -> float | None:
    optimizer.zero_grad()
    _backward(model, optimizer.loss_scale)
    return optimizer.step(lr, weight_decay).grad_norm


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_equal_torch(clip: float) -> None:
    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, OptimizerConfig(clip_grad=clip), PrecisionConfig())
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 0.01)
    for _ in range(4):
        norm = _step(ours, optimizer)
        adam.zero_grad()
        _backward(theirs)
        wanted = math.sqrt(sum(float(p.grad.square().sum()) for p in theirs.parameters() if p.grad is not None))
        assert norm == pytest.approx(wanted, rel=1e-9)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        adam.step()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-9)


def _trained(config: OptimizerConfig, steps: int = 4, **rates: float) -> nn.Sequential:
    model = _model()
    optimizer = build_optimizer(model, config, PrecisionConfig())
    for _ in range(steps):
        optimizer.zero_grad()
        _backward(model)
        optimizer.step(0.01, 0.1, **rates)
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum: float) -> None:
    ours = _trained(OptimizerConfig(optimizer="sgd", sgd_momentum=momentum, clip_grad=0.0))
    theirs = _model()
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, 0.01, momentum=momentum)
    for _ in range(4):
        sgd.zero_grad()
        _backward(theirs)
        sgd.step()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)


def test_lion_is_its_formula() -> None:
    ours = _trained(OptimizerConfig(optimizer="lion", clip_grad=0.0), steps=3)
    model = _model()
    moments = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        _backward(model)
        with torch.no_grad():
            for p, m in zip(model.parameters(), moments, strict=True):
                assert p.grad is not None
                update = (0.95 * m + 0.05 * p.grad).sign()
                p.mul_(1 - 0.01 * 0.1 * (p.dim() > 1)).sub_(0.01 * update)
                m.mul_(0.98).add_(0.02 * p.grad)
    for mine, reference in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_newton_schulz_makes_singular_values_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = newton_schulz(matrix, COEFFICIENTS["polar_express"], 8)
    torch.testing.assert_close(found, left @ right, rtol=0.0, atol=1e-2)
    for name in ("simple", "quintic"):
        values = torch.linalg.svdvals(newton_schulz(matrix, COEFFICIENTS[name], 5))
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3


def test_muon_is_its_formula() -> None:
    """Momentum, orthogonalised, times the scale of the shape; everything that is no matrix by Adam."""
    config = OptimizerConfig(optimizer="muon", clip_grad=0.0, muon_nesterov=True)
    ours, adam = _trained(config, steps=1), _trained(OptimizerConfig(clip_grad=0.0), steps=1)
    before = _model()
    _backward(before)
    for name, parameter in before.named_parameters():
        after = ours.get_parameter(name)
        if parameter.dim() == 1:
            torch.testing.assert_close(after, adam.get_parameter(name))
            continue
        assert parameter.grad is not None
        direction = 0.1 * parameter.grad + 0.9 * (0.1 * parameter.grad)  # of a momentum that was zero
        update = newton_schulz(direction, COEFFICIENTS["quintic"], 5) * max(parameter.shape) ** 0.5
        torch.testing.assert_close(after, parameter * (1 - 0.01 * 0.1) - 0.01 * update)


def test_adaptive_muon_is_its_formula() -> None:
    """Two steps of AdaMuon: the orthogonalised momentum over the root of the running mean of its square."""
    rule = AdaptiveMuon(
        momentum=0.9,
        nesterov=False,
        scale_mode="spectral",
        extra_scale=0.5,
        coefficients=COEFFICIENTS["quintic"],
        steps=5,
        split_qkv=True,
        blockwise=False,
        matmul_precision="medium",
        axis=ParallelContext.solo().tp,
        placements={},
    )
    grads = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found, wanted = torch.ones(6, 9, dtype=torch.float64), torch.ones(6, 9, dtype=torch.float64)
    states = {kind: [torch.zeros_like(found)] for kind in rule.state_names}
    momentum, second = torch.zeros_like(found), torch.zeros_like(found)
    for step, grad in enumerate(grads):
        rule.update(UpdateBatch(["w"], [found], [grad], states, lr=0.01, weight_decay=0.1, steps_done=step))
        momentum = 0.9 * momentum + 0.1 * grad
        raw = newton_schulz(momentum, COEFFICIENTS["quintic"], 5)
        second = 0.95 * second + 0.05 * raw.square()
        wanted = wanted * (1 - 0.01 * 0.1) - 0.01 * 0.5 * 9**0.5 * raw / (second.sqrt() + 1e-8)
    torch.testing.assert_close(found, wanted)


def test_kinds_of_muon() -> None:
    """By the name of the optimizer: dist_muon gives what muon does, adaptive_muon does not."""
    weights = [_trained(OptimizerConfig(optimizer=name))[0].weight for name in ("muon", "dist_muon", "adaptive_muon")]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_each_setting_of_muon_has_an_effect() -> None:
    def weight(**changes: Any) -> Tensor:
        weight: Tensor = _trained(OptimizerConfig(optimizer="muon", **changes))[0].weight
        return weight

    plain = weight()
    assert torch.equal(plain, weight()), "two runs are alike"
    for changes in (
        {"muon_momentum": 0.5},
        {"muon_nesterov": True},
        {"muon_scale_mode": "unit_rms_norm"},
        {"muon_scale_mode": "shape_scaling"},
        {"muon_extra_scale_factor": 0.2},
        {"muon_coefficient_type": "simple"},
        {"muon_num_ns_steps": 10},
        {"muon_scalar_optimizer": "lion"},
    ):
        assert not torch.equal(plain, weight(**changes)), changes


def _soap(**changes: Any) -> Soap:
    settings: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "shampoo_beta": 0.95, "frequency": 1}
    return Soap(**{**settings, **changes})


def _soaped(rule: Soap, grads: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The states after so many steps of a weight, which is changed in place."""
    squares = rule.replicated_states("w", tuple(weight.shape))
    shapes = {kind: squares.get(kind, tuple(weight.shape)) for kind in rule.state_names}
    states = {kind: [weight.new_zeros(shape)] for kind, shape in shapes.items()}
    for step, grad in enumerate(grads):
        rule.update(UpdateBatch(["w"], [weight], [grad], states, lr=0.01, weight_decay=0.1, steps_done=step))
    return {kind: tensors[0] for kind, tensors in states.items()}


def test_soap_is_adam_in_the_eigenbasis_of_its_preconditioners() -> None:
    """Three steps of the paper's algorithm 3, written out, with the moment turned from basis to basis instead of kept
    in the coordinates of the weights; gradients are square and of full rank, so that the bases are of one kind."""
    grads = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found, wanted = torch.ones(6, 6, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    states = _soaped(_soap(tie_breaker=0.0), grads, found)
    left = right = torch.zeros(6, 6, dtype=torch.float64)
    q_left = q_right = torch.eye(6, dtype=torch.float64)
    turned, second = torch.zeros_like(found), torch.zeros_like(found)
    for step, grad in enumerate(grads, 1):
        share = 0.05 / (1 - 0.95**step)
        left, right = (1 - share) * left + share * grad @ grad.T, (1 - share) * right + share * grad.T @ grad
        kept = q_left @ turned @ q_right.T
        if step == 1:
            q_left, q_right = (torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in (left, right))
        else:
            rows, columns = (
                (q.T @ f @ q).diagonal().argsort(descending=True) for q, f in ((q_left, left), (q_right, right))
            )
            second = second[rows][:, columns]
            q_left, q_right = torch.linalg.qr(left @ q_left[:, rows]).Q, torch.linalg.qr(right @ q_right[:, columns]).Q
        in_basis = q_left.T @ grad @ q_right
        turned = 0.9 * (q_left.T @ kept @ q_right) + 0.1 * in_basis
        second = 0.99 * second + 0.01 * in_basis.square()
        update = (turned / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        wanted = wanted * (1 - 0.01 * 0.1) - 0.01 * q_left @ update @ q_right.T
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(states["L"], left)
    torch.testing.assert_close(states["R"], right)


def test_soap_does_not_depend_on_the_coordinates() -> None:
    """Turned gradients turn the updates: what AdamW does not do, and what the eigenbasis is for."""
    generator = torch.Generator().manual_seed(4)
    grads = torch.randn(4, 5, 5, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    plain, turned = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)
    _soaped(_soap(tie_breaker=0.0), grads, plain)
    _soaped(_soap(tie_breaker=0.0), turn @ grads, turned)
    torch.testing.assert_close(turned, turn @ plain)


def test_rounding_does_not_choose_directions_without_a_gradient() -> None:
    """Gradients of rank 2 in a matrix of 8 rows: those that differ by rounding give updates that do so."""
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 8, 2), (2, 6)))
    grads = 1e-3 * left @ right
    noisy = grads * (1 + 1e-15 * torch.randn(grads.shape, generator=generator, dtype=torch.float64))

    def apart(rule: Soap) -> float:
        weights = torch.zeros(2, 8, 6, dtype=torch.float64)
        for weight, gradients in zip(weights, (grads, noisy), strict=True):
            _soaped(rule, gradients, weight)
        return float((weights[0] - weights[1]).abs().max())

    assert apart(_soap()) < 1e-10
    assert apart(_soap(tie_breaker=0.0)) > 1e-4


def test_each_setting_of_soap_has_an_effect() -> None:
    grads = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def weight(**changes: Any) -> Tensor:
        result = torch.zeros(6, 9, dtype=torch.float64)
        _soaped(_soap(**changes), grads, result)
        return result

    plain = weight()
    for changes in ({"shampoo_beta": 0.5}, {"frequency": 2}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 0.1}):
        assert not torch.equal(plain, weight(**changes)), changes
    config = OptimizerConfig(optimizer="soap", clip_grad=0.0)
    ours, adam = _trained(config, steps=1), _trained(OptimizerConfig(clip_grad=0.0), steps=1)
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter, adam.get_parameter(name)) == (parameter.dim() == 1), name


class _Named(nn.Module):
    """Parameters under names that have groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Linear(3, 4, bias=False)})
        self.q_layernorm = nn.LayerNorm(3)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def moved(self, config: OptimizerConfig, **rates: float) -> dict[str, float]:
        """By how much a step without a gradient moves each parameter."""
        optimizer = build_optimizer(self, config, PrecisionConfig())
        optimizer.zero_grad()
        optimizer.step(0.1, 1.0, **rates)
        return {name: round(0.5 - float(p.detach().flatten()[0]), 6) for name, p in self.named_parameters()}


def test_weight_decay_of_query_and_key_norms() -> None:
    names = ("embedding.word_embeddings.weight", "q_layernorm.weight", "q_layernorm.bias")
    for config, wanted in (
        (OptimizerConfig(), (0.05, 0.0, 0.0)),
        (OptimizerConfig(apply_wd_to_qk_layernorm=True), (0.05, 0.05, 0.05)),
        (OptimizerConfig(no_weight_decay_cond_type="apply_wd_to_qk_layernorm"), (0.05, 0.05, 0.05)),
    ):
        assert _Named().moved(config) == dict(zip(names, wanted, strict=True))


def test_the_tables_have_their_own_rate() -> None:
    moved = _Named().moved(OptimizerConfig(decoupled_lr=0.2, apply_wd_to_qk_layernorm=True), decoupled_lr=0.2)
    assert moved["embedding.word_embeddings.weight"] == 0.1
    assert moved["q_layernorm.weight"] == 0.05


def test_the_output_layer_of_t5_is_a_table() -> None:
    model = T5(
        ModelConfig(
            model_family="t5",
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            max_position_embeddings=8,
            untie_embeddings_and_output_weights=True,
        ),
        16,
    )
    name, parameters = "lm_head.output_layer.weight", dict(model.named_parameters())
    for config, rule, apart in (
        (OptimizerConfig(optimizer="soap"), AdamW, False),
        (OptimizerConfig(optimizer="muon"), AdamW, False),
        (OptimizerConfig(decoupled_lr=0.1), AdamW, True),
    ):
        groups = make_groups(parameters, config, ParallelContext.solo().tp, {})
        (own,) = (group for group in groups if name in group.names)
        assert isinstance(own.rule, rule) and own.decoupled == apart


ROUNDED = OptimizerConfig(
    use_precision_aware_optimizer=True,
    main_grads_dtype="bf16",
    main_params_dtype="fp16",
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
)


def test_states_in_half_precision_follow_those_in_fp32() -> None:
    models = [_model(torch.bfloat16), _model(torch.bfloat16)]
    optimizers = [
        build_optimizer(model, config, PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))
        for model, config in zip(models, (OptimizerConfig(), ROUNDED), strict=True)
    ]
    kinds = {name.partition(".")[0]: tensor.dtype for name, tensor in optimizers[1].state_tensors().items()}
    assert kinds == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "fp32_param": torch.float16}
    assert optimizers[1].gradients.dtype == torch.bfloat16
    mains = [optimizer.state_tensors()["fp32_param.0.weight"] for optimizer in optimizers]
    start = mains[0].clone()
    for _ in range(5):
        norms = [_step(model, optimizer, lr=1e-3) for model, optimizer in zip(models, optimizers, strict=True)]
        assert norms[0] == pytest.approx(norms[1], rel=0.1)
    moved = [main.float() - start for main in mains]
    assert 0.0 < float((moved[0] - moved[1]).norm()) < 0.2 * float(moved[0].norm())


def test_the_norm_of_rounded_gradients_is_taken_in_fp32() -> None:
    model = nn.Linear(4096, 1, bias=False)
    optimizer = build_optimizer(model, dataclasses.replace(ROUNDED, main_params_dtype="fp32"), PrecisionConfig())
    optimizer.zero_grad()
    model(torch.full((1, 4096), 1.0 + 2**-7)).sum().backward()
    assert optimizer.step(0.0, 0.0).grad_norm == pytest.approx(64.0 * (1.0 + 2**-7), rel=1e-6)


def test_a_norm_above_the_limit_is_not_applied() -> None:
    model = _model()
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    optimizer.zero_grad()
    _backward(model)
    before = model[0].weight.detach().clone()
    outcome = optimizer.step(0.01, 0.1, reject_norm_above=1e-3)
    assert not outcome.applied and outcome.grad_norm is not None and outcome.grad_norm > 1e-3
    assert torch.equal(before, model[0].weight)


def test_an_unused_parameter_has_a_zero_gradient_in_the_next_step_too() -> None:
    model = _model()
    optimizer = build_optimizer(model, OptimizerConfig(clip_grad=0.0), PrecisionConfig())
    _step(model, optimizer)
    optimizer.zero_grad()
    first = model[0].weight.detach().clone()
    assert optimizer.step(0.0, 0.0).grad_norm == 0.0
    assert torch.equal(first, model[0].weight)


def test_half_precision_keeps_main_parameters() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    main = optimizer.state_tensors()["fp32_param.0.weight"]
    for _ in range(20):
        _step(model, optimizer, lr=1e-5)
    assert main.dtype == torch.float32
    assert torch.equal(model[0].weight, main.bfloat16())
    assert not torch.equal(main, main.bfloat16().float()), "updates below the rounding of bf16 are kept"


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = _model(torch.float16)
    optimizer = build_optimizer(model, OptimizerConfig(), FP16)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    _backward(model, 1e38)
    outcome = optimizer.step(0.01, 0.1)
    assert (outcome.applied, outcome.grad_norm, optimizer.loss_scale, optimizer.step_count) == (False, None, 4.0, 0)
    assert torch.equal(before, model[0].weight)
    assert _step(model, optimizer) is not None
    assert optimizer.step_count == 1


def test_the_scale_does_not_change_the_norm() -> None:
    norms = []
    for scale in (1.0, 64.0):
        model = _model(torch.float16)
        precision = PrecisionConfig(fp16=True, loss_scale=scale, accumulate_allreduce_grads_in_fp32=True)
        norms.append(_step(model, build_optimizer(model, OptimizerConfig(), precision)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize(("dtype", "flags"), [(torch.bfloat16, {"bf16": True}), (torch.float32, {})])
def test_a_fixed_scale_without_fp16_changes_no_norm(dtype: torch.dtype, flags: dict[str, bool]) -> None:
    norms = []
    for scale in (None, 128.0):
        model = _model(dtype)
        precision = PrecisionConfig(loss_scale=scale, **flags)
        norms.append(_step(model, build_optimizer(model, OptimizerConfig(), precision)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = _model(torch.float32)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    _backward(model, math.nan)
    outcome = optimizer.step(0.01, 0.1)
    assert not outcome.applied
    assert outcome.grad_norm is not None and math.isnan(outcome.grad_norm)
    assert torch.equal(before, model[0].weight)


def test_zeros_are_counted_before_clipping() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(), count_zeros=True)
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 0.0, 0.0]])).sum().backward()
    assert optimizer.step(0.1, 0.0).num_zeros == 2.0


@pytest.mark.parametrize(
    ("precision", "config"),
    [
        (PrecisionConfig(), OptimizerConfig()),
        (PrecisionConfig(bf16=True), OptimizerConfig()),
        (FP16, OptimizerConfig()),
        (PrecisionConfig(bf16=True), ROUNDED),
        (PrecisionConfig(), OptimizerConfig(optimizer="sgd")),
        (PrecisionConfig(), OptimizerConfig(optimizer="lion")),
        (PrecisionConfig(bf16=True), OptimizerConfig(optimizer="muon", muon_nesterov=True)),
    ],
)
def test_a_restored_optimizer_continues_bit_for_bit(precision: PrecisionConfig, config: OptimizerConfig) -> None:
    dtype = getattr(torch, precision.params_dtype)

    def fresh() -> tuple[nn.Sequential, Optimizer]:
        model = _model(dtype)
        return model, build_optimizer(model, config, precision)

    straight, optimizer = fresh()
    for _ in range(3):
        _step(straight, optimizer)
    saved: dict[str, Tensor] = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    weights = {name: value.clone() for name, value in straight.state_dict().items()}
    scalars = optimizer.scalars()

    resumed, other = fresh()
    resumed.load_state_dict(weights)
    for name, value in other.state_tensors().items():
        value.detach().copy_(saved[name])
    other.load_scalars(scalars)
    for _ in range(3):
        assert _step(straight, optimizer) == _step(resumed, other)
    assert other.scalars()["step"] == 6
    for name, value in other.state_tensors().items():
        assert torch.equal(value, optimizer.state_tensors()[name]), name


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_weights_loaded_behind_the_optimizer_are_not_undone(part: str) -> None:
    model, other = _model(torch.bfloat16), _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(2.0)
    before = copy.deepcopy(model.state_dict())
    if part == "whole":
        model.load_state_dict(other.state_dict())
    else:
        model[0].load_state_dict(other[0].state_dict())
    _step(model, optimizer, lr=0.0)
    for name, parameter in model.named_parameters():
        loaded = part == "whole" or name.startswith("0.")
        assert torch.equal(parameter, torch.full_like(parameter, 2.0) if loaded else before[name]), name


def test_parameters_cannot_be_replaced_behind_the_optimizer() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    with pytest.raises(ConfigError, match="assign"):
        model.load_state_dict(_model(torch.bfloat16).state_dict(), assign=True)
    assert optimizer.step_count == 0


def test_a_copy_of_a_model_has_no_optimizer() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    main = optimizer.state_tensors()["fp32_param.0.weight"]
    with torch.no_grad():
        main += 1e-4  # below the precision of the weights
    wanted = main.clone()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(_model(torch.bfloat16).state_dict())
    assert torch.equal(main, wanted)


def test_main_parameters_are_taken_from_loaded_weights() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer.reload_master_weights()
    assert optimizer.state_tensors()["fp32_param.0.weight"].unique().tolist() == [2.0]
