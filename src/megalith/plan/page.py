"""HTML page of a plan: memory by rank, where a step's time goes, the pipeline's picture, the layouts of a search."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from megalith.plan.devices import GIB
from megalith.plan.memory import CATEGORIES
from megalith.plan.plan import Plan
from megalith.report.comparison_page import table_html
from megalith.report.page import document, facts_html
from megalith.report.verdict import Table
from megalith.schedules.pipeline import make_schedule, round_of
from megalith.schedules.simulator import Costs, Simulation, simulate

_COLOURS = ("a", "b", "c", "d", "e", "f", "soft")  # variables of page.css
_KINDS = {"F": ("a", "forward"), "B": ("c", "backward"), "W": ("e", "weight gradients")}
_MOST_SPANS = 6000
_WIDTH, _ROW, _MARGIN = 960, 18, 96


def render_plan(plan: Plan) -> str:
    """Return the page as HTML."""
    run, time = plan.run, plan.time
    verdict = {True: "fits", False: "does not fit", None: "memory of the device not known"}[plan.fits]
    facts = [
        (f"{plan.fullest.peak_bytes / GIB:.1f} GiB", f"peak of the fullest rank: {verdict}"),
        (f"{time.step_seconds:.3g} s", "a step, predicted"),
        (f"{time.tokens_per_second:,.0f}", "tokens per second, predicted"),
        (f"{time.mfu:.1%}", "MFU, predicted"),
        (str(run.layout), "layout"),
        (str(run.train.micro_batch_size), f"micro-batch, {run.num_micro_batches} in a step"),
    ]
    parts = [
        facts_html(facts),
        *(f'<p class="soft">{html.escape(note)}</p>' for note in plan.notes),
        "<h2>Memory at the peak</h2>",
        _memory(plan),
        _tensors(plan),
        "<h2>Time of a step</h2>",
        _bars([("a step", time.parts)], tuple(time.parts), time.step_seconds, "{:.3g} s"),
        _pipeline(plan),
        _layouts(plan),
    ]
    return document(f"Plan for {run.launch.world_size} x {plan.device.name}", parts)


def _memory(plan: Plan) -> str:
    rows = []
    for rank in plan.ranks:
        first, last = rank.stages[0], rank.stages[-1]
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        rows.append((name, {kind: size / GIB for kind, size in rank.peak.items()}))
    room = plan.device.room / GIB if plan.device.gib else 0.0
    bars = _bars(rows, CATEGORIES, max(room, plan.fullest.peak_bytes / GIB), "{:.2f} GiB", mark=room)
    said = f"The line is the room that tensors have, {room:.1f} GiB. " if room else ""
    return f'{bars}<p class="soft">{said}The peak is in the {html.escape(plan.fullest.moment)}.</p>'


def _bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    names: Sequence[str],
    most: float,
    form: str,
    *,
    mark: float = 0.0,
) -> str:
    """Return a bar of coloured parts for each row, in the order of `names`, and the key of those that occur."""
    scale, shapes = (_WIDTH - _MARGIN - 8) / (most or 1.0), []
    used = [name for name in names if any(parts.get(name, 0.0) > 0 for _, parts in rows)]
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(used)}
    faint = {name: 1.0 - 0.55 * (place // len(_COLOURS)) for place, name in enumerate(used)}
    for place, (row, parts) in enumerate(rows):
        x, y = float(_MARGIN), place * (_ROW + 6)
        shapes.append(f'<text x="0" y="{y + 13}">{html.escape(row)}</text>')
        for name in used:
            width, value = parts.get(name, 0.0) * scale, html.escape(f"{name}: {form.format(parts.get(name, 0.0))}")
            fill = f'fill="var(--{colours[name]})" opacity="{faint[name]:.2f}"'
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" {fill}><title>{value}</title></rect>'
            )
            x += width
    height = len(rows) * (_ROW + 6)
    if mark:
        x = _MARGIN + mark * scale
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="var(--ink)" stroke-width="2"/>')
    key = "".join(
        f'<i style="border-color:var(--{colours[name]});opacity:{faint[name]:.2f}"></i>{html.escape(name)}'
        for name in used
    )
    return f'{_svg(height, shapes)}<p class="key soft">{key}</p>'


def _svg(height: int, shapes: Iterable[str]) -> str:
    return f'<div class="chart"><svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg></div>'


def _tensors(plan: Plan) -> str:
    rows = [[str(one.number), f"{one.size / 2**20:,.1f}", one.category, one.what] for one in plan.fullest.tensors]
    return table_html(Table("The largest tensors then", ("number", "MiB each", "kind", "what"), rows))


def _pipeline(plan: Plan) -> str:
    """Return the drawing of some micro-batches, to the predicted times of the slowest stage."""
    run, stages = plan.run, plan.run.layout.pp
    if stages == 1:
        return ""
    chunks = len(run.stages[0])
    whole, round_ = run.num_micro_batches, round_of(run.pipeline_schedule, stages)
    most = max(round_, _MOST_SPANS // (stages * chunks * 3) // round_ * round_)
    forward, backward, weight = max(plan.time.passes, key=lambda one: one[0] + one[1])
    weight = min(weight, backward)
    unit = forward or 1.0
    costs = Costs(*(Fraction(one / unit).limit_denominator(1000) for one in (forward, backward - weight, weight)))
    schedule = make_schedule(run.pipeline_schedule, stages, chunks, min(whole, most, 3 * round_))
    simulation = simulate(schedule, costs)
    shown, of_shown = schedule.micro_batches, ""
    if shown < whole:
        of_shown = f" of the {shown} micro-batches shown, less of all {whole}"
    return (
        f"<h2>Pipeline</h2>{_spans(simulation)}"
        f'<p class="soft">{html.escape(schedule.name)}, by simulation: every stage takes the predicted time of the '
        f"slowest, {forward + backward:.3g} s a micro-batch; idle {float(simulation.bubble):.1%}{of_shown}.</p>"
    )


def _spans(simulation: Simulation) -> str:
    scale, shapes = (_WIDTH - _MARGIN) / float(simulation.makespan), []
    for stage, spans in enumerate(simulation.spans):
        y = stage * _ROW
        shapes.append(f'<text x="0" y="{y + 12}">stage {stage}</text>')
        for op, start, end in spans:
            x, width = _MARGIN + float(start) * scale, float(end - start) * scale
            colour, opacity = _KINDS[op.kind][0], 1.0 - 0.5 * (op.chunk % 2)
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.3, width - 0.5):.1f}" height="{_ROW - 3}" '
                f'fill="var(--{colour})" opacity="{opacity}"><title>{op}</title></rect>'
            )
    kinds = {span.op.kind for spans in simulation.spans for span in spans}
    key = "".join(
        f'<i style="border-color:var(--{_KINDS[kind][0]})"></i>{_KINDS[kind][1]}' for kind in _KINDS if kind in kinds
    )
    return f'{_svg(len(simulation.spans) * _ROW, shapes)}<p class="key soft">{key}</p>'


def _layouts(plan: Plan) -> str:
    if plan.found is None:
        return ""
    rows = [
        [
            str(one.run.layout),
            f"{one.time.step_seconds:.3f}",
            f"{one.time.mfu:.1%}",
            f"{one.time.tokens_per_second:,.0f}",
            f"{one.peak_bytes / GIB:.1f}",
            shlex.join(one.flags()),
        ]
        for one in plan.found.best
    ]
    head = ("layout", "s a step", "MFU", "tokens/s", "GiB", "flags")
    best = Table(f"The fastest of {plan.found.layouts} layouts that fit", head, rows)
    others = Table("Beside the first", ("change", "verdict"), [list(reason) for reason in plan.found.reasons])
    first = f"<h2>Start the first</h2><p><code>{html.escape(plan.command(plan.found.best[0]))}</code></p>"
    return f'<div class="chart">{table_html(best)}</div>{first}{table_html(others)}'
