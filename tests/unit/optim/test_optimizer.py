"""The optimizer against torch's AdamW, its groups, clipping, main parameters, overflow and state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.optim import Optimizer, build_optimizer

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


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True), FP16])
def test_a_restored_optimizer_continues_bit_for_bit(precision: PrecisionConfig) -> None:
    dtype = getattr(torch, precision.params_dtype)

    def fresh() -> tuple[nn.Sequential, Optimizer]:
        model = _model(dtype)
        return model, build_optimizer(model, OptimizerConfig(), precision)

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


def test_main_parameters_are_taken_from_loaded_weights() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer.reload_main_params()
    assert optimizer.state_tensors()["fp32_param.0.weight"].unique().tolist() == [2.0]
