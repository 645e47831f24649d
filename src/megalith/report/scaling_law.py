"""The loss by size and data, L(N, D) = E + A / N^alpha + B / D^beta: fit, bootstrap intervals and predictions.

The logarithms of the five constants are fitted to log L by Levenberg and Marquardt's method from a grid of starts, with
Huber's weights. All starts of all bootstrap samples are one batch.

Source: the law and the robust fit of log L: Hoffmann et al. 2022, arXiv:2203.15556, approach 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONSTANTS = ("E", "A", "alpha", "B", "beta")
LEVEL = 0.9  # of the intervals
_SAMPLES = 400
_HUBER = 1.345  # in standard deviations: 95 % efficient for normal errors
_DEVIATION = 1.4826  # standard deviation of normal errors over the median of their sizes
_ITERATIONS = 60
_STARTS = list(itertools.product((0.2, 0.7), (0.2, 0.7), (0.3, 0.8)))  # alpha, beta, E / smallest loss


@dataclass(frozen=True)
class Law:
    """The constants of L(N, D) = E + A / N^alpha + B / D^beta, each at least 0."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """Return L(N, D)."""
        n, d = np.asarray(parameters, dtype=float), np.asarray(tokens, dtype=float)
        return np.asarray(self.E + self.A * n**-self.alpha + self.B * d**-self.beta)


@dataclass(frozen=True)
class Interval:
    """A value and its interval at LEVEL."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A law fitted to losses, and laws fitted to bootstrap samples of them.

    Attributes:
        noise: one error of log L for each sample, as a new run has.
    """

    law: Law
    samples: Sequence[Law]
    noise: np.ndarray

    def constant(self, name: str) -> Interval:
        """Return a constant of the law by its name."""
        return _interval(getattr(self.law, name), np.array([getattr(law, name) for law in self.samples]))

    def predict(self, parameters: float, tokens: float) -> Interval:
        """Return L(N, D) with the interval in which the loss of a new run lies."""
        means = np.array([law.loss(parameters, tokens) for law in self.samples])
        return _interval(float(self.law.loss(parameters, tokens)), means * np.exp(self.noise))


def fit(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> Fit:
    """Fit the law, and laws to losses with errors drawn anew from the residuals.

    The residuals are widened by what the fit has taken from their spread, and those of a sample by how uncertain that
    spread is, as Student's distribution does.

    Args:
        parameters, tokens, losses: N, D and L of each run: more than 5 runs, of different N and D.
    """
    n, d, loss = (np.asarray(values, dtype=float) for values in (parameters, tokens, losses))
    free, draw = len(loss) - len(CONSTANTS), np.random.default_rng(0)
    widened = (len(loss) / free) ** 0.5
    (law,) = _fit(n, d, loss[None])
    reach = _HUBER * _DEVIATION * widened * float(np.median(np.abs(np.log(loss / law.loss(n, d))))) + 1e-9
    (law,) = _fit(n, d, loss[None], reach)
    residuals = np.log(loss / law.loss(n, d)) * widened
    residuals -= residuals.mean()
    spreads = (free / draw.chisquare(free, (_SAMPLES, 1))) ** 0.5
    errors = draw.choice(residuals, (_SAMPLES, len(loss))) * spreads
    noise = draw.choice(residuals, _SAMPLES) * spreads[:, 0]
    return Fit(law, _fit(n, d, law.loss(n, d) * np.exp(errors), reach), noise)


def _interval(value: float, samples: np.ndarray) -> Interval:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


def _fit(n: np.ndarray, d: np.ndarray, losses: np.ndarray, reach: float = np.inf) -> list[Law]:
    """Fit a law to each row of losses [R, runs]; errors of log L beyond `reach` count linearly, others squared."""
    x, y = np.log(n), np.log(d)
    middle = x.mean(), y.mean()
    alpha, beta, share = np.array(_STARTS).T
    e = np.log(losses.min(1)[:, None] * share)
    rest = np.log((np.median(losses, 1)[:, None] - np.exp(e)) / 2)
    starts = np.broadcast_arrays(e, rest, np.log(alpha), rest, np.log(beta))
    logs = np.repeat(np.log(losses), len(_STARTS), 0)
    x, y = x - x.mean(), y - y.mean()
    theta, errors = _descend(np.stack(starts, -1).reshape(-1, 5), x, y, logs, np.inf)
    best = np.arange(len(losses)) * len(_STARTS) + errors.reshape(-1, len(_STARTS)).argmin(1)
    theta, _ = _descend(theta[best], x, y, logs[best], reach)
    found = []
    for row in theta:
        E, A, alpha, B, beta = np.exp(row)
        A, B = A * np.exp(alpha * middle[0]), B * np.exp(beta * middle[1])
        found.append(Law(*map(float, (E, A, alpha, B, beta))))
    return found


def _descend(
    theta: np.ndarray, x: np.ndarray, y: np.ndarray, logs: np.ndarray, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise Huber's error of each row of `logs` [R, runs] from the constants' logarithms `theta` [R, 5].

    Returns:
        The constants' logarithms [R, 5], A and B where x and y are 0, and the errors [R].
    """
    damping = np.full(len(theta), 1e-2)
    residuals, slopes = _model(theta, x, y, logs)
    errors = _huber(residuals, reach)
    for _ in range(_ITERATIONS):
        weighted = slopes * np.minimum(1.0, reach / np.maximum(np.abs(residuals), 1e-300))[..., None]
        products = weighted.swapaxes(1, 2) @ slopes
        scale = np.einsum("rii->ri", products) + 1e-9
        products += (damping[:, None] * scale)[..., None] * np.eye(theta.shape[1])
        step = np.linalg.solve(products, (weighted * residuals[..., None]).sum(1)[..., None])[..., 0]
        tried = theta + np.clip(step, -1.0, 1.0)
        new_residuals, new_slopes = _model(tried, x, y, logs)
        new_errors = _huber(new_residuals, reach)
        better = new_errors < errors
        theta, errors = np.where(better[:, None], tried, theta), np.where(better, new_errors, errors)
        residuals = np.where(better[:, None], new_residuals, residuals)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        damping = np.clip(damping * np.where(better, 0.3, 4.0), 1e-9, 1e6)
    return theta, errors


def _model(theta: np.ndarray, x: np.ndarray, y: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L minus the logarithm of the law [R, runs], and the slopes of the latter [R, runs, 5]."""
    e, a, alpha, b, beta = theta.T[:, :, None]
    by_size, by_data = -np.exp(alpha) * x, -np.exp(beta) * y
    terms = np.stack(np.broadcast_arrays(e, a + by_size, b + by_data))
    total = np.logaddexp.reduce(terms)
    first, second, third = np.exp(terms - total)
    return logs - total, np.stack([first, second, second * by_size, third, third * by_data], -1)


def _huber(residuals: np.ndarray, reach: float) -> np.ndarray:
    sizes = np.abs(residuals)
    within = np.minimum(sizes, reach)
    return (within * (sizes - within / 2)).sum(1)
