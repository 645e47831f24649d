"""Properties of the schedules that hold for every value."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import CheckpointError, ConfigError
from megalith.registry import Entry, Registered
from megalith.schedules.parameters import (
    ANNEALING,
    DECAY_STYLES,
    REPORTED_NAMES,
    LearningRateSchedule,
    ParameterSchedule,
    WeightDecaySchedule,
    resume_schedule,
)


@given(
    style=st.sampled_from(DECAY_STYLES),
    wsd_style=st.sampled_from(sorted(ANNEALING)),
    warmup=st.integers(0, 50),
    samples=st.integers(0, 300),
)
def test_the_rate_stays_between_its_bounds(style: str, wsd_style: str, warmup: int, samples: int) -> None:
    schedule = LearningRateSchedule(1e-3, 1e-5, 200, style, warmup, wsd_samples=40, wsd_style=wsd_style)
    rate = schedule.lr(samples)
    assert 0.0 <= rate <= 1e-3 * (1 + 1e-12)
    if samples > warmup:
        assert rate >= 1e-5 * (1 - 1e-9)


@given(style=st.sampled_from(["linear", "cosine", "inverse-square-root", "WSD"]), samples=st.integers(11, 250))
def test_after_the_warm_up_the_rate_never_rises(style: str, samples: int) -> None:
    schedule = LearningRateSchedule(1e-3, 1e-5, 200, style, 10, wsd_samples=40)
    assert schedule.lr(samples + 1) <= schedule.lr(samples)


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        LearningRateSchedule(1e-3, 2e-3, 10, "sine", 20, init_lr=5e-3)
    text = str(raised.value)
    for flag in ("--lr-decay-style sine", "--min-lr 0.002", "--lr-warmup-init 0.005", "--lr-warmup-iters"):
        assert flag in text


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_ends_at_its_end(style: str) -> None:
    start = 0.1 if style == "constant" else 0.01
    schedule = WeightDecaySchedule(start, 0.1, 60, style)
    assert schedule.weight_decay(0) == start
    assert schedule.weight_decay(61) == 0.1


def test_weight_decay_refuses_a_constant_that_moves() -> None:
    with pytest.raises(ConfigError, match="--weight-decay-incr-style constant"):
        WeightDecaySchedule(0.01, 0.1, 60, "constant")


def make_schedule(max_lr: float = 1e-3, decay: int = 80) -> ParameterSchedule:
    return ParameterSchedule(
        LearningRateSchedule(max_lr, 1e-5, decay, "cosine", 10), WeightDecaySchedule(0.1, 0.1, 60, "constant")
    )


def test_a_refused_resume_names_every_difference_and_both_remedies() -> None:
    with pytest.raises(CheckpointError) as raised:
        resume_schedule(make_schedule(2e-3, 90), make_schedule().state_dict(37))
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert "learning rate" in lines[0] and "total number of iterations" in lines[1]
    assert "--lr-decay-iters" in lines[2]
    assert "--override-opt-param-scheduler" in lines[3] and "--use-checkpoint-opt-param-scheduler" in lines[3]


def test_a_value_without_effect_stops_nobody() -> None:
    longer = replace(make_schedule(), weight_decay=WeightDecaySchedule(0.1, 0.1, 90, "constant"))
    resumed = resume_schedule(longer, make_schedule().state_dict(37))
    assert resumed.schedule == longer, "the length of the command line is kept"
    flat = LearningRateSchedule(1e-3, 1e-5, 80, "constant", 10)
    other = replace(flat, decay_samples=160, min_lr=0.0)
    constants = (replace(make_schedule(), learning_rate=rate) for rate in (other, flat))
    assert resume_schedule(next(constants), next(constants).state_dict(37)).schedule.learning_rate == other


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_length_of_a_weight_decay_that_grows_has_an_effect(style: str) -> None:
    saved, longer = (
        replace(make_schedule(), weight_decay=WeightDecaySchedule(0.0, 0.1, length, style)) for length in (60, 90)
    )
    with pytest.raises(CheckpointError, match="weight decay") as raised:
        resume_schedule(longer, saved.state_dict(37), changed=["--train-iters 15 -> 22"])
    for words in ("--train-iters 15 -> 22", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert words in str(raised.value)


def test_a_resume_reports_the_nine_values_in_order() -> None:
    resumed = resume_schedule(make_schedule(), make_schedule().state_dict(37))
    assert [name for name, _ in resumed.values] == list(REPORTED_NAMES.values())
    assert resumed.num_samples == 37 and not resumed.overridden


@pytest.mark.parametrize("rate", [None, "fast", float("nan"), -1.0, (1, 2)])
def test_a_registered_schedule_that_gives_no_rate_is_named(rate: object) -> None:
    style = Registered(Entry("schedule", "own", lambda num_samples, schedule: rate))
    schedule = LearningRateSchedule(max_lr=1.0, min_lr=0.0, decay_samples=10, style=style)
    with pytest.raises(ConfigError, match="--lr-decay-style own.* 3 samples"):
        schedule.lr(3)
