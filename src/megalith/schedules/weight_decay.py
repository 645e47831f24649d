"""The weight decay as a pure function of the samples trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.errors import ConfigError

INCREMENT_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class WeightDecaySchedule:
    """From `start` to `end` over `increment_samples`, then `end`.

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
        """The decay of the step that follows `num_samples` samples of applied steps."""
        if self.style == "constant" or num_samples > self.increment_samples:
            return self.end
        passed = float(num_samples) / float(self.increment_samples)
        if self.style == "cosine":
            passed = 0.5 * (math.cos(math.pi * (1.0 - passed)) + 1.0)
        return self.start + passed * (self.end - self.start)
