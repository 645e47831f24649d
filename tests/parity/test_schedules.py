"""The schedules against the traces of Megatron's own classes (golden `schedulers`), exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import CheckpointError, ConfigError
from megalith.schedules.batch_size import constant, ramped
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule, resume_schedule


def build(config: dict[str, Any]) -> ParameterSchedule:
    return ParameterSchedule(
        LearningRateSchedule(
            max_lr=config["max_lr"],
            min_lr=config["min_lr"],
            decay_samples=config["lr_decay_steps"],
            style=config["lr_decay_style"],
            warmup_samples=config["lr_warmup_steps"],
            init_lr=config["init_lr"],
            wsd_samples=config.get("wsd_decay_steps"),
            wsd_style=config.get("lr_wsd_decay_style", "exponential"),
        ),
        WeightDecaySchedule(config["start_wd"], config["end_wd"], config["wd_incr_steps"], config["wd_incr_style"]),
    )


def test_every_trace_is_repeated(shared: Path) -> None:
    cases = json.loads((shared / "golden/schedulers/param_scheduler.json").read_text())
    compared = 0
    for case in cases:
        if "error" in case:
            with pytest.raises(ConfigError):
                build(case["config"])
            continue
        schedule = build(case["config"])
        rates = [
            replace(schedule.learning_rate, max_lr=group["max_lr"], min_lr=group["min_lr"])
            if "max_lr" in group
            else schedule.learning_rate
            for group in case["groups"]
        ]
        for point in case["trace"]:
            samples = point["num_steps"]
            assert [rate.lr(samples) for rate in rates] == point["lr"], (case["name"], samples)
            decay = schedule.weight_decay.weight_decay(samples)
            expected = [decay * group.get("wd_mult", 1.0) for group in case["groups"]]
            assert expected == point["wd"], (case["name"], samples)
            compared += 1
        assert schedule.state_dict(case["trace"][-1]["num_steps"]) == case["state_dict"]
    assert compared > 1500


def test_resume_takes_refuses_and_overrides_as_the_original(shared: Path) -> None:
    golden = json.loads((shared / "golden/schedulers/param_scheduler_resume.json").read_text())
    assert golden["cases"]
    for case in golden["cases"]:
        flags = case["flags"]
        arguments = {
            "override": flags.get("override_opt_param_scheduler", False),
            "use_checkpoint": flags.get("use_checkpoint_opt_param_scheduler", False),
        }
        current, result = build(case["class_args"]), case["result"]
        if "error" in result:
            with pytest.raises(CheckpointError) as raised:
                resume_schedule(current, golden["state_dict"], **arguments)
            assert str(raised.value).splitlines()[0] == result["error"]
            continue
        resumed = resume_schedule(current, golden["state_dict"], **arguments)
        assert resumed.num_samples == result["num_steps"]
        assert resumed.schedule.learning_rate.max_lr == result["max_lr"]
        assert resumed.schedule.learning_rate.lr(resumed.num_samples) == result["lr"][0]


def test_batch_sizes_are_those_of_the_original(shared: Path) -> None:
    cases = json.loads((shared / "golden/schedulers/microbatches.json").read_text())
    compared = 0
    for case in cases:
        if "error" in case:  # refused by rules of the configuration (tests/unit/config)
            continue
        config = case["config"]
        unit = config["micro_batch_size"] * config["data_parallel_size"]
        ramp, final = config["rampup_batch_size"], config["global_batch_size"]
        sizes = ramped(*ramp, final, unit) if ramp else constant(final, unit)
        for _, consumed, micro_batches, current, running, _ in case["trace"]:
            own = (
                sizes.num_micro_batches(consumed),
                sizes.nominal_size(consumed),
                sizes.num_micro_batches(consumed) * sizes.unit,
            )
            assert own == (micro_batches, current, running), (case["name"], consumed)
            compared += 1
    assert compared >= 300
