"""The learning rate as a pure function of the samples trained on.

The unit is samples, not iterations, so that a change of batch size does not bend the curve. Only applied optimizer
steps advance it: a step that the loss scaler skips leaves the rate where it is. Knows nothing of configuration or of
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megalith.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# Share of (max - min) that is left after the fraction q of the annealing has passed.
ANNEALING: dict[str, Callable[[float], float]] = {
    "exponential": lambda q: 2.0 * math.pow(0.5, q) - 1.0,
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 * (math.cos(math.pi * q) + 1.0),
    "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up, then one of five decays.

    Attributes:
        max_lr: rate at the end of the warm-up.
        min_lr: rate after `decay_samples`.
        decay_samples: samples from the start of training to the end of the decay (the warm-up counts).
        style: one of `DECAY_STYLES`.
        warmup_samples: length of the linear warm-up; a fraction of the decay may give a non-integer.
        init_lr: rate at the start of the warm-up.
        wsd_samples: length of the final annealing of the style WSD (warm-up, stable, decay).
        wsd_style: shape of that annealing, a key of `ANNEALING`.

    Raises:
        ConfigError: the values contradict each other (all contradictions at once).

    Source: docs/reference/training.md#learning-rate; golden `schedulers`.
    """

    max_lr: float
    min_lr: float
    decay_samples: int
    style: str = "linear"
    warmup_samples: float = 0
    init_lr: float = 0.0
    wsd_samples: int | None = None
    wsd_style: str = "exponential"

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise ConfigError(problems)

    def lr(self, num_samples: int) -> float:
        """The rate of the step that follows `num_samples` samples of applied steps."""
        if self.warmup_samples > 0 and num_samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * float(num_samples) / float(self.warmup_samples)
        if self.style == "constant":
            return self.max_lr
        if num_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            rate = self.max_lr * max(self.warmup_samples, 1) ** 0.5 / max(num_samples, 1) ** 0.5
            return max(self.min_lr, rate)
        return self.min_lr + self._remaining(num_samples) * (self.max_lr - self.min_lr)

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
    if schedule.style not in DECAY_STYLES:
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
