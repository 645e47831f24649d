"""A benchmark of several parts within a time: what was measured is kept, whatever becomes of the rest."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import QUIET_LOAD, Disturbance, commit, describe, name_of

RESULTS = Path(__file__).parent / "results"

Found = Iterator[tuple[str, dict[str, Any]]]
"""Names of results and the results, each as soon as it is known."""


@dataclass(frozen=True)
class Part:
    """What measures a part, and its share of the time."""

    measure: Callable[[argparse.Namespace, Path, Clock], Found]
    share: float


class Clock:
    """Divides the time that is left between what is still to be measured.

    Args:
        shares: part -> its share of the time.
        rounds: exactly so many, whatever the time; by the time if None.
    """

    def __init__(self, seconds: float, shares: Mapping[str, float], rounds: int | None = None) -> None:
        self.began, self.seconds = time.perf_counter(), seconds
        self.rounds = rounds
        self._shares, self._part_ends = dict(shares), self.began

    def begin(self, part: str) -> None:
        """Give a part its share of the time that is left."""
        left = max(0.0, self.began + self.seconds - time.perf_counter())
        whole = sum(self._shares.values())
        self._part_ends = time.perf_counter() + left * self._shares.pop(part) / whole

    def until(self, share: float = 1.0) -> float:
        """Return when (of `time.perf_counter`) this share of what is left of the part's time will be over."""
        now = time.perf_counter()
        return now + max(0.0, self._part_ends - now) * share

    def turns(self, most: int = 15, least: int = 2) -> tuple[int, int]:
        """Return the least and the greatest number of rounds."""
        return (self.rounds, self.rounds) if self.rounds else (least, most)

    def __str__(self) -> str:
        """Give the time since the start and what is left, as `3:20, 11:40 left`."""
        passed = time.perf_counter() - self.began
        shown = (f"{int(s) // 60}:{int(s) % 60:02}" for s in (passed, max(0.0, self.seconds - passed)))
        return f"{', '.join(shown)} left"


def read_results(kind: str) -> dict[str, Any]:
    """Return the contents of results/KIND-NAME.json by NAME, the name of a machine."""
    return {
        file.stem.removeprefix(f"{kind}-"): json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(RESULTS.glob(f"{kind}-*.json"))
    }


def parse_options(
    parser: argparse.ArgumentParser, parts: Mapping[str, Part], minutes: float, *, name_by_machine: bool = True
) -> argparse.Namespace:
    """Add the options that all benchmarks of several parts have, and parse the command line.

    Args:
        name_by_machine: Whether results are named after the processor by default; the caller names them if not.
    """
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)} (default: all)")
    limit = "for all parts; those chosen get their share of it (default: %(default)g)"
    parser.add_argument("--minutes", type=float, default=minutes, help=limit)
    parser.add_argument("--rounds", type=int, help="exactly so many, however long they take")
    parser.add_argument("--name", help="name of the machine on the page and of the result file")
    parser.add_argument("--folder", type=Path, help="where texts and checkpoints lie; a temporary one by default")
    parser.add_argument("--pages", action="store_true", help="measure nothing, write the pages from the results")
    options = parser.parse_args()
    options.name = options.name or (name_of(describe()) if name_by_machine else None)
    if unknown := set(options.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    return options


def measure_chosen(
    kind: str,
    parts: Mapping[str, Part],
    options: argparse.Namespace,
    summary: Callable[[str, Mapping[str, Any]], str],
    about: Mapping[str, Any] | None = None,
) -> list[str]:
    """Measure the chosen parts, and write each result to results/KIND-NAME.json as soon as it is known.

    Arguments and result as of `measure`; `options` are those of `parse_options`, with another folder in `results` if
    the results are not for the repository. `about` is what else is to be known of the machine.
    """
    path = getattr(options, "results", RESULTS) / f"{kind}-{options.name}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"found": {}}
    record["machine"] = {**describe(), **(about or {})}

    def keep(name: str, result: dict[str, Any]) -> None:
        record["found"][name] = result
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    chosen = {name: part for name, part in parts.items() if name in (options.parts or parts)}
    options.minutes *= sum(part.share for part in chosen.values()) / sum(part.share for part in parts.values())
    return measure(chosen, options, keep, summary)


def measure(
    parts: Mapping[str, Part],
    options: argparse.Namespace,
    keep: Callable[[str, dict[str, Any]], None],
    summary: Callable[[str, Mapping[str, Any]], str],
) -> list[str]:
    """Measure the parts one after the other.

    Args:
        options: with `minutes` for these parts, `rounds` and `folder`.
        keep: receives each result with what disturbed it, the date and the commit.
        summary: gives the line of a result for the screen.

    Returns:
        what failed: parts, and contenders that did not start.
    """
    clock = Clock(60 * options.minutes, {name: part.share for name, part in parts.items()}, options.rounds)
    load, failed = os.getloadavg()[0], list[str]()
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
    about = describe()
    print(f"{about['processor']} ({', '.join(about['features'])}), {about['cores']} cores, load average {load:.2f}")
    if load > QUIET_LOAD:
        print(f"The load average is above {QUIET_LOAD}: the results will be marked.")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start finds the byte code of the first
    for name, part in parts.items():
        print(f"[{clock}] {name}", flush=True)
        clock.begin(name)
        disturbance = Disturbance(load)
        try:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                for what, result in part.measure(options, Path(folder), clock):
                    keep(what, rounded({**result, **disturbance.record(), **stamp}))
                    print(f"[{clock}] {summary(what, result)}", flush=True)
                    for kind, reason in result.get("left_out", {}).items():
                        failed.append(f"{what}: {kind}")
                        print(f"{what}: {kind} did not run:\n{reason}", flush=True)
                    disturbance = Disturbance(load)
        except Exception as error:  # whatever it is, the other parts go on, and the caller hears of it
            failed.append(name)
            print(f"[{clock}] {name} failed: {type(error).__name__}: {error}", flush=True)
    return failed


def rounded(values: Any) -> Any:
    """Return the same with four digits behind the point."""
    if isinstance(values, Mapping):
        return {name: rounded(value) for name, value in values.items()}
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return round(values, 4) if isinstance(values, float) else values
