"""The predicted time of a step: laws that hold for any rates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megalith.config import RunConfig, load
from megalith.plan.devices import DEVICES, Link
from megalith.plan.plan import plan_run
from megalith.plan.rates import _launches, measure_here, table_of, with_measured
from megalith.plan.time import StepTime, bubble, course, step_time, transfers
from megalith.schedules.pipeline import make_schedule
from megalith.schedules.simulator import Costs, simulate

VOCABULARY = 50304
WORDS = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --bf16 "
    "--micro-batch-size 2 --global-batch-size 64 "
)


def _run(flags: str = "", world_size: int = 1) -> RunConfig:
    return load((WORDS + flags).split(), {"RANK": "0", "WORLD_SIZE": str(world_size)}, files=False)


def _fp32() -> RunConfig:
    return load(WORDS.replace("--bf16", "").split(), {"RANK": "0", "WORLD_SIZE": "1"}, files=False)


def _time(flags: str = "", world_size: int = 1, device: str = "H100", nodes: int = 1) -> StepTime:
    return step_time(_run(flags, world_size), VOCABULARY, DEVICES[device], nodes=nodes)


def test_parts_add_up_to_the_step() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    time = _time(flags, 16, nodes=2)
    assert time.step_seconds == pytest.approx(sum(time.parts.values()))
    assert all(time.parts[name] > 0 for name in ("products", "memory", "tp", "cp", "dp", "pp", "bubble", "optimizer"))
    assert time.tokens_per_second == pytest.approx(64 * 2048 / time.step_seconds)


def test_one_rank_computes_and_nothing_else() -> None:
    time = _time()
    assert {name for name, value in time.parts.items() if value} <= {"products", "memory", "launches", "optimizer"}


AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("more", ["--num-layers 26", "--seq-length 2050", "--hidden-size 2064", AGAIN, "--swiglu"])
def test_more_to_compute_is_never_faster(more: str) -> None:
    assert (
        _time(more + " --max-position-embeddings 4096 --ffn-hidden-size 8192").step_seconds
        > _time("--ffn-hidden-size 8192").step_seconds
    )


def test_replicas_without_communication_scale_perfectly() -> None:
    device = DEVICES["H100"]
    free = replace(device, rates=replace(device.rates, inside=Link(0, 1e30), between=Link(0, 1e30)))
    one, eight = (step_time(_run("", size), VOCABULARY, free) for size in (1, 8))
    passes = one.step_seconds - one.parts["optimizer"]
    assert eight.step_seconds - eight.parts["optimizer"] == pytest.approx(passes / 8)


@pytest.mark.parametrize(("name", "stages", "chunks", "number"), [
    ("1f1b", 2, 1, 4), ("1f1b", 4, 1, 4), ("1f1b", 4, 1, 9), ("interleaved", 4, 2, 8), ("interleaved", 2, 3, 6),
    ("zb-h1", 4, 1, 8), ("zb-h1", 2, 1, 6),
])  # fmt: skip
def test_the_bubble_is_that_of_the_simulator(name: str, stages: int, chunks: int, number: int) -> None:
    """Of stages that are alike: the formula of thousands of layouts against the schedule itself."""
    flags = f"--pipeline-model-parallel-size {stages} --global-batch-size {2 * number} --micro-batch-size 2 "
    flags += f"--num-virtual-stages-per-pipeline-rank {chunks} " if chunks > 1 else f"--pipeline-schedule {name}"
    run = _run(flags, stages)
    forward, gradient, weight = 1.0, 1.5, 0.5
    found = bubble(run.pipeline_schedule, [(forward, gradient + weight, weight)] * stages, chunks)
    costs = Costs(*(Fraction(one) for one in (forward, gradient, weight)))
    schedule = make_schedule(run.pipeline_schedule, stages, chunks, number)
    alone, sent = (simulate(schedule, replace(costs, message=Fraction(one, 100))).makespan for one in (0, 1))
    assert float(alone) == pytest.approx(number * (forward + gradient + weight) + found)
    if number % stages == 0:
        assert 100 * (sent - alone) == transfers(run.pipeline_schedule, stages, chunks, number)


@pytest.mark.parametrize("flags", ["", "--swiglu --normalization RMSNorm --position-embedding-type rope", "--fp16"])
def test_formulas_agree_with_the_launches_that_were_seen(flags: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = (WORDS.replace("--bf16", "") + (flags if "fp16" in flags else f"{flags} --bf16")).split()
    plan = plan_run([*words, "--hidden-dropout", "0", "--attention-dropout", "0"], DEVICES["H100"], world_size=1)
    formula = step_time(plan.run, VOCABULARY, DEVICES["H100"])
    assert plan.time.parts["products"] == pytest.approx(formula.parts["products"], rel=0.02)
    assert plan.time.step_seconds == pytest.approx(formula.step_seconds, rel=0.15)


def test_launches_and_what_is_beside_them_are_told_apart() -> None:
    numbers = [600.0, 1500.0, 800.0, 2300.0, 1300.0, 3900.0]  # of three structures with 2 and 8 layers
    layers = [2, 8] * 3
    times = [8e-6 * number + 4 * (6e-4 * count + 2e-4) for number, count in zip(numbers, layers, strict=True)]
    assert _launches(numbers, times, False) == pytest.approx((8e-6, 2e-4, 6e-4))
    launch, host, layer = _launches(numbers, times, True)
    assert layer == 0 and launch > 8e-6 and host >= 0


def test_a_layer_takes_its_time_again_where_it_is_recomputed() -> None:
    cpu = DEVICES["CPU"]
    slow = replace(cpu, rates=replace(cpu.rates, layer=1.0))
    number = _run().num_micro_batches
    for flags, passes in (("", 24), (AGAIN, 48), (AGAIN.replace("uniform", "block"), 25)):
        took = [step_time(_run(flags), VOCABULARY, device).step_seconds for device in (cpu, slow)]
        assert took[1] - took[0] == pytest.approx(number * passes)


def test_measured_steps_correct_the_times_of_their_dtype() -> None:
    cpu = DEVICES["CPU"]
    half = replace(cpu, rates=replace(cpu.rates, steps={"bf16": 0.5}))
    for device, run, factor in ((half, _run(), 2), (half, _fp32(), 1)):
        corrected, plain = (step_time(run, VOCABULARY, one).step_seconds for one in (device, cpu))
        assert corrected == pytest.approx(factor * plain)


def test_a_pass_has_the_rate_of_its_kind_and_dtype() -> None:
    rates = replace(DEVICES["CPU"].rates, memory={"memory": [(1, 8.0)], "math": [(1, 4.0)], "math bf16": [(1, 2.0)]})
    found = {kind: rates.passes(kind, 100) for kind in ("math bf16", "math fp16", "math", "gelu bf16", "memory")}
    assert found == {"math bf16": 2, "math fp16": 4, "math": 4, "gelu bf16": 8, "memory": 8}


def test_rates_that_were_measured_replace_those_of_the_table(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = DEVICES["CPU"]
    assert with_measured(device, 1) == device
    table_of(device).parent.mkdir(parents=True)
    slow = replace(device.rates, launch=1.0, source="here")
    table_of(device).write_text(json.dumps({"1": asdict(slow), "4": asdict(device.rates)}), encoding="utf-8")
    assert with_measured(device, 2).rates == slow and with_measured(device, 8).rates == device.rates
    table_of(device).write_text("{", encoding="utf-8")
    assert with_measured(device, 1) == device


@pytest.mark.full
def test_this_machine_is_measured_alone_and_with_all_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(list(measure_here(DEVICES["CPU"]))) == 3
    for ranks in (1, 64):
        rates = with_measured(DEVICES["CPU"], ranks).rates
        assert rates.source != DEVICES["CPU"].rates.source
        assert rates.steps.keys() == {"fp32", "bf16"} and all(0.2 < speed < 5 for speed in rates.steps.values())
        assert rates.launch > 0 and rates.product("fp32", 1e9) > 1e9 and rates.passes("gelu bf16", 1e6) > 1e6
    assert rates.operations.keys() == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def test_failures_and_saves_cost_days() -> None:
    flags = "--global-batch-size 4096 --train-iters 100000 --save x --save-interval {}"
    often, seldom = (_run(flags.format(interval), 1024) for interval in (10, 1000))
    time = step_time(often, VOCABULARY, DEVICES["H100"], nodes=128)
    few, many = (course(run, time, DEVICES["H100"], nodes=128) for run in (seldom, often))
    large, small = (course(often, time, DEVICES["H100"], nodes=128, checkpoint=size) for size in (10**13, 10**11))
    assert large.goodput < small.goodput
    assert 0 < many.goodput < 1 and 0 < few.goodput < 1
    assert few.days * few.goodput == pytest.approx(100000 * time.step_seconds / 86400)
    assert few.kwh == pytest.approx(few.days * 24 * 1024 * DEVICES["H100"].rates.watts / 1000)
    assert few.tokens == 100000 * 4096 * 2048
