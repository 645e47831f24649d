"""Whether two configurations differ by more than their seeds do: Welch's t-test, its interval and its power.

With three seeds a side a permutation test cannot reach 5 %, and Student's test with a common variance raises false
alarms where the spreads differ. Welch's does so in up to 11 % where two seeds meet more; its degrees of freedom are
limited here to those of two sides like the smaller one, which lowers that to 8 %.

Source: Welch 1947, Biometrika 34. The rates are simulated, with spreads that differ up to eight times.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, variance
from typing import Any

import numpy as np

LEVEL, POWER = 0.05, 0.8
MOST_SEEDS = 100
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)
_SQRT2 = math.sqrt(2)


@dataclass(frozen=True)
class Difference:
    """Mean of one side minus that of the baseline.

    Attributes:
        value: the difference.
        low, high: its confidence interval.
        p: probability of a difference at least as large, to either side, between equal configurations.
    """

    value: float
    low: float
    high: float
    p: float


def two_sided_tail(t: float, df: float) -> float:
    """Return P(|T| > |t|) of Student's t with `df` >= 1: with t = sqrt(df) tan(a) its density is cos(a)^(df - 1)."""
    angle = math.atan(abs(t) / math.sqrt(df))
    inside = angle / 2 * float(_WEIGHTS @ np.cos(angle * (_NODES + 1) / 2) ** (df - 1))
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - 2 * scale * inside)


def critical_value(level: float, df: float) -> float:
    """Return the t that |T| exceeds with probability `level`."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        above = two_sided_tail(math.tan(middle) * math.sqrt(df), df) > level
        low, high = (middle, high) if above else (low, middle)
    return math.tan(low) * math.sqrt(df)


def welch(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Difference:
    """Test mean(other) - mean(base); two values a side at least, not all equal on both."""
    variances, counts = (variance(base), variance(other)), (len(base), len(other))
    error, df = _error(variances, counts)
    value = mean(other) - mean(base)
    reach = critical_value(level, df) * error
    return Difference(value, value - reach, value + reach, two_sided_tail(value / error, df))


def power_of(difference: float, variances: tuple[float, float], counts: tuple[int, int], level: float = LEVEL) -> float:
    """Return the probability that `welch` finds a true difference with p < `level`, for normal losses.

    The variances are the true ones; the integral is over the estimated ones, which are independent of the means.
    """
    (u, u_weights), (v, v_weights) = (_relative_deviation(count - 1) for count in counts)
    true_error, _ = _error(variances, counts)
    error, df = _error((variances[0] * u[:, None] ** 2, variances[1] * v**2), counts)
    inverse, critical = _critical_values(level)
    reach = np.exp(np.interp(1 / df, inverse, critical)) * error
    tails = np.vectorize(math.erfc)(np.stack([reach - abs(difference), reach + abs(difference)]) / true_error / _SQRT2)
    return float(u_weights @ (tails.sum(0) / 2) @ v_weights)


def seeds_needed(difference: float, variances: tuple[float, float], level: float = LEVEL) -> int | None:
    """Return the seeds a side that find a true difference with probability POWER; None above MOST_SEEDS."""
    counts = range(2, MOST_SEEDS + 2)
    enough = counts[
        bisect_left(counts, POWER, 0, MOST_SEEDS - 1, key=lambda n: power_of(difference, variances, (n, n), level))
    ]
    return enough if enough <= MOST_SEEDS else None


def _error(variances: tuple[Any, Any], counts: tuple[int, int]) -> tuple[Any, Any]:
    """Return the standard error of the difference of the means, and its degrees of freedom."""
    squares = [each / count for each, count in zip(variances, counts, strict=True)]
    total = squares[0] + squares[1]
    df = total**2 / sum(square**2 / (count - 1) for square, count in zip(squares, counts, strict=True))
    return total**0.5, np.minimum(df, 2.0 * (min(counts) - 1))


def _relative_deviation(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values of an estimated standard deviation over the true one, and their probabilities."""
    u = (1 + 8 / math.sqrt(2 * df)) * (_NODES + 1) / 2
    weights = _WEIGHTS * np.exp((df - 1) * np.log(u) - df / 2 * (u**2 - 1))
    return u, weights / weights.sum()


@cache
def _critical_values(level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return 1 / df from 0.005 to 1, and the logarithms of the critical values."""
    inverse = np.linspace(0.005, 1, 200)
    return inverse, np.log([critical_value(level, 1 / each) for each in inverse])
