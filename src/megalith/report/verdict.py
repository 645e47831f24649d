"""What a comparison of experiments says, in sentences and tables, for the terminal and for the page.

The first experiment is the baseline. With several others, level and intervals are divided among them (Bonferroni): all
tests of a comparison together raise a false alarm in 5 % at most. Everything but the test describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean, stdev, variance

from megalith.config.changes import LENGTH
from megalith.report.comparison import AXES, Experiment, Measure
from megalith.report.seed_noise import LEVEL, MOST_SEEDS, POWER, seeds_needed, welch
from megalith.report.settings import differing, incomparable, measured_otherwise

_USUAL_SPREADS = (0.001, 0.003, 0.01)
_BUDGETS = (0.25, 0.5, 1.0)
_FEWEST_POINTS = 3  # of a curve to interpolate
_PLAIN_SECONDS = 100


@dataclass(frozen=True)
class Table:
    """A table of text; all columns but the first `texts` hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Verdict:
    """Whether an experiment differs from the baseline by more than seeds do; None where no test can say."""

    text: str
    differs: bool | None = None


def sentences(experiments: Sequence[Experiment], measure: Measure) -> list[str]:
    """Return the verdict on each experiment against the first, and what else to know."""
    base, *others = experiments
    said = [f"{other.name} against {base.name}: {judge(base, other, measure, len(others)).text}" for other in others]
    if not others:
        said.append(f"{base.name}: all runs have one configuration; --baseline RUN ... sets some against the others")
    for other in others:
        times = other.total("tokens") / base.total("tokens")
        if abs(times - 1) > 0.01:
            said.append(f"{other.name} trained on {times:.2f} times the tokens of {base.name}")
        if measure.validation and (flags := measured_otherwise(base.settings, other.settings)):
            said.append(f"{other.name} and {base.name} were evaluated on other samples or lengths ({flags})")
    for run in (run for experiment in experiments for run in experiment.runs):
        if text := run.changed.get(LENGTH):
            said.append(f"a resume of {run.name} changed {text}, by which its schedule may differ")
        if run.lost:
            said.append(f"the metrics of {run.name} lack {run.lost:,} steps; each counts as the next one they have")
        if (first := run.spent["steps"][0][0]) > 1:
            said.append(f"the metrics of {run.name} begin at iteration {first:,.0f}: its time counts from there")
    if not measure.validation:
        said.append("not all runs have validation losses (--eval-iters): training losses are compared")
    return said


def judge(base: Experiment, other: Experiment, measure: Measure, tests: int = 1) -> Verdict:
    """Test an experiment against the baseline, as one of `tests` tests."""
    reason = incomparable(base.settings, other.settings, validation=measure.validation)
    if reason := reason or base.fault(measure) or other.fault(measure):
        return Verdict(f"no verdict: {reason}")
    sides, level = (base.losses(measure), other.losses(measure)), LEVEL / tests
    value, known = mean(sides[1]) - mean(sides[0]), [variance(side) for side in sides if len(side) > 1]
    if len(known) < len(sides):
        squares = known or [(part * mean(sides[0])) ** 2 for part in _USUAL_SPREADS]
        needed = ", ".join(
            f"{_count(seeds_needed(value, (square, square), level))} if seeds spread by {square**0.5:.4f}"
            for square in squares
        )
        return Verdict(
            f"{value:+.4f} {measure}. No verdict: with one seed on a side its noise is unknown. "
            f"Seeds a side that tell such a difference (power {POWER:.0%}): {needed}"
        )
    found = welch(*sides, level)
    p = min(1.0, found.p * tests)
    figures = (
        f"{value:+.4f} {measure} ({found.low:+.4f} to {found.high:+.4f}, p {f'= {p:.2g}' if p > 1e-4 else '< 0.0001'})"
    )
    if p < LEVEL:
        return Verdict(f"{figures}: {'lower' if value < 0 else 'higher'} by more than seed noise", differs=True)
    needed_seeds = seeds_needed(value, (known[0], known[1]), level)
    missing = [max(0, (needed_seeds or 0) - len(side)) for side in sides]
    more = ""
    if needed_seeds:
        more = f": {missing[0]} more of {base.name}, {missing[1]} of {other.name}, then one more test"
    return Verdict(
        f"{figures}: not told apart from seed noise. If difference and spreads are as measured, {_count(needed_seeds)} "
        f"seeds a side tell it (power {POWER:.0%}){more}",
        differs=False,
    )


def _count(seeds: int | None) -> str:
    return str(seeds) if seeds else f"more than {MOST_SEEDS}"


def tables(experiments: Sequence[Experiment], measure: Measure) -> list[Table]:
    """Return the tables that have rows."""
    names = [experiment.name for experiment in experiments]
    settings = differing([experiment.settings for experiment in experiments])
    runs = [(run, experiment.name) for experiment in experiments for run in experiment.runs]
    found = [
        Table("Losses", ["", "seeds", str(measure), "training", *AXES[1:]], [_losses(e, measure) for e in experiments]),
        Table(
            "Spent until the final loss of the other, and how many times less",
            ["", "loss", *AXES],
            _reached(experiments, measure),
        ),
        Table(
            f"{'Validation' if measure.validation else 'Training'} loss at equal",
            ["", *names],
            _equal(experiments, measure),
        ),
        Table("Configuration", ["", *names], [(flag, *values) for flag, values in settings.items()], len(names) + 1),
        Table(
            "Runs",
            ["", "of", "seed", str(measure), "iterations"],
            [(r.name, of, str(r.settings["seed"]), _loss(measure.of(r)), f"{r.iteration:,}") for r, of in runs],
            2,
        ),
    ]
    return [table for table in found if table.rows]


def _losses(experiment: Experiment, measure: Measure) -> list[str]:
    losses = experiment.losses(measure)
    deviation = f" ± {stdev(losses):.4f}" if len(losses) > 1 and all(map(math.isfinite, losses)) else ""
    training = _loss(mean(experiment.losses(Measure(validation=False))))
    spent = [_amount(axis, experiment.total(axis)) for axis in AXES[1:]]
    return [experiment.name, str(len(losses)), f"{_loss(mean(losses))}{deviation}", training, *spent]


def _reached(experiments: Sequence[Experiment], measure: Measure) -> list[list[str]]:
    """Return what the better of each pair spent until the loss at which the other ended, and how many times less."""
    base, rows = experiments[0], []
    for other in experiments[1:]:
        final = {each.name: each.curve("steps", measure)[1] for each in (base, other)}
        reason = incomparable(base.settings, other.settings, validation=measure.validation)
        if reason or min(map(len, final.values())) < _FEWEST_POINTS:
            continue
        better, worse = sorted((other, base), key=lambda each: float(final[each.name][-1]))
        loss = float(final[worse.name][-1])
        spent = {axis: better.spent_until(axis, loss, measure) for axis in AXES}
        bound = "≤ " if final[better.name][0] <= loss else ""  # it was below at the first evaluation
        cells = [
            "-" if math.isnan(value) else f"{bound}{_amount(axis, value)} ({worse.total(axis) / value:.2f}x)"
            for axis, value in spent.items()
        ]
        rows.append([f"{better.name} ({worse.name})", _loss(loss), *cells])
    return rows


def _equal(experiments: Sequence[Experiment], measure: Measure) -> list[list[str]]:
    budgets = [(axis, part * min(each.total(axis) for each in experiments)) for axis in AXES for part in _BUDGETS]
    return [
        [
            _amount(axis, spent) + ("" if axis == "time" else f" {axis}"),
            *(_loss(each.loss_at(axis, spent, measure)) for each in experiments),
        ]
        for axis, spent in budgets
        if not math.isnan(spent)
    ]


def _loss(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _amount(axis: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if axis == "time":
        return str(timedelta(seconds=round(value))) if value >= _PLAIN_SECONDS else f"{value:.3g} s"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"
