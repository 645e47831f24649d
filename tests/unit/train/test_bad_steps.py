"""What makes a step a bad one, and what is done about it, in one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from megalith.config import PrecisionConfig
from megalith.optim.loss_scale import build_loss_scale
from megalith.train.anomalies import AnomalyPolicy, BadStepError
from megalith.train.loop import LoopConfig, TrainingRun, train
from megalith.train.records import Records
from megalith.train.results import BadStep, StepResult
from megalith.train.state import REMEMBERED, StepCheck
from megalith.train.step import train_step
from megalith.train.step_hooks import NaNInjector

from ...spoil import spoiled
from .conftest import batches, make_state
from .test_loop import Recorder


def _run(
    spoils: Sequence[str] = (),
    steps: int = 4,
    check: StepCheck | None = None,
    precision: PrecisionConfig | None = None,
    **options: object,
) -> tuple[list[StepResult], list[BadStep], AnomalyPolicy]:
    """Steps of two micro-batches of two samples each."""
    state = make_state(precision)
    state.check = check or state.check
    told: list[BadStep] = []
    policy = AnomalyPolicy(state, "1f1b", **options)  # type: ignore[arg-type]
    stream, results = batches(), []
    take = partial(train_step, state, hooks=policy.hooks)
    with spoiled(state, spoils):
        for _ in range(steps):
            attempt = policy.begin(stream)
            result = take(attempt.batches, 2, apply=attempt.apply)
            results.append(policy.resolve(attempt, result, take, told.append))
    return results, told, policy


def _same(one: list[StepResult], other: list[StepResult]) -> bool:
    """The same numbers, but for the time that they took."""
    return [(r.loss, r.grad_norm, r.applied) for r in one] == [(r.loss, r.grad_norm, r.applied) for r in other]


def _filled(**settings: bool) -> StepCheck:
    check = StepCheck(**settings)
    for number in range(40):
        check.remember(4.0 + 0.01 * (number % 3), 1.0)
    return check


def test_a_loss_is_judged_by_those_before() -> None:
    check = _filled(spiky_loss=True, large_norm=True)
    assert check.loss_anomaly(40.0) == ""
    assert all(number in check.loss_anomaly(41.0) for number in ("41", "10.2", "40"))
    assert check.norm_anomaly(9.9) == "" and "10.1" in check.norm_anomaly(10.1)
    assert check.reject_norm_above == 10.0
    quiet = _filled()
    assert quiet.loss_anomaly(41.0) == "" and quiet.reject_norm_above == math.inf
    assert "41" in quiet.alarm(41.0)
    assert quiet.alarm(4.5) == ""
    assert StepCheck(spiky_loss=True).loss_anomaly(1e9) == "", "nothing to compare with yet"


def test_what_is_not_finite_is_bad_unless_a_scaler_sees_to_it() -> None:
    for value in (math.nan, math.inf):
        assert StepCheck().loss_anomaly(value) and StepCheck().norm_anomaly(value)
        assert not StepCheck(not_finite=False).loss_anomaly(value)
        assert not StepCheck(not_finite=False).norm_anomaly(value)
    assert StepCheck().norm_anomaly(None), "an overflow that no scaler answers"
    assert StepCheck(not_finite=False).norm_anomaly(None) == ""


def test_the_memory_is_bounded_and_survives_a_checkpoint() -> None:
    check = _filled()
    for _ in range(REMEMBERED):
        check.remember(3.0, 2.0)
    check.remember(math.nan, math.inf)
    assert len(check.losses) == len(check.norms) == REMEMBERED and max(check.losses) == 3.0
    other = StepCheck()
    other.load_state(check.state())
    assert other.state() == check.state()
    other.load_state({})
    assert other.losses == other.norms and not other.losses


def test_a_skipped_step_is_as_if_its_samples_had_not_been() -> None:
    results, told, policy = _run(["nan@step=2,point=loss,micro_batch=1"], policy="skip")
    assert [result.applied for result in results] == [True, False, True, True]
    assert [result.anomaly != "" for result in results] == [False, True, False, False]
    (bad,) = told
    assert (bad.iteration, bad.first_sample, bad.last_sample, bad.number) == (2, 6, 7, 1)
    assert (policy.state.iteration, policy.state.consumed_samples, policy.state.lr_schedule_samples) == (4, 16, 12)
    assert policy.state.optimizer.step_count == 3


def test_the_search_finds_module_weight_and_gradient() -> None:
    mlp = "decoder.layers.0.mlp"
    for spoil, wanted in (
        (f"nan@step=1,point=activation,module={mlp}", f"the output of {mlp}"),
        (f"inf@step=1,point=grad,module={mlp},micro_batch=1", f"the gradient of the output of {mlp}"),
        (f"inf@step=1,point=weight,module={mlp}.linear_fc2.weight", f"the weight {mlp}.linear_fc2.weight"),
        ("inf@step=1,point=loss,micro_batch=1", "the loss of micro-batch 1"),
    ):
        with pytest.raises(BadStepError, match=wanted.replace(".", r"\.")):
            _run([spoil], steps=1)


def test_a_rerun_after_a_transient_error_gives_what_a_clean_run_gives() -> None:
    clean, _, _ = _run(policy="rerun")
    results, told, policy = _run(["nan@step=2,point=activation,module=decoder.layers.0.mlp,times=1"], policy="rerun")
    assert _same(results, clean)
    assert [bad.recomputed for bad in told] == ["finite"]
    assert policy.num_bad == 1


def test_a_spike_is_an_alarm_and_with_the_flag_a_bad_step() -> None:
    spoil = ["spike@step=4,point=loss,micro_batch=1"]
    results, told, _ = _run(spoil, check=_filled())
    assert all(result.applied for result in results)
    assert [(bad.action, bad.first_sample, bad.last_sample) for bad in told] == [("alarm", 14, 15)]
    results, told, _ = _run(spoil, check=_filled(spiky_loss=True), policy="skip")
    assert [result.applied for result in results] == [True, True, True, False]
    assert [(bad.action, bad.first_sample, bad.first) for bad in told] == [("skip", 14, None)]
    with pytest.raises(BadStepError, match="step 4|iteration 4"):
        _run(spoil, check=_filled(spiky_loss=True))


def test_a_large_norm_is_a_bad_step_with_its_flag() -> None:
    check = StepCheck(large_norm=True)
    check.norms.extend([1e-4] * 20)
    results, told, _ = _run(check=check, steps=1, policy="skip")
    assert not results[0].applied and "gradient norm" in told[0].reason


def test_skipping_for_ever_is_no_remedy() -> None:
    spoils = [f"nan@step={step},point=loss" for step in range(1, 30)]
    with pytest.raises(BadStepError, match=r"\b20\b"):
        _run(spoils, steps=29, policy="skip")


FP16 = PrecisionConfig(fp16=True, initial_loss_scale=4.0, hysteresis=1)


def test_overflows_at_the_smallest_loss_scale_end_the_run() -> None:
    spoils = [f"inf@step={step},point=grad,module=decoder.layers.0.mlp" for step in range(1, 40)]
    results, told, policy = _run(spoils, steps=21, check=StepCheck(not_finite=False), precision=FP16)
    assert not any(result.applied for result in results) and not told, "two lower the scale from 4 to 1, then 19"
    with pytest.raises(BadStepError, match="decoder.layers.0.mlp .*--bf16"):
        _run(spoils, steps=22, check=StepCheck(not_finite=False), precision=FP16)


def test_an_applied_step_between_overflows_lets_the_run_continue() -> None:
    spoils = [f"inf@step={step},point=loss" for step in range(1, 42) if step != 21]
    results, _, _ = _run(spoils, steps=40, check=StepCheck(not_finite=False), precision=FP16)
    assert [result.iteration for result in results if result.applied] == [21]


def test_steps_that_are_skipped_for_ever_stop_without_a_scaler_too() -> None:
    spoils = [f"nan@step={step},point=loss" for step in range(1, 30)]
    with pytest.raises(BadStepError) as stopped:
        _run(spoils, steps=20, check=StepCheck(not_finite=False))
    assert "--lr" in str(stopped.value) and not re.search("--fp16|--loss-scale|loss scale", str(stopped.value))


@pytest.mark.parametrize("checked", [True, False])
def test_a_fixed_loss_scale_that_is_too_large_is_named(checked: bool) -> None:
    spoils = [f"inf@step={step},point=grad,module=decoder.layers.0.mlp" for step in range(1, 30)]
    precision = PrecisionConfig(fp16=True, loss_scale=2.0**100)
    with pytest.raises(BadStepError) as stopped:
        _run(spoils, steps=20, check=StepCheck(not_finite=checked), precision=precision)
    assert "Lower --loss-scale" in str(stopped.value) and "smallest" not in str(stopped.value)


def test_the_smallest_loss_scale_is_reached_after_rounding_to_fp32() -> None:
    scale = build_loss_scale(PrecisionConfig(fp16=True, initial_loss_scale=1e30, min_loss_scale=1e30))
    assert scale.value != 1e30 and scale.is_lowest


def test_injected_errors_are_told_apart() -> None:
    clean, _, _ = _run()
    for kind, recomputed in (("transient_error", "finite"), ("correct_result", "equal")):
        results, told, policy = _run(policy="rerun", injector=NaNInjector(1, kind, 1234))
        assert _same(results, clean)
        assert len(told) == policy.num_bad == 4 and {bad.recomputed for bad in told} == {recomputed}
    with pytest.raises(BadStepError):
        _run(policy="rerun", injector=NaNInjector(1, "persistent_error", 1234))


def test_injection_strikes_one_in_so_many_steps_wherever_the_run_began() -> None:
    tenth = NaNInjector(10, seed=7)
    struck = [number for number in range(1000) if tenth.strikes(number)]
    assert 70 < len(struck) < 130
    assert struck[3:] == [number for number in range(struck[3], 1000) if tenth.strikes(number)]
    assert not any(NaNInjector(0, seed=7).strikes(number) for number in range(100))


def test_every_step_twice_changes_nothing() -> None:
    clean, _, _ = _run()
    assert AnomalyPolicy(make_state(), "1f1b").summary() == ""
    results, told, policy = _run(compare=True)
    assert _same(results, clean) and not told
    assert policy.summary().startswith("0 of 4 steps") and (policy.num_different, policy.num_compared) == (0, 4)
    _, told, policy = _run(["spike@step=2,point=loss,times=1"], compare=True)
    assert policy.summary().startswith("1 of 4 steps") and [bad.action for bad in told] == ["alarm"]


def test_iterations_are_passed_over(make_loop_config: Callable[..., LoopConfig]) -> None:
    recorder, state = Recorder(), make_state()
    run = TrainingRun(
        make_loop_config(iterations_to_skip=frozenset({1, 4}), log_interval=1), state, batches(), hook=recorder
    )
    results = list(train(run))
    assert [result.iteration for result in results] == [1, 3, 4, 6]
    assert [result.consumed_samples for result in results] == [4, 12, 16, 24]
    assert state.skipped_samples == 8 and recorder.windows[-1].skipped_samples == 8
    assert state.lr_schedule_samples == 16


def test_the_curves_show_what_was_passed_over_and_the_decoupled_rate() -> None:
    class Drawn:
        name, errors = "a list", (OSError,)

        def __init__(self) -> None:
            self.points: dict[str, float] = {}

        def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
            self.points |= values

        def close(self) -> None: ...

    sink = Drawn()
    (result,), _, _ = _run(steps=1)
    Records([sink]).after_step(replace(result, decoupled_lr=0.5, skipped_samples=8))
    assert sink.points["decoupled-learning-rate"] == 0.5 and sink.points["skipped-train-samples"] == 8.0


def test_a_bad_step_costs_nothing_while_there_is_none() -> None:
    """No hook is on the model but in a search."""
    results, _, policy = _run(["nan@step=2,point=loss"], policy="skip")
    assert len(results) == 4
    assert not any(module._forward_hooks for module in policy.state.model.modules())
    assert isinstance(policy.state.model, torch.nn.Module)
