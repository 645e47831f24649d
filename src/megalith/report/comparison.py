"""Runs as experiments: what they spent, their losses, and what it takes to reach a loss.

Runs that differ in seed only are one experiment. A comparison tests one loss, declared in advance (`Measure`).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from megalith.config.changes import HARMLESS, LENGTH, REPLACED, ROUNDING
from megalith.errors import DataError
from megalith.report.history import TOKENS, History, find_run, read_history
from megalith.report.settings import Values, counts, identity, read_settings

AXES = ("steps", "tokens", "FLOPs", "time")
Points = tuple[np.ndarray, np.ndarray]
"""Values of x and y."""


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        iteration: the last one.
        training, validation: iterations and losses; of several sets the mean, NaN where not finite.
        spent: axis -> iterations and what was spent up to each. Steps that the metrics lack count as the next one that
            they have. FLOPs are the model's, absent where no throughput was measured. Time is that of steps in
            seconds, without evaluations and saves, from the first step that the metrics have.
        lost: number of steps that the metrics lack behind the first one.
        unfinished: what is missing, "" for a run that was evaluated at its last iteration or stopped early.
        changed: effect -> what resumes changed on the way, of settings that are not harmless.
    """

    name: str
    settings: Values
    iteration: int
    training: Points
    validation: Points
    spent: Mapping[str, Points]
    unfinished: str
    changed: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0

    def curve(self, axis: str, *, validation: bool) -> Points:
        """Return what was spent and the loss; of training the mean over the last fiftieth of the steps."""
        x, y = self.validation if validation else self.training
        size = 1 if validation else max(1, len(x) // 50)
        return np.interp(x[size - 1 :], *self.spent[axis]), np.convolve(y, np.full(size, 1 / size), "valid")


def read_run(path: Path, name: str) -> Run:
    """Read a run from its save folder or run folder; DataError if it has no step or no configuration."""
    folder = find_run(path)
    history = read_history(folder)
    steps, tokens = _points(history, TOKENS)
    training = _losses(history)
    if not len(steps) or not np.isfinite(training[1]).any():
        raise DataError(f"{folder / 'metrics.jsonl'} has no step with a finite loss; give a run that has trained")
    settings = read_settings(folder)
    skipped = settings.get("iterations_to_skip") or ()
    used, lost = _sums(steps, tokens, 0, skipped)
    at, seconds = _points(history, "seconds of a step")
    spent = {"steps": (steps, steps), "tokens": (steps, used)}
    spent["time"] = at, _sums(at, seconds, at[0] - 1 if len(at) else 0, skipped)[0]
    rates = [_points(history, name)[1] for name in ("TFLOP/s of a device", "tokens per second")]
    if all(len(rate) for rate in rates):
        spent["FLOPs"] = steps, used * rates[0][-1] * 1e12 / rates[1][-1] * int(settings.get("world_size") or 1)
    iteration, planned = history.iteration, int(settings.get("train_iters") or 0)
    ends = [event.record.get("kind") for event in history.events if event.kind == "exit"]
    finished = iteration >= planned or ends[-1:] == ["early stopping"]
    unfinished = "" if finished else f"{name} has done {iteration:,} of {planned:,} iterations"
    validation = _evaluations(history, settings)
    if finished and len(validation[0]) and validation[0][-1] != iteration:
        unfinished = f"{name} was last evaluated at {int(validation[0][-1]):,} of {iteration:,} iterations"
    return Run(name, settings, iteration, training, validation, spent, unfinished, _changes(history), lost)


def _losses(history: History) -> Points:
    """Return the training losses, NaN where they are not finite."""
    curve = history.curves.get("training loss")
    points = [] if curve is None else [*curve.points, *((place, math.nan) for place in curve.not_finite)]
    x, y = np.array(sorted(points), dtype=float).reshape(-1, 2).T
    return x, y


def _sums(at: np.ndarray, values: np.ndarray, begin: float, skipped: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return sums up to each iteration and the number of absent ones behind the first, each counted as the next.

    `skipped` are iterations that took no step.
    """
    steps = np.diff(at, prepend=begin)
    for place in skipped:
        if len(at) and begin < place <= at[-1] and place not in at:
            steps[np.searchsorted(at, place)] -= 1
    return np.cumsum(values * steps), round(float((steps[1:] - 1).sum()))


def _changes(history: History) -> dict[str, str]:
    """Return effect -> what the resumes changed whose steps were not taken again."""
    found: list[tuple[int, Mapping[str, str]]] = []
    for event in history.events:
        if event.kind in ("start", "resume"):
            kept = event.iteration if event.kind == "resume" else -1
            found = [(iteration, change) for iteration, change in found if iteration < kept]
            found += [(event.iteration, change) for change in event.record.get("changes") or ()]
    texts: dict[str, list[str]] = {}
    for iteration, change in found:
        if change["effect"] not in (HARMLESS, REPLACED, ROUNDING):
            text = f"{change['flag']} from {change['was']} to {change['now']} at iteration {iteration:,}"
            texts.setdefault(change["effect"], []).append(text)
    return {effect: ", ".join(own) for effect, own in texts.items()}


def _points(history: History, name: str) -> Points:
    curve = history.curves.get(name)
    x, y = np.array(curve.points if curve else [], dtype=float).reshape(-1, 2).T
    return x, y


def _evaluations(history: History, settings: Values) -> Points:
    """Return the validation losses, of all sets, that no resume repeated, also those that are not finite."""
    found: dict[int, dict[str, float]] = {}
    for event in history.events:
        if event.kind in ("start", "resume"):
            kept = event.iteration if event.kind == "resume" else -1
            found = {iteration: losses for iteration, losses in found.items() if iteration <= kept}
        elif event.kind == "evaluation" and str(event.record.get("split")).startswith("validation"):
            loss = event.record.get("loss")
            found.setdefault(event.iteration, {})[event.record["split"]] = math.nan if loss is None else float(loss)
    sets = max(map(len, found.values()), default=1)
    if settings.get("multiple_validation_sets"):
        sets = len(settings.get("valid_data_path") or ()) or sets
    points = sorted((iteration, mean(losses.values())) for iteration, losses in found.items() if len(losses) == sets)
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


@dataclass(frozen=True)
class Measure:
    """The loss that is tested: on validation data, else of training; the last one, else the lowest."""

    validation: bool = True
    lowest: bool = False

    def __str__(self) -> str:
        return f"{'lowest' if self.lowest else 'final'} {'validation' if self.validation else 'training'} loss"

    def of(self, run: Run) -> float:
        """Return the loss of a run; of training the mean over the last tenth, NaN if all its steps were skipped."""
        x, losses = run.validation if self.validation else run.training
        if not self.validation:
            last = losses[x > run.iteration - max(1, run.iteration // 10)]
            return float(last.mean()) if len(last) else math.nan
        return float(losses.min() if self.lowest else losses[-1])


@dataclass(frozen=True)
class Experiment:
    """Runs of one configuration."""

    name: str
    runs: tuple[Run, ...]

    @property
    def settings(self) -> Values:
        """Return the settings of the first run."""
        return self.runs[0].settings

    def losses(self, measure: Measure) -> list[float]:
        """Return the loss of each run."""
        return [measure.of(run) for run in self.runs]

    def total(self, axis: str) -> float:
        """Return what a run spent, the mean over the runs; NaN if it is not known of all."""
        ends = [run.spent[axis][1][-1] if axis in run.spent else math.nan for run in self.runs]
        return float(np.mean(ends))

    def curve(self, axis: str, measure: Measure) -> Points:
        """Return what was spent and the loss, means over the runs of the points that all have; empty if not known."""
        if math.isnan(self.total(axis)):
            return np.empty(0), np.empty(0)
        by_step = [run.curve("steps", validation=measure.validation) for run in self.runs]
        shared = np.array(sorted(set.intersection(*({*x[np.isfinite(y)]} for x, y in by_step))))
        losses = np.mean([y[np.isin(x, shared)] for x, y in by_step], axis=0)
        return np.mean([np.interp(shared, *run.spent[axis]) for run in self.runs], axis=0), losses

    def loss_at(self, axis: str, spent: float, measure: Measure) -> float:
        """Return the loss after `spent`, interpolated; NaN outside of the curve."""
        x, y = self.curve(axis, measure)
        inside = len(x) and x[0] * (1 - 1e-9) <= spent <= x[-1] * (1 + 1e-9)  # sums of one amount differ by rounding
        return float(np.interp(spent, x, y)) if inside else math.nan

    def spent_until(self, axis: str, loss: float, measure: Measure) -> float:
        """Return what is spent where the loss first is at most `loss`, interpolated; NaN if it never is."""
        x, y = self.curve(axis, measure)
        reached = len(x) and y.min() <= loss
        return float(np.interp(loss, np.minimum.accumulate(y)[::-1], x[::-1])) if reached else math.nan

    def fault(self, measure: Measure) -> str:
        """Return why its losses are no independent sample of finished runs, "" if they are."""
        if unfinished := [run.unfinished for run in self.runs if run.unfinished]:
            return f"{unfinished[0]}: finish it with the command that started it, or leave it out"
        for run in self.runs:
            if changes := [text for effect, text in run.changed.items() if effect != LENGTH]:
                return f"a resume of {run.name} changed {', '.join(changes)}; its loss is of no one configuration"
        if diverged := [run.name for run in self.runs if not math.isfinite(measure.of(run))]:
            return f"the {measure} of {diverged[0]} is not finite; a run that diverged has no place in a mean"
        seed, uses = Counter(run.settings["seed"] for run in self.runs).most_common(1)[0]
        if uses > 1:
            return f"{uses} runs of {self.name} have --seed {seed} and are not independent; give each its own"
        losses = self.losses(measure)
        if len(losses) > 1 and stdev(losses) == 0:
            return f"the runs of {self.name} have equal losses; their seeds have no effect"
        return ""


def group_runs(runs: Sequence[Run]) -> list[Experiment]:
    """Group runs into experiments, in the order of their first runs."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        key = tuple(
            sorted((name, identity(value)) for name, value in run.settings.items() if counts(name, run.settings))
        )
        groups.setdefault(key, []).append(run)
    return [Experiment(_group_name([run.name for run in group]), tuple(group)) for group in groups.values()]


def _group_name(names: Sequence[str]) -> str:
    """Return what the names have in common, without the beginning of a seed: base of base-s10 and base-s11."""
    common = os.path.commonprefix(list(names))
    if len(names) > 1:
        if any(name[len(common) :][:1].isdigit() for name in names):
            common = common.rstrip("0123456789")
        common = re.sub(r"([-_.](seed|s))?[-_.]*$", "", common)
    return common or names[0]
