"""What the runs of a ladder say: the best learning rate, the law of the loss, predictions and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.report.comparison import Measure, read_run
from megalith.report.history import find_run, read_history
from megalith.report.scaling_law import CONSTANTS, LEVEL, Fit, Interval, fit
from megalith.report.verdict import Table

NEXT = 4  # times the largest fitted size: what is predicted without a check


@dataclass(frozen=True)
class Result:
    """A run of the ladder.

    Attributes:
        purpose: sweep, fit or check.
        tokens: D, of the whole run.
        loss: the final validation loss; infinite for a run that diverged, NaN for one that is not finished.
        FLOPs, seconds: what its steps have cost; NaN where unknown.
    """

    name: str
    purpose: str
    size: str
    parameters: int
    tokens: int
    lr: float
    loss: float = math.nan
    FLOPs: float = math.nan
    seconds: float = math.nan

    @property
    def finished(self) -> bool:
        """Return whether the run has come to its end."""
        return not math.isnan(self.loss)

    def measured(self, folder: Path) -> Result:
        """Return the result with what the run folder says; unchanged where the run has not begun."""
        try:
            run = read_run(folder, self.name)
        except DataError:
            return self
        spent = {axis: float(run.spent[axis][1][-1]) for axis in ("FLOPs", "time") if axis in run.spent}
        loss = math.nan
        if not run.unfinished and len(run.validation[0]):
            loss = Measure().of(run)
            loss = loss if math.isfinite(loss) else math.inf
        return replace(self, loss=loss, FLOPs=spent.get("FLOPs", math.nan), seconds=spent.get("time", math.nan))


def has_diverged(folder: Path) -> bool:
    """Return whether the NaN guard stopped a run at a non-finite step.

    A step that was finite when it was recomputed does not count: the hardware failed, and the loss did not diverge.
    """
    try:
        events = read_history(find_run(folder)).events
    except DataError:
        return False
    last = next((event for event in reversed(events) if event.kind != "save"), None)  # an earlier save may end after it
    if last is None or last.kind != "bad step":
        return False
    return last.record.get("action") == "stop" and last.record.get("again") != "finite"


def interrupted(folder: Path) -> bool:
    """Return whether the last start of a run ended before its last iteration, as by `--exit-duration-in-mins`."""
    try:
        events = read_history(find_run(folder)).events
    except DataError:
        return False
    last = next((event for event in reversed(events) if event.kind in ("start", "resume", "exit")), None)
    return last is not None and last.kind == "exit" and last.record.get("kind") != "finished"


def shortfall(folder: Path) -> str:
    """Return what a run lacks that has no final validation loss."""
    try:
        return read_run(folder, folder.name).unfinished or f"{folder.name} has no validation loss"
    except DataError as error:
        return str(error)


@dataclass(frozen=True)
class Prediction:
    """The loss of a size that was not fitted, with its interval, and the measured loss (NaN without a run)."""

    size: str
    parameters: int
    tokens: int
    loss: Interval
    measured: float = math.nan

    @property
    def relative_error(self) -> float:
        """Return the prediction over the measured loss, minus 1; NaN without a finite one."""
        return self.loss.value / self.measured - 1 if math.isfinite(self.measured) else math.nan


@dataclass(frozen=True)
class Ladder:
    """The runs of a ladder, finished or not, in the order in which they are trained."""

    results: Sequence[Result]
    ratios: Sequence[float]  # tokens per parameter of the fitted runs

    def of(self, purpose: str) -> list[Result]:
        """Return the results of a purpose."""
        return [result for result in self.results if result.purpose == purpose]

    def best(self, size: str) -> Result | None:
        """Return the run of the lowest loss in the sweep of a size; None until all are finished, or if all diverged."""
        runs = [result for result in self.of("sweep") if result.size == size]
        best = min(runs, key=lambda result: result.loss, default=None)
        done = best is not None and all(run.finished for run in runs) and best.loss < math.inf
        return best if done else None

    def fit(self) -> Fit | None:
        """Return the fitted law; None until all its runs and the sweep are finished, or if one of its runs diverged."""
        runs = self.of("fit")
        ready = all(run.finished for run in self.of("sweep"))
        if not ready or not runs or not all(math.isfinite(run.loss) for run in runs):
            return None
        return _fit(tuple((run.parameters, run.tokens, run.loss) for run in runs))

    def predictions(self, law: Fit) -> list[Prediction]:
        """Return those of the runs that check the law; without any, of a model NEXT times the largest fitted one."""
        checks = [
            Prediction(run.size, run.parameters, run.tokens, law.predict(run.parameters, run.tokens), run.loss)
            for run in self.of("check")
        ]
        n = NEXT * max(run.parameters for run in self.of("fit"))
        ahead = [(n, round(ratio * n)) for ratio in self.ratios]
        return checks or [Prediction(f"{NEXT} times", n, d, law.predict(n, d)) for n, d in ahead]


@cache
def _fit(runs: tuple[tuple[int, int, float], ...]) -> Fit:
    return fit(*zip(*runs, strict=True))


def sentences(ladder: Ladder, law: Fit | None) -> list[str]:
    """Return what the ladder says, one sentence each."""
    said = []
    for size in dict.fromkeys(run.size for run in ladder.of("sweep")):
        if best := ladder.best(size):
            rates = sorted(run.lr for run in ladder.of("sweep") if run.size == size)
            edge = best.lr in (rates[0], rates[-1]) and len(rates) > 1
            warned = ", the edge of --sweep-lr: give rates beyond it" if edge else ""
            said.append(f"{size}: the best learning rate is {best.lr:g}{warned}")
    for found in ladder.predictions(law) if law else []:
        interval = f"{found.loss.value:.4f} ({LEVEL:.0%}: {found.loss.low:.4f} to {found.loss.high:.4f})"
        text = (
            f"{found.size}, {amount(found.parameters)} parameters, {amount(found.tokens)} tokens: predicted {interval}"
        )
        if math.isfinite(found.measured):
            text += f", measured {found.measured:.4f}: the prediction is {found.relative_error:+.2%} off"
        elif math.isinf(found.measured):
            text += ", but the run has diverged"
        said.append(text)
    return said


def tables(ladder: Ladder, law: Fit | None) -> list[Table]:
    """Return the tables that have rows."""
    sweep, runs = ladder.of("sweep"), [run for run in ladder.results if run.purpose != "sweep"]
    rates = sorted({run.lr for run in sweep})
    losses = {(run.size, run.lr): run.loss for run in sweep}
    sizes = dict.fromkeys(run.size for run in sweep)
    found = [
        Table(
            "Validation loss by learning rate",
            ["", *(f"{rate:g}" for rate in rates)],
            [[size, *(_loss(losses[size, rate]) for rate in rates)] for size in sizes],
        ),
        Table(
            "Runs",
            ["", "parameters", "tokens", "of each", "lr", "loss", "by the law", "seconds"],
            [_row(run, law) for run in runs],
        ),
        Table(
            "L(N, D) = E + A / N^alpha + B / D^beta",
            ["", "value", f"{LEVEL:.0%} from", "to"],
            [[name, *_figures(law.constant(name))] for name in CONSTANTS] if law else [],
        ),
    ]
    return [table for table in found if table.rows]


def to_dict(ladder: Ladder, law: Fit | None) -> Mapping[str, Any]:
    """Return runs, law and predictions for JSON; null for what is unknown or infinite."""
    constants = {name: asdict(law.constant(name)) for name in CONSTANTS} if law else None
    predicted = (
        [{**asdict(found), "relative_error": found.relative_error} for found in ladder.predictions(law)] if law else []
    )
    return _finite(
        {"runs": [asdict(run) for run in ladder.results], "law": constants, "level": LEVEL, "predictions": predicted}
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(run: Result, law: Fit | None) -> list[str]:
    predicted = float(law.law.loss(run.parameters, run.tokens)) if law else math.nan
    each = f"{run.tokens / run.parameters:.3g}"
    cells = [run.size, amount(run.parameters), amount(run.tokens), each, f"{run.lr:g}"]
    return [*cells, _loss(run.loss), _loss(predicted), "-" if math.isnan(run.seconds) else f"{run.seconds:,.0f}"]


def _figures(interval: Interval) -> list[str]:
    return [f"{value:.4g}" for value in (interval.value, interval.low, interval.high)]


def _loss(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}" if math.isfinite(value) else "diverged"


def amount(value: float) -> str:
    """Return a number of parameters or tokens as text: 1.05M."""
    return next(
        (f"{value / unit:.3g}{name}" for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if value >= unit),
        f"{value:g}",
    )
