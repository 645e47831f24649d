"""The goals of the benchmarks, and the pages that show their results: docs/results/benchmarks.md and the READMEs.

A result is a row: the seconds of all contenders, round by round, and which of them is ours. Everything that is shown is
computed from these. A row may have figures of its own beside them (the memory of a rank), each a list of values.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from machine import is_disturbed

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
"""Name of a machine -> the content of its commands-NAME.json."""


@dataclass(frozen=True)
class Goal:
    """A bound of the rows whose name fits a pattern.

    Attributes:
        against: the peer over which a ratio is bounded from below, or the figure that is bounded from above.
    """

    rows: str
    against: str
    bound: float
    unit: str = ""

    def __str__(self) -> str:
        return f"<= {self.bound:g} {self.unit}" if self.unit else f">= {self.bound:.3g}"

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.unit else value >= self.bound


GOALS = (
    Goal("step 124M bf16", "compiled", 1.15),
    Goal("step 124M bf16", "huggingface", 1.15),
    Goal("step 124M fp32", "compiled", 1.2),
    Goal("step 124M fp32", "huggingface", 1.2),
    Goal("step 10M *", "compiled", 1.15),
    Goal("step *", "library", 1.0),
    Goal("decode 1 stream *", "engine", 0.97),
    Goal("decode 16 streams *", "engine", 0.95),
    Goal("decode 1 stream bf16", "llama.cpp", 1.0),
    Goal("preprocess *", "script", 1.0),
    Goal("start *", "import torch", 1 / 3),
    Goal("checkpoint load, 2 processes", "dcp", 1.2),
    Goal("ranks 16", "first step", 15, "s"),
    Goal("ranks 16", "largest rank", 250, "MiB"),
)
"""A ratio is the peer's time over ours: above 1 Megalith is faster."""

HEAD = """# Benchmarks of the commands

Written by `make bench` from `benchmarks/results/commands-*.json` (conditions: `benchmarks/commands.py`). A ratio is the
peer's time over Megalith's in the same round, median over the rounds (least to greatest): **above 1 Megalith is
faster**. Seconds are medians. *loaded*: the load average was above 0.5 at the start, or the host took processor time
meanwhile.
"""


def goal_of(row: str, against: str) -> Goal | None:
    """Return the first goal of a row against a peer, or for a figure."""
    return next((goal for goal in GOALS if goal.against == against and fnmatchcase(row, goal.rows)), None)


def ratios(row: Row, peer: str) -> list[float]:
    """Return how many times as long as ours the peer took, round by round."""
    return [theirs / ours for ours, theirs in zip(row["seconds"][row["ours"]], row["seconds"][peer], strict=True)]


def peers_of(row: Row) -> list[str]:
    return [name for name in row["seconds"] if name != row["ours"]]


def summary(name: str, row: Row) -> str:
    """Return a line for the screen."""
    medians = ", ".join(f"{kind} {statistics.median(values):.3f} s" for kind, values in row["seconds"].items())
    figures = (f"{kind} {_figure(figure)}" for kind, figure in row.get("figures", {}).items())
    found = (f"{peer} {_range(ratios(row, peer))}" for peer in peers_of(row))
    return f"{name}: {'; '.join([medians, *figures, 'ratios ' + ', '.join(found)])}"


def page(results: Results) -> str:
    """Return the page of all machines: a line for each pair and figure, a column for each machine."""
    lines = [
        HEAD,
        "| machine | processor | features | cores | versions | date | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        about, rows = result["machine"], result["found"].values()
        versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        lines.append(
            f"| {name} | {about['processor']} | {', '.join(about['features'])} | {about['cores']} | "
            f"Python {about['python']}, {versions} | {_distinct(rows, 'date')} | {_distinct(rows, 'commit')} |"
        )
    lines += ["", f"| what | against | goal | {' | '.join(results)} |", f"|---|---|---|{'---|' * len(results)}"]
    for name, against in _measures(results):
        goal = goal_of(name, against)
        cells = [_cell(result["found"].get(name), against, goal) for result in results.values()]
        lines.append(f"| {name} | {against} | {goal or ''} | {' | '.join(cells)} |")
    left_out = [
        f"- {machine}, {name}: {peer} did not run ({reason.splitlines()[-1].strip()})"
        for machine, result in results.items()
        for name, row in result["found"].items()
        for peer, reason in row.get("left_out", {}).items()
    ]
    return "\n".join([*lines, *([""] if left_out else []), *left_out]) + "\n"


def _measures(results: Results) -> Iterator[tuple[str, str]]:
    """Yield each row with each of its peers and figures once, in the order of the parts."""
    rows = dict.fromkeys(name for result in results.values() for name in result["found"])
    order = ("step", "decode", "preprocess", "start", "checkpoint", "ranks")
    for name in sorted(rows, key=lambda name: order.index(name.split()[0])):
        found = [result["found"][name] for result in results.values() if name in result["found"]]
        yield from dict.fromkeys((name, peer) for row in found for peer in [*peers_of(row), *row.get("figures", {})])


def _cell(row: Row | None, against: str, goal: Goal | None) -> str:
    if row is None or against not in {**row["seconds"], **row.get("figures", {})}:
        return ""
    verdict, loaded = "", " *loaded*" if is_disturbed(row) else ""
    if against in row.get("figures", {}):
        figure = row["figures"][against]
        if goal:
            verdict = " met" if goal.is_met(statistics.median(figure["values"])) else " **missed**"
        return f"**{_figure(figure)}**{verdict}{loaded}"
    values, digits = ratios(row, against), 2
    if goal:
        verdict = " met" if goal.is_met(statistics.median(values)) else " **missed**"
        if verdict != " met" and goal.is_met(round(statistics.median(values), 2)):
            digits = 3  # two would print a missed goal as the goal
    ours, theirs = (statistics.median(row["seconds"][name]) for name in (row["ours"], against))
    speeds = [
        f"; {row[key] / ours:.3g} and {row[key] / theirs:.3g} {unit}/s"
        for key, unit in (("tokens", "tokens"), ("mebibytes", "MiB"))
        if key in row
    ]
    return f"{_range(values, digits)}{verdict}: {ours:.3g} and {theirs:.3g} s{''.join(speeds)}{loaded}"


def _range(values: Sequence[float], digits: int = 2) -> str:
    return f"**{statistics.median(values):.{digits}f}** ({min(values):.2f} to {max(values):.2f})"


def _figure(figure: Mapping[str, Any]) -> str:
    return f"{statistics.median(figure['values']):.3g} {figure['unit']}"


def _distinct(rows: Iterator[Row] | Any, key: str) -> str:
    return ", ".join(sorted({str(row[key]) for row in rows if row.get(key)}))


_QUOTE = re.compile(r"(<!-- (?P<row>[^|:>]+): (?P<peer>[^|:>]+) -->)[^|]*\|")


def quote(text: str, results: Results) -> str:
    """Return a page with its quotes brought up to date.

    A quote is the cell of a table that begins with `<!-- ROW: PEER -->`: the ratio over the peer on each machine.
    """

    def write(match: re.Match[str]) -> str:
        found = []
        for machine, result in results.items():
            row = result["found"].get(match["row"])
            if row and match["peer"] in peers_of(row):
                loaded = ", loaded" if is_disturbed(row) else ""
                found.append(f"{statistics.median(ratios(row, match['peer'])):.2f} ({machine}{loaded})")
        return f"{match[1]} {', '.join(found) or '-'} |"

    return _QUOTE.sub(write, text)
