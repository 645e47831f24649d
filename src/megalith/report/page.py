"""HTML page of a run: facts, curves as inline SVG, events, changes and configuration.

The page is self-contained: it loads nothing and runs no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from megalith.config.run import all_settings
from megalith.report.history import TOKENS, Curve, Event, History, downsample

_MOST_MARKS = 60  # more would cover the curve
_MOST_EVENTS = 400
_CLASSES = {"training loss": "train", "validation loss": "valid", "test loss": "test"}

WIDTH, HEIGHT = 960, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 10, 26
_MOST_POINTS = 1600
_MEAN_FROM, _MEANS = 400, 150
Points = Sequence[tuple[float, float]]


def render_page(history: History, name: str) -> str:
    """Return the page as HTML; `name` is its title."""
    losses = {kind: history.curves[key] for key, kind in _CLASSES.items() if key in history.curves}
    left_out = (*_CLASSES, TOKENS)
    others = {key: curve for key, curve in history.curves.items() if key not in left_out and curve.points}
    marks = _marks(history.events)
    parts = [
        _facts(history),
        "<h2>Loss</h2>",
        chart(losses, marks),
        _legend(losses, history),
        *(
            f"<h2>{html.escape(key[:1].upper() + key[1:])}</h2>"
            + chart({"train": curve}, marks, log=key == "loss scale")
            for key, curve in others.items()
        ),
        _answers(history.answers),
        _changes(history.events),
        _events(history),
        _configuration(history.config),
    ]
    return document(name, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page of these parts of HTML, with the style of all pages."""
    style = (files("megalith.report") / "page.css").read_text(encoding="utf-8")
    head = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{style}</style>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    return "\n".join(part for part in (*head, *parts) if part) + "\n"


def _facts(history: History) -> str:
    last, config = history.last, history.config
    model, train = config.get("model", {}), config.get("train", {})
    facts: list[tuple[str, str]] = []
    if last:
        total = f" of {train['train_iters']:,}" if train.get("train_iters") else ""
        facts.append((f"{last.get('iteration', 0):,}{total}", "iterations"))
        facts.append((_number(last.get("loss")), "training loss at the end"))
    evaluations = [event for event in history.events if event.kind == "evaluation"]
    if evaluations:
        record = evaluations[-1].record
        facts.append((_number(record.get("loss")), f"last {record.get('split', '')} loss"))
    throughput = history.curves.get("tokens per second")
    if throughput is not None and throughput.points:
        values = [value for _, value in throughput.points]
        facts.append((f"{sorted(values)[len(values) // 2]:,.0f}", "tokens per second (median)"))
    facts.append((f"{history.num_skipped:,}", "skipped steps"))
    facts.append((f"{sum(event.kind == 'resume' for event in history.events):,}", "restarts"))
    facts.append((f"{sum(event.kind == 'save' for event in history.events):,}", "checkpoints"))
    if model:
        width, layers = model.get("hidden_size"), model.get("num_layers")
        facts.append((f"{layers} x {width}", f"layers x width, {model.get('num_attention_heads')} heads"))
    torn = f" {history.unreadable} unreadable lines were skipped." if history.unreadable else ""
    nan = f" In {history.num_nan} steps the loss is NaN." if history.num_nan else ""
    return f'{facts_html(facts)}<p class="soft">{_time_range(history.events)}{nan}{torn}</p>'


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a value and what it is as HTML."""
    shown = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(of)}</span></div>" for value, of in facts)
    return f'<div class="facts">{shown}</div>'


def _time_range(events: Sequence[Event]) -> str:
    times = [event.time for event in events if event.time]
    if not times:
        return ""
    return f"Recorded from {_timestamp(min(times))} to {_timestamp(max(times))}."


def _marks(events: Iterable[Event]) -> list[tuple[float, str, str]]:
    marks: dict[str, list[tuple[float, str, str]]] = {}
    for event in events:
        if event.kind != "evaluation":
            kind = {"not a number": "nan", "bad step": "nan", "batch size": "exit"}.get(event.kind, event.kind)
            marks.setdefault(kind, []).append((event.iteration, kind, f"{event.kind} at iteration {event.iteration}"))
    return [mark for kind in marks.values() for mark in _sample_evenly(kind, _MOST_MARKS)]


def _sample_evenly(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` items at equal distances, the last one included."""
    step = -(-len(items) // most)
    return items[::-1][:: step or 1][::-1]


def _legend(losses: Mapping[str, Curve], history: History) -> str:
    names = {"train": ("training", "var(--a)"), "valid": ("validation", "var(--b)"), "test": ("test", "var(--c)")}
    shown = [f'<i style="border-color:{names[kind][1]}"></i>{names[kind][0]}' for kind in losses]
    if any(curve.abandoned for curve in history.curves.values()):
        shown.append('<i style="border-color:var(--soft);border-top-style:dashed"></i>repeated after a restart')
    kinds = {event.kind for event in history.events}
    colours = {"save": "var(--d)", "resume": "var(--a)", "skipped": "var(--b)", "not a number": "var(--b)"}
    shown += [f'<i style="border-color:{colour}"></i>{kind}' for kind, colour in colours.items() if kind in kinds]
    return f'<p class="key soft">{"".join(shown)}</p>'


def _changes(events: Iterable[Event]) -> str:
    rows = [
        f'<tr><td class="n">{event.iteration}</td><td><code>{html.escape(str(change.get("flag")))}</code></td>'
        f"<td>{html.escape(str(change.get('was')))}</td><td>{html.escape(str(change.get('now')))}</td>"
        f"<td>{html.escape(str(change.get('effect')))}</td></tr>"
        for event in events
        for change in event.record.get("changes") or ()
        if isinstance(change, Mapping)
    ]
    if not rows:
        return ""
    head = "<tr><th>iteration</th><th>flag</th><th>before</th><th>after</th><th>effect</th></tr>"
    return f"<h2>Changes of the configuration</h2><table>{head}{''.join(rows)}</table>"


def _answers(record: Mapping[str, Any]) -> str:
    rows = [
        "<tr>"
        + "".join(f"<td>{html.escape(str(sample.get(key, '')))}</td>" for key in ("prompt", "answer", "held_out"))
        + "</tr>"
        for sample in record.get("samples") or ()
        if isinstance(sample, Mapping)
    ]
    head = "<tr><th>prompt</th><th>answer</th><th>held-out answer</th></tr>"
    where = f"<h2>Answers at iteration {record.get('iteration', 0):,}</h2>"
    return f"{where}<table>{head}{''.join(rows)}</table>" if rows else ""


def _events(history: History) -> str:
    shown = [event for event in history.events if event.kind != "evaluation" or event.record.get("final")]
    chosen = _sample_evenly(shown, _MOST_EVENTS)
    rows = [
        f'<tr><td class="n">{event.iteration:,}</td><td class="n">{_timestamp(event.time)}</td>'
        f"<td>{html.escape(event.kind)}</td><td>{html.escape(_describe(event))}</td></tr>"
        for event in chosen
    ]
    less = f" ({len(chosen)} of {len(shown)})" if len(chosen) < len(shown) else ""
    head = "<tr><th>iteration</th><th>time</th><th>event</th><th></th></tr>"
    return f"<h2>Events{less}</h2><table>{head}{''.join(rows)}</table>"


def _describe(event: Event) -> str:
    record = event.record
    if event.kind == "save":
        size, seconds = (record.get("num_bytes") or 0) / 1e9, record.get("seconds") or 0.0
        stall = record.get("stall_seconds") or 0.0
        return f"{size:.3f} GB in {seconds:.2f} s; training was blocked for {stall:.2f} s"
    if event.kind == "exit":
        return f"{record.get('kind', '')} {record.get('detail') or ''}".strip()
    if event.kind == "rehearsal":
        return f"a resume from here is {record.get('verdict', '')} {record.get('detail') or ''}".strip()
    if event.kind == "plan":
        return _beside(record)
    if event.kind == "bad step":
        samples = f"samples {record.get('first_sample')} to {record.get('last_sample')}"
        return f"{record.get('reason', '')} ({samples}): {record.get('action', '')}"
    if event.kind == "batch size":
        return f"from {record.get('before')} to {record.get('after')}"
    if event.kind == "evaluation":
        return f"{record.get('split', '')}: loss {_number(record.get('loss'))}"
    if event.kind in ("skipped", "not a number"):
        scale = f", loss scale {record['loss_scale']:g} then" if record.get("loss_scale") else ""
        return f"from here on, samples up to {record.get('consumed_samples', 0):,}{scale}"
    return ""


def _beside(record: Mapping[str, Any]) -> str:
    """Return what was planned beside what was measured."""
    found = []
    for name, unit, scale in (("seconds", "s a step", 1.0), ("peak_bytes", "GiB at the peak", 2.0**30)):
        plan, measured = record.get(f"planned_{name}"), record.get(f"measured_{name}")
        if plan is not None and measured is not None:
            found.append(f"{plan / scale:.3g} planned, {measured / scale:.3g} measured {unit}")
    return "; ".join(found)


def _configuration(config: Mapping[str, Mapping[str, Any]]) -> str:
    if not config:
        return ""
    defaults = {setting.name: setting.default for setting in all_settings().values()}
    rows = {True: list[str](), False: list[str]()}
    for group, values in config.items():
        for name, value in values.items():
            default = defaults.get(name)
            differs = value != (list(default) if isinstance(default, tuple) else default)
            rows[differs].append(
                f"<tr><td>{html.escape(group)}</td><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
            )
    return (
        f"<h2>Configuration</h2><table>{''.join(rows[True])}</table>"
        f"<details><summary>{len(rows[False])} settings at their defaults</summary>"
        f"<table>{''.join(rows[False])}</table></details>"
    )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "NaN"


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def chart(curves: dict[str, Curve], marks: Sequence[tuple[float, str, str]] = (), *, log: bool = False) -> str:
    """Draw curves over iterations as SVG; abandoned segments are grey.

    `marks` are (iteration, class, title) of vertical lines. With `log` the scale is logarithmic if all values are
    positive.
    """
    drawn = {name: _downsample_all(curve.segments) for name, curve in curves.items()}
    again = [segment for curve in curves.values() for segment in _downsample_all(curve.abandoned)]
    everything = [point for segments in drawn.values() for segment in segments for point in segment]
    everything += [point for segment in again for point in segment]
    if not everything:
        return "<p>no values</p>"
    log = log and all(value > 0 for _, value in everything)
    scale = _Scale(everything, [at for at, _, _ in marks], log=log)
    parts = [
        f'<div class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" ',
        f'data-x0="{scale.x_low:g}" data-x1="{scale.x_high:g}">',
        *scale.axes(),
        *(_mark(scale.x(at), kind, title) for at, kind, title in marks),
        *(scale.line(segment, "again") for segment in again),
        *(
            scale.line(segment, f"line {name}{_faint_class(curves[name])}")
            for name, parts in drawn.items()
            for segment in parts
        ),
        *(scale.line(points, f"line mean {name}") for name, curve in curves.items() if (points := _means(curve))),
        "</svg></div>",
    ]
    return "".join(parts)


def _faint_class(curve: Curve) -> str:
    return " faint" if len(curve.points) > _MEAN_FROM else ""


def _means(curve: Curve) -> list[tuple[float, float]]:
    """Return the moving means of a long curve; empty for a short one."""
    points = curve.points
    if len(points) <= _MEAN_FROM:
        return []
    size = -(-len(points) // _MEANS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts]


def _downsample_all(segments: Sequence[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    total = sum(map(len, segments)) or 1
    share = [max(8, _MOST_POINTS * len(segment) // total) for segment in segments]
    thin = [downsample(segment, most) for segment, most in zip(segments, share, strict=True) if segment]
    return thin if len(thin) <= _MOST_POINTS // 8 else [downsample([p for part in thin for p in part], _MOST_POINTS)]


def _mark(x: float, kind: str, title: str) -> str:
    """Draw a mark: restarts and exits as lines, frequent events as ticks at the edge."""
    top, bottom = {"save": (HEIGHT - _BOTTOM - 8, HEIGHT - _BOTTOM), "skipped": (_TOP, _TOP + 8)}.get(
        kind, (_TOP, _TOP + 14) if kind == "nan" else (_TOP, HEIGHT - _BOTTOM)
    )
    said = f"<title>{html.escape(title)}</title>"
    return f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}">{said}</line>'


class _Scale:
    """Linear or logarithmic scale from values to SVG coordinates."""

    def __init__(self, points: Points, marked: Sequence[float], *, log: bool) -> None:
        self._log = log
        values = [self._transform(value) for _, value in points]
        iterations = [*(x for x, _ in points), *marked]
        self.x_low, self.x_high = min(iterations), max(iterations)
        low, high = min(values), max(values)
        margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
        self._low, self._high = low - margin, high + margin

    def x(self, iteration: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return _LEFT + (iteration - self.x_low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (self._transform(value) - self._low) / (self._high - self._low)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Points, kind: str) -> str:
        """Draw a segment of a curve; a single point as a dot."""
        if len(points) == 1:
            (at, value) = points[0]
            return f'<circle class="{kind}" cx="{self.x(at):.1f}" cy="{self.y(value):.1f}" r="2"/>'
        path = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        return f'<polyline class="{kind}" points="{path}"/>'

    def axes(self) -> list[str]:
        lines = []
        for value in _ticks(self._low, self._high, 5):
            shown = 10**value if self._log else value
            y = self.y(shown)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick_label(shown)}</text>')
        for value in _ticks(self.x_low, self.x_high, 8):
            x = self.x(value)
            lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:,.10g}</text>')
        return lines

    def _transform(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _tick_label(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers between two values."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step = next((step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about), step * 10)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
