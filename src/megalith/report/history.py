"""History of a run read from metrics.jsonl.

Lines are read one by one, so that a million steps need no more memory than their curves. Unreadable lines (torn, or
still being written) are skipped and counted. Steps repeated after a resume are kept apart as abandoned.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import DataError

TOKENS = "tokens of a step"
# Key of a step record -> name of the curve.
STEP_CURVES = {
    "loss": "training loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "params_norm": "norm of the parameters",
    "seconds": "seconds of a step",
    "num_tokens": TOKENS,
}
WINDOW_CURVES = {"tokens_per_second": "tokens per second", "teraflops": "TFLOP/s of a device"}
MEMORY = ("reserved_bytes", "resident_bytes", "max_resident_bytes")
_NUMBERS = (*STEP_CURVES, *WINDOW_CURVES, *MEMORY, "time")
_SHOWN_EVENTS = ("start", "resume", "save", "exit", "evaluation", "bad step", "batch size", "rehearsal", "plan")


@dataclass
class Curve:
    """Points of one quantity in segments, which rewinds and NaN values separate."""

    segments: list[list[tuple[float, float]]] = field(default_factory=lambda: [[]])  # of (iteration, value)
    not_finite: list[float] = field(default_factory=list)  # iterations
    abandoned: list[list[tuple[float, float]]] = field(default_factory=list)  # segments that a resume repeated

    def add(self, iteration: float, value: float | None) -> None:
        """Append a point; a value that is None or not finite ends the segment."""
        if value is None or not math.isfinite(value):
            self.not_finite.append(iteration)
            self.interrupt()
        else:
            self.segments[-1].append((iteration, value))

    def interrupt(self) -> None:
        """End the current segment."""
        if self.segments[-1]:
            self.segments.append([])

    def rewind(self, iteration: float) -> None:
        """Move the points after `iteration` to `abandoned`: a resumed run repeats these steps."""
        kept: list[list[tuple[float, float]]] = []
        for segment in self.segments:
            before = [point for point in segment if point[0] <= iteration]
            again = [point for point in segment if point[0] > iteration]
            kept += [before] if before else []
            self.abandoned += [again] if again else []
        self.segments = [*kept, []]
        self.not_finite = [place for place in self.not_finite if place <= iteration]

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return the points of all segments."""
        return [point for segment in self.segments for point in segment]


@dataclass(frozen=True)
class Event:
    """Event of a run, such as a save or a skipped step."""

    kind: str  # start, resume, save, exit, evaluation, bad step, batch size, skipped, not a number
    iteration: int
    time: float  # seconds since 1970
    record: Mapping[str, Any]


@dataclass
class History:
    """Curves and events of a run."""

    curves: dict[str, Curve] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)  # in order; one for consecutive skipped steps or NaN losses
    num_steps: int = 0  # steps taken, including repeated ones
    num_skipped: int = 0
    num_nan: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0  # of the state at the last record
    answers: Mapping[str, Any] = field(default_factory=dict)  # the last to prompts
    unreadable: int = 0
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by group; may be empty
    _row: tuple[str, int] = ("", -2)

    def take(self, record: Mapping[str, Any]) -> None:
        """Add one record of metrics.jsonl."""
        kind = str(record.get("event"))
        iteration = int(record.get("iteration", self.last.get("iteration")) or 0)
        if kind in ("step", "evaluation", "save"):
            self.iteration = max(self.iteration, iteration)  # a save in the background ends after later steps
        elif kind in ("start", "resume"):
            self.iteration = iteration
        if kind == "step":
            self._step(record, iteration)
        elif kind == "throughput":
            for key, name in WINDOW_CURVES.items():
                self._add(name, iteration, record.get(key))
            memory = next((record[key] for key in MEMORY if record.get(key) is not None), None)
            self._add("memory of the first rank (GB)", iteration, None if memory is None else memory / 1e9)
        elif kind in ("start", "resume"):
            for curve in self.curves.values():
                curve.rewind(iteration if kind == "resume" else -1)
        elif kind == "evaluation":
            self._add(f"{record.get('split', '')} loss", iteration, record.get("loss"))
        elif kind == "samples":
            self.answers = record
        if kind in _SHOWN_EVENTS:
            self.events.append(Event(kind, iteration, float(record.get("time") or 0.0), record))

    def _step(self, record: Mapping[str, Any], iteration: int) -> None:
        self.num_steps += 1
        self.last = record
        applied, loss = record.get("applied", True), record.get("loss")
        if not applied:
            self.num_skipped += 1
            self._add_first("skipped", iteration, record)
        elif loss is None:
            self.num_nan += 1
            self._add_first("not a number", iteration, record)
        for key, name in STEP_CURVES.items():
            value = record.get(key)
            if key in ("loss", "grad_norm") and not applied:
                continue
            if value is not None or key == "loss":
                self._add(name, iteration, value)

    def _add_first(self, kind: str, iteration: int, record: Mapping[str, Any]) -> None:
        """Add an event for the first of several consecutive steps."""
        if self._row != (kind, iteration - 1):
            self.events.append(Event(kind, iteration, float(record.get("time") or 0.0), record))
        self._row = kind, iteration

    def _add(self, name: str, iteration: int, value: float | None) -> None:
        if name not in self.curves:
            self.curves[name] = Curve()
        self.curves[name].add(iteration, value)


def find_run(path: Path) -> Path:
    """Return the folder with metrics.jsonl, of a save folder, a run folder or the file; DataError if absent."""
    for folder in (path, path / "run", path.parent if path.name == "metrics.jsonl" else path):
        if (folder / "metrics.jsonl").is_file():
            return folder
    raise DataError(f"{path}: there is no metrics.jsonl in it, nor in {path / 'run'}; give the folder of --save")


def run_name(folder: Path) -> str:
    """Return the name of a run folder: that of the save folder around it, if there is one."""
    return folder.resolve().parent.name if folder.name == "run" else folder.resolve().name


def read_history(folder: Path) -> History:
    """Read the history of a run folder; OSError if it has no metrics.jsonl."""
    history = History()
    with (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as lines:
        for record in _records(lines, history):
            history.take(record)
    try:
        history.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        history.config = {}
    return history


def _records(lines: Iterable[str], history: History) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also a number of too many digits
            history.unreadable += 1
            continue
        if isinstance(record, dict) and _has_numbers(record):
            yield record
        else:
            history.unreadable += 1


def _has_numbers(record: Mapping[str, Any]) -> bool:
    """Return whether the values of a record that curves are drawn of are numbers, and a step says its iteration."""
    kind = record.get("event")
    if not isinstance(record.get("iteration"), int if kind == "step" else int | None):
        return False
    shown = (record.get(name) or 0.0 for name in (("time", "seconds", "num_bytes") if kind == "save" else ("time",)))
    if not all(_is_number(value) and math.isfinite(value) for value in shown):
        return False
    drawn = kind in ("step", "throughput", "evaluation")
    return not drawn or all(record.get(name) is None or _is_number(record[name]) for name in _NUMBERS)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or isinstance(value, int) and abs(value) <= sys.float_info.max


def downsample(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return about `most` of the points: minimum and maximum of each bin, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    chosen: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        chosen += sorted({low, high})
    return chosen
