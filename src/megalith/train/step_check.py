"""Whether a step is a bad one: its loss or gradient norm is not finite, or far above those of the steps before.

Decided from numbers that all ranks have alike, before an update is made, so that all of them do the same. The numbers
of the last steps are part of a checkpoint, so that a resumed run decides as the run without a break does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, pstdev
from typing import Any

REMEMBERED = 100  # steps, as many as Megatron looks at
FACTOR = 10.0  # Megatron's, of --check-for-spiky-loss and --check-for-large-grads
FEWEST = 10  # steps before a comparison means something
ALARM_DEVIATIONS, ALARM_SHARE = 8.0, 0.25  # standard deviations and share of the mean that a loss may rise by unnoticed


@dataclass
class StepCheck:
    """The checks of a run, and what it remembers for them.

    Attributes:
        not_finite: whether a loss or norm that is not finite is bad.
        spiky_loss, large_norm: whether one of 10 times the largest remembered is.
        losses, norms: of the last applied steps.
    """

    not_finite: bool = True
    spiky_loss: bool = False
    large_norm: bool = False
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def of_loss(self, loss: float) -> str:
        """What is wrong with the loss of a step; empty for nothing."""
        if not math.isfinite(loss):
            return f"the loss is {loss}" if self.not_finite else ""
        limit = _limit(self.losses) if self.spiky_loss else math.inf
        return f"the loss is {loss:.6g}, {_times(loss, self.losses)}," if loss > limit else ""

    @property
    def largest_norm(self) -> float:
        """Above it a gradient norm is bad."""
        return _limit(self.norms) if self.large_norm else math.inf

    def of_norm(self, norm: float | None) -> str:
        """What is wrong with the gradient norm of a step, None for an overflow; empty for nothing."""
        if norm is None:
            return "a gradient is not finite" if self.not_finite else ""
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}" if self.not_finite else ""
        return f"the gradient norm is {norm:.6g}, {_times(norm, self.norms)}," if norm > self.largest_norm else ""

    def alarm(self, loss: float) -> str:
        """A word about a loss that stands out, though it is no bad step; empty where it does not."""
        if len(self.losses) < FEWEST or not math.isfinite(loss):
            return ""
        mean = fmean(self.losses)
        if loss <= mean + max(ALARM_DEVIATIONS * pstdev(self.losses), ALARM_SHARE * abs(mean)):
            return ""
        return f"the loss is {loss:.6g}, where the mean of the last {len(self.losses)} steps is {mean:.6g}"

    def remember(self, loss: float, norm: float | None) -> None:
        """Take an applied step into account."""
        if math.isfinite(loss):
            self.losses.append(loss)
        if norm is not None and math.isfinite(norm):
            self.norms.append(norm)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for kept, name in ((self.losses, "losses"), (self.norms, "norms")):
            kept.clear()
            kept.extend(float(value) for value in state.get(name, ()))


def _limit(remembered: Sequence[float]) -> float:
    return FACTOR * max(remembered) if len(remembered) >= FEWEST else math.inf


def _times(value: float, remembered: Sequence[float]) -> str:
    return f"{value / max(remembered):.3g} times the largest of the last {len(remembered)} steps"


def is_injected(rate: int, seed: int, iteration: int) -> bool:
    """Whether `--error-injection-rate` spoils an iteration: one in `rate`, the same on every rank and on a resume."""
    return rate > 0 and Random(f"{seed} {iteration}").randrange(rate) == 0
