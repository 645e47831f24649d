"""The model and the length of the run that a measured machine gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.devices import CPU, CPU_WITH_BF16, H100, P40, RTX_4090, T4, V100

from megalith.cli.quickstart.model import (
    MAX_EPOCHS,
    MIN_ITERATIONS,
    MODEL_SIZES,
    TRAINING_SHARE,
    Machine,
    ModelSize,
    Plan,
    choose_plan,
    measure_machine,
)
from megalith.config import ModelConfig
from megalith.device import DESCRIBED, Capability
from megalith.models.gpt import GPT

TEXT = 2.5e6


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, float]]:
    """Measurements of a matrix product, which are recorded as (dtype, seconds) instead of made."""
    recorded: list[tuple[torch.dtype, float]] = []

    def measure(device: torch.device, dtype: torch.dtype, budget_seconds: float) -> float:
        recorded.append((dtype, budget_seconds))
        return 1e12

    monkeypatch.setattr("megalith.train.throughput.measure_peak", measure)
    return recorded


@pytest.mark.parametrize(("host", "expected"), [(CPU_WITH_BF16, "bf16"), (CPU, "fp32")])
def test_a_cpu_trains_in_bf16_if_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
    measured: list[tuple[torch.dtype, float]],
    host: Capability,
    expected: str,
) -> None:
    monkeypatch.setattr("megalith.device.HOST", host)
    assert measure_machine("cpu", 180.0).precision == expected
    assert [dtype for dtype, _ in measured] == [host.fastest]


@pytest.mark.parametrize(
    ("able", "expected"),
    [(H100, "bf16"), (RTX_4090, "bf16"), (T4, "fp16"), (V100, "fp16"), (P40, "fp32")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_gpu_trains_in_the_half_precision_that_it_computes_natively(
    monkeypatch: pytest.MonkeyPatch,
    measured: list[tuple[torch.dtype, float]],
    able: Capability,
    expected: str,
) -> None:
    monkeypatch.setattr("megalith.assemble.model.choose_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    machine = measure_machine("cuda", 180.0)
    assert (machine.name, machine.precision, machine.flops) == (able.name, expected, 1e12)


@pytest.mark.parametrize("size", MODEL_SIZES, ids=lambda size: f"{size.num_layers}x{size.hidden_size}")
def test_sizes_are_buildable_and_counted_exactly(size: ModelSize) -> None:
    config = ModelConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_attention_heads=size.num_attention_heads,
        ffn_hidden_size=size.ffn_hidden_size,
        max_position_embeddings=size.seq_length,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    model = GPT(config, size.vocab_size, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == size.num_parameters


def test_sizes_grow() -> None:
    counts = [size.num_parameters for size in MODEL_SIZES]
    assert counts == sorted(set(counts))


def planned(flops: float, seconds: float, num_tokens: float = TEXT, efficiency: float = 0.3) -> Plan:
    """The plan for a machine whose training steps reach a share of the matrix product's rate."""

    def step_time(size: ModelSize) -> float:
        return 6 * size.num_parameters * size.tokens_per_step / (efficiency * flops)

    plan = choose_plan(Machine("x", "fp32", flops), seconds, num_tokens, step_time)
    assert plan.step_seconds == step_time(plan.size)
    return plan


def chosen(flops: float, seconds: float, num_tokens: float = TEXT, efficiency: float = 0.3) -> ModelSize:
    return planned(flops, seconds, num_tokens, efficiency).size


def test_a_faster_machine_and_more_time_never_get_a_smaller_model() -> None:
    by_speed = [chosen(10.0**exponent, 180).num_parameters for exponent in range(9, 16)]
    assert by_speed == sorted(by_speed)
    assert len(set(by_speed)) > 3
    by_time = [chosen(400e9, seconds).num_parameters for seconds in (1, 6, 60, 180, 600, 3600, 36000)]
    assert by_time == sorted(by_time)
    assert len(set(by_time)) > 3


def test_slow_steps_get_a_smaller_model_than_the_matrix_product_promises() -> None:
    assert chosen(4e12, 180, efficiency=0.02).num_parameters < chosen(4e12, 180).num_parameters


def test_the_slowest_machine_gets_the_smallest_model() -> None:
    assert chosen(1e8, 10) == MODEL_SIZES[0]


def test_the_sizes_to_choose_from_may_be_others() -> None:
    sizes = [replace(size, vocab_size=1024) for size in MODEL_SIZES]
    for flops in (1e8, 1e11, 1e13):
        assert choose_plan(Machine("x", "fp32", flops), 180, TEXT, lambda size: 0.1, sizes).size in sizes


def test_few_models_are_measured() -> None:
    asked: list[ModelSize] = []

    def step_time(size: ModelSize) -> float:
        asked.append(size)
        return 6 * size.num_parameters * size.tokens_per_step / (0.3 * 900e9)

    choose_plan(Machine("x", "bf16", 900e9), 180, TEXT, step_time)
    assert len(asked) <= 3


def test_little_text_does_not_get_a_large_model() -> None:
    assert chosen(700e12, 180, 5e4).num_parameters < chosen(700e12, 180, 1e8).num_parameters


def test_iterations_fill_the_time() -> None:
    plan = planned(1e10, 180.0, 1e9)
    assert plan.iterations == pytest.approx(TRAINING_SHARE * 180.0 / plan.step_seconds, abs=1)


def test_iterations_stop_before_the_text_is_known_by_heart() -> None:
    plan = planned(1e15, 3600.0, 1e6)
    assert plan.iterations * plan.size.tokens_per_step == pytest.approx(MAX_EPOCHS * 1e6, rel=0.01)


def test_a_run_is_long_enough_to_be_killed_and_resumed() -> None:
    plan = planned(1e8, 0.1, 1e3)
    assert (plan.size, plan.iterations) == (MODEL_SIZES[0], MIN_ITERATIONS)


@pytest.mark.parametrize("iterations", [MIN_ITERATIONS, 25, 27, 100, 333, 5000])
def test_the_kill_falls_between_two_checkpoints(iterations: int) -> None:
    plan = Plan(Machine("x", "fp32", 1e9), MODEL_SIZES[0], iterations)
    killed, interval = plan.kill_step - 1, iterations // 4
    assert interval < killed < iterations
    assert killed % interval != 0
    assert killed == pytest.approx(iterations / 2, abs=max(6, iterations * 0.06))


@pytest.mark.parametrize(("seconds", "least"), [(180.0, 2.0), (3.0, 0.05)])
def test_the_peak_is_measured_for_a_share_of_the_time(
    measured: list[tuple[torch.dtype, float]], seconds: float, least: float
) -> None:
    machine = measure_machine("cpu", seconds)
    assert machine.flops == 1e12 and machine.name
    assert [least <= budget <= 2.0 for _, budget in measured] == [True]
