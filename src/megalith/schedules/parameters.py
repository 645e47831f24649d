"""Schedules of learning rate and weight decay, and their state in a checkpoint.

Keys and the text of the mismatch error are Megatron's, for compatibility with its checkpoints and log searches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.errors import CheckpointError, ConfigError
from megalith.registry import Registered

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# Name -> share of (max - min) that remains after the fraction q of the annealing.
ANNEALING: dict[str, Callable[[float], float]] = {
    "exponential": lambda q: 2.0 * math.pow(0.5, q) - 1.0,
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 * (math.cos(math.pi * q) + 1.0),
    "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning rate as a pure function of the samples trained on: warm-up, then one of five decays.

    The unit is samples instead of iterations, so that the curve does not depend on the batch size. Only applied
    optimizer steps advance it: a step that the loss scaler skips does not change the rate.

    Raises:
        ConfigError: the values contradict each other (all contradictions at once).

    Source: docs/reference/training.md#learning-rate; golden `schedulers`.
    """

    max_lr: float  # rate at the end of the warm-up
    min_lr: float  # rate after `decay_samples`
    decay_samples: int  # samples from the start of training to the end of the decay (the warm-up counts)
    style: str = "linear"  # one of `DECAY_STYLES`, or a registered function (num_samples, schedule) -> rate
    warmup_samples: float = 0  # length of the linear warm-up; a fraction of the decay may give a non-integer
    init_lr: float = 0.0  # rate at the start of the warm-up
    wsd_samples: int | None = None  # length of the final annealing of the style WSD (warm-up, stable, decay)
    wsd_style: str = "exponential"  # shape of that annealing, a key of `ANNEALING`

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise ConfigError(problems)

    def lr(self, num_samples: int) -> float:
        """Return the learning rate of the step that follows `num_samples` samples of applied steps."""
        if self.warmup_samples > 0 and num_samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * float(num_samples) / float(self.warmup_samples)
        if isinstance(self.style, Registered):
            return self._registered(self.style, num_samples)
        if self.style == "constant":
            return self.max_lr
        if num_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            rate = self.max_lr * max(self.warmup_samples, 1) ** 0.5 / max(num_samples, 1) ** 0.5
            return max(self.min_lr, rate)
        return self.min_lr + self._remaining(num_samples) * (self.max_lr - self.min_lr)

    def _registered(self, style: Registered, num_samples: int) -> float:
        given = style(num_samples, self)
        try:
            rate = float(given)
        except (TypeError, ValueError):
            rate = math.nan
        if not (math.isfinite(rate) and rate >= 0.0):
            raise ConfigError(
                f"--lr-decay-style {style} gives a learning rate of {given!r} after {num_samples} samples; it must be "
                "a finite number, at least 0"
            )
        return rate

    def _remaining(self, num_samples: int) -> float:
        if self.style == "WSD":
            length = self.wsd_samples or 0
            stable_until = self.decay_samples - length
            if num_samples <= stable_until:
                return 1.0
            return ANNEALING[self.wsd_style](float(num_samples - stable_until) / float(length))
        passed = float(num_samples - self.warmup_samples) / float(self.decay_samples - self.warmup_samples)
        return ANNEALING[self.style](passed)


def _contradictions(schedule: LearningRateSchedule) -> list[str]:
    problems = []
    if schedule.style not in DECAY_STYLES and not isinstance(schedule.style, Registered):
        problems.append(f"--lr-decay-style {schedule.style} is not known; use one of {', '.join(DECAY_STYLES)}")
    if not 0.0 <= schedule.min_lr <= schedule.max_lr:
        problems.append(f"--min-lr {schedule.min_lr} must lie between 0 and --lr {schedule.max_lr}")
    if schedule.init_lr > schedule.max_lr:
        problems.append(f"--lr-warmup-init {schedule.init_lr} is above --lr {schedule.max_lr}; lower it")
    if schedule.decay_samples <= 0:
        problems.append(f"the learning rate decays over {schedule.decay_samples} samples; it needs at least 1")
    elif schedule.warmup_samples >= schedule.decay_samples:
        problems.append(
            f"the warm-up takes {schedule.warmup_samples:g} samples, the whole decay {schedule.decay_samples}: shorten "
            "--lr-warmup-iters/-samples/-fraction or lengthen --lr-decay-iters/-samples"
        )
    if schedule.style == "WSD":
        if not schedule.wsd_samples:
            problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)")
        if schedule.wsd_style not in ANNEALING:
            problems.append(
                f"--lr-wsd-decay-style {schedule.wsd_style} is not known; use one of {', '.join(ANNEALING)}"
            )
    return problems


INCREMENT_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay from `start` to `end` over `increment_samples` samples, then `end`.

    Raises:
        ConfigError: unknown style, or a start and end that the style cannot connect.

    Source: docs/reference/training.md#weight-decay.
    """

    start: float
    end: float
    increment_samples: int
    style: str = "constant"

    def __post_init__(self) -> None:
        problems = []
        if self.style not in INCREMENT_STYLES:
            known = ", ".join(INCREMENT_STYLES)
            problems.append(f"--weight-decay-incr-style {self.style} is not known; use one of {known}")
        if not 0.0 <= self.start <= self.end:
            problems.append(f"--start-weight-decay {self.start} must lie between 0 and --end-weight-decay {self.end}")
        elif self.style == "constant" and self.start != self.end:
            problems.append(
                f"--weight-decay-incr-style constant cannot go from {self.start} to {self.end}; use linear or cosine"
            )
        if problems:
            raise ConfigError(problems)

    def weight_decay(self, num_samples: int) -> float:
        """Return the weight decay of the step that follows `num_samples` samples of applied steps."""
        if self.style == "constant" or num_samples > self.increment_samples:
            return self.end
        passed = float(num_samples) / float(self.increment_samples)
        if self.style == "cosine":
            passed = 0.5 * (math.cos(math.pi * (1.0 - passed)) + 1.0)
        return self.start + passed * (self.end - self.start)


# Key in a checkpoint's `opt_param_scheduler` -> name on the console, in Megatron's order of reporting.
REPORTED_NAMES = {
    "max_lr": "learning rate",
    "min_lr": "minimum learning rate",
    "lr_warmup_steps": "warmup iterations",
    "lr_decay_steps": "total number of iterations",
    "lr_decay_style": "learning rate decay style",
    "start_wd": "start weight decay",
    "end_wd": "end weight decay",
    "wd_incr_steps": "total number of weight decay iterations",
    "wd_incr_style": "weight decay incr style",
}


@dataclass(frozen=True)
class ParameterSchedule:
    """Learning rate and weight decay of each optimizer step, as functions of the samples trained on."""

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    # rate of word embeddings and output layer; None if it is the common one. A resume does not change its maximum and
    # minimum, as in Megatron.
    decoupled: LearningRateSchedule | None = None

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        """Return Megatron's `opt_param_scheduler` entry; all its "steps" are samples."""
        return {
            "max_lr": self.learning_rate.max_lr,
            "lr_warmup_steps": self.learning_rate.warmup_samples,
            "num_steps": num_samples,
            "lr_decay_style": str(self.learning_rate.style),
            "lr_decay_steps": self.learning_rate.decay_samples,
            "min_lr": self.learning_rate.min_lr,
            "start_wd": self.weight_decay.start,
            "end_wd": self.weight_decay.end,
            "wd_incr_style": self.weight_decay.style,
            "wd_incr_steps": self.weight_decay.increment_samples,
        }

    def with_values(self, values: Mapping[str, Any]) -> ParameterSchedule:
        """Return the schedule with the values of a checkpoint (keys of `state_dict`) in place of its own."""
        own, saved = self.learning_rate.style, values["lr_decay_style"]
        shape = {
            "warmup_samples": values["lr_warmup_steps"],
            "decay_samples": values["lr_decay_steps"],
            "style": own if own == saved else saved,
        }
        return ParameterSchedule(
            replace(self.learning_rate, max_lr=values["max_lr"], min_lr=values["min_lr"], **shape),
            WeightDecaySchedule(values["start_wd"], values["end_wd"], values["wd_incr_steps"], values["wd_incr_style"]),
            None if self.decoupled is None else replace(self.decoupled, **shape),
        )


@dataclass(frozen=True)
class ResumedSchedule:
    """Schedule after a resume, its position, and its values for the console."""

    schedule: ParameterSchedule
    num_samples: int  # samples of applied steps so far
    values: tuple[tuple[str, Any], ...]  # (console name, value) in Megatron's order
    overridden: bool  # whether the values are the command line's instead of the checkpoint's


def _without_effect(values: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values have no effect in this schedule."""
    idle = {"lr_decay_steps", "min_lr"} if values["lr_decay_style"] == "constant" else set()
    if values["start_wd"] == values["end_wd"]:
        idle |= {"wd_incr_steps", "wd_incr_style"}
    return idle


def resume_schedule(
    current: ParameterSchedule,
    saved: Mapping[str, Any],
    *,
    override: bool = False,
    use_checkpoint: bool = False,
    changed: Sequence[str] = (),
) -> ResumedSchedule:
    """Merge the command line's schedule with a checkpoint's.

    Unlike in Megatron, values without effect in both may differ, such as the length over which a constant weight decay
    grows; the command line's are kept.

    Args:
        saved: the checkpoint's `opt_param_scheduler`.
        override: use the command line's values (`--override-opt-param-scheduler`).
        use_checkpoint: use the checkpoint's values (`--use-checkpoint-opt-param-scheduler`).
        changed: changed flags that determine the schedules, for the message.

    Raises:
        CheckpointError: values differ and neither flag is given; lists every difference.
    """
    own = current.state_dict(saved["num_steps"])
    # Checkpoints from before weight-decay schedules lack these keys: use the command line's values.
    stored = {key: saved.get(key, own[key]) for key in REPORTED_NAMES}
    if override:
        return _resumed(current, saved["num_steps"], own, overridden=True)
    stored |= {key: own[key] for key in _without_effect(own) & _without_effect(stored)}
    differences = [
        f"OptimizerParamScheduler: class input value {own[key]} and checkpointvalue {stored[key]} "
        f"for {name} do not match"
        for key, name in REPORTED_NAMES.items()
        if own[key] != stored[key]
    ]
    if differences and not use_checkpoint:
        if changed:
            differences.append(f"changed since the checkpoint, from which this follows: {', '.join(changed)}")
        lengths = [key for key in ("lr_decay_steps", "wd_incr_steps") if own[key] != stored[key]]
        if lengths:
            give = {"lr_decay_steps": "the decay, unless --lr-decay-iters or --lr-decay-samples gives it"}
            what = [give.get(key, "the growth of the weight decay") for key in lengths]
            differences.append(
                f"(the length of the run times the batch size is the length, in samples, of {' and of '.join(what)})"
            )
        differences.append(
            "add --override-opt-param-scheduler to continue with the values of the command line, or "
            "--use-checkpoint-opt-param-scheduler to continue with those of the checkpoint"
        )
        raise CheckpointError("\n".join(differences))
    return _resumed(current.with_values(stored), saved["num_steps"], stored, overridden=False)


def _resumed(
    schedule: ParameterSchedule, num_samples: int, values: Mapping[str, Any], *, overridden: bool
) -> ResumedSchedule:
    reported = tuple((name, values[key]) for key, name in REPORTED_NAMES.items())
    return ResumedSchedule(schedule, num_samples, reported, overridden)
