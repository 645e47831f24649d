"""HTML page of a comparison: what it says, curves as inline SVG, and its tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from megalith.report.comparison import AXES, Experiment, Measure, Run
from megalith.report.history import Curve
from megalith.report.page import chart, document
from megalith.report.verdict import Table

_COLOURS = "abcdef"  # variables of page.css, and its classes g0 to g5
_MOST_POINTS = 300


def render_comparison(
    experiments: Sequence[Experiment], measure: Measure, said: Iterable[str], tables: Iterable[Table]
) -> str:
    """Return the page as HTML; the runs of an experiment have one colour."""
    names = [html.escape(experiment.name) for experiment in experiments]
    key = "".join(
        f'<i style="border-color:var(--{_COLOURS[number % len(_COLOURS)]})"></i>{name}'
        for number, name in enumerate(names)
    )
    kinds = (True, False) if measure.validation else (False,)
    charts = (_chart(experiments, axis, validation=kind) for kind in kinds for axis in AXES)
    text = (f"<p>{html.escape(sentence)}</p>" for sentence in said)
    title = " and ".join(experiment.name for experiment in experiments)
    return document(title, [*text, f'<p class="key soft">{key}</p>', *charts, *map(table_html, tables)])


def _chart(experiments: Sequence[Experiment], axis: str, *, validation: bool) -> str:
    curves = {
        f"g{number % len(_COLOURS)} n{number}-{place}": _curve(run, axis, validation=validation)
        for number, experiment in enumerate(experiments)
        for place, run in enumerate(experiment.runs)
        if axis in run.spent
    }
    kind = "Validation" if validation else "Training"
    return f"<h2>{kind} loss by {'seconds' if axis == 'time' else axis}</h2>{chart(curves, log=True)}" if curves else ""


def _curve(run: Run, axis: str, *, validation: bool) -> Curve:
    """Return few points of a curve; the first tenth of the training loss, whose fall hides the rest, is left out."""
    x, y = run.curve(axis, validation=validation)
    shown, curve = slice(0 if validation else len(x) // 10, None, -(-len(x) // _MOST_POINTS) or 1), Curve()
    for spent, loss in zip(x[shown], y[shown], strict=True):
        curve.add(float(spent), float(loss))
    return curve


def table_html(table: Table) -> str:
    """Return a table with its title as HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = ("".join(f'<td class="n">{html.escape(cell)}</td>' for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{body}</table>"
