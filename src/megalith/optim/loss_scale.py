"""The factor that lifts fp16 gradients out of the range where they vanish (Micikevicius et al. 2018, arXiv:1710.03740).

Arithmetic is in fp32 as Megatron's, so that traces repeat (docs/reference/training.md#loss-scale).
"""

from __future__ import annotations

import numpy as np

from megalith.config import PrecisionConfig


class ConstantLossScale:
    """A fixed scale: 1 without fp16, or what --loss-scale says. The loss is multiplied by `value`, the gradients by
    `inverse`."""

    is_lowest = True  # an overflow cannot lower it any further

    def __init__(self, value: float) -> None:
        self.value = float(np.float32(value))
        self.inverse = float(np.float32(1.0 / self.value))

    def update(self, overflow: bool) -> None:
        """Ignore the outcome of a step."""

    def state(self) -> dict[str, float | int]:
        return {"scale": self.value}

    def load_state(self, state: dict[str, float | int]) -> None:
        """Keep the configured value: a fixed scale is a setting, not a state."""


class DynamicLossScale:
    """Halves on overflow once the hysteresis is spent, doubles after a window of clean steps.

    The hysteresis is filled again only when a whole clean window has passed, so after the first tolerated overflow
    every overflow halves.
    """

    def __init__(
        self, initial: float, minimum: float, window: int, hysteresis: int, growth: float = 2.0, backoff: float = 0.5
    ) -> None:
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self._growth, self._backoff = np.float32(growth), np.float32(backoff)
        self._scale = np.float32(initial)
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    @property
    def value(self) -> float:
        return float(self._scale)

    @property
    def inverse(self) -> float:
        return float(np.float32(1.0 / float(self._scale)))

    @property
    def is_lowest(self) -> bool:
        return self.value <= float(np.float32(self.minimum))

    def update(self, overflow: bool) -> None:
        """Lower or raise the scale, by whether the gradients of this step held an infinity or a NaN."""
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self._scale = max(np.float32(self._scale * self._backoff), np.float32(self.minimum))
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            self._scale = np.float32(self._scale * self._growth)

    def state(self) -> dict[str, float | int]:
        return {
            "scale": self.value,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state(self, state: dict[str, float | int]) -> None:
        self._scale = np.float32(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_tracker = int(state["hysteresis_tracker"])


LossScale = ConstantLossScale | DynamicLossScale


def build_loss_scale(precision: PrecisionConfig) -> LossScale:
    """Build the loss scale of a precision configuration."""
    if precision.dynamic_loss_scale:
        return DynamicLossScale(
            precision.initial_loss_scale,
            precision.min_loss_scale,
            int(precision.loss_scale_window),
            precision.hysteresis,
        )
    half = precision.fp16 or precision.bf16  # in fp32 Megatron has no scaler either
    return ConstantLossScale(precision.loss_scale if half and precision.loss_scale is not None else 1.0)
