"""Curves as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from megalith.report.history import Curve, thinned

WIDTH, HEIGHT = 960, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 10, 26
_MOST_POINTS = 1600
_MEAN_FROM, _MEANS = 400, 150
Points = Sequence[tuple[float, float]]


def chart(curves: dict[str, Curve], marks: Sequence[tuple[float, str, str]] = (), *, log: bool = False) -> str:
    """One picture of curves over the iterations; what was done again is grey.

    Args:
        curves: by the name of their colour class.
        marks: (iteration, class, title) of upright lines.
        log: whether the values stand on a logarithmic scale, if all are positive.
    """
    drawn = {name: _thin(curve.stretches) for name, curve in curves.items()}
    again = [stretch for curve in curves.values() for stretch in _thin(curve.abandoned)]
    everything = [point for stretches in drawn.values() for stretch in stretches for point in stretch]
    everything += [point for stretch in again for point in stretch]
    if not everything:
        return "<p>no values</p>"
    log = log and all(value > 0 for _, value in everything)
    scale = _Scale(everything, [at for at, _, _ in marks], log=log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-x0="{scale.x_low:g}" data-x1="{scale.x_high:g}">',
        *scale.axes(),
        *(_mark(scale.x(at), kind, title) for at, kind, title in marks),
        *(scale.line(stretch, "again") for stretch in again),
        *(
            scale.line(stretch, f"line {name}{_faint(curves[name])}")
            for name, parts in drawn.items()
            for stretch in parts
        ),
        *(scale.line(points, f"line mean {name}") for name, curve in curves.items() if (points := _means(curve))),
        "</svg>",
    ]
    return "".join(parts)


def _faint(curve: Curve) -> str:
    return " faint" if curve.num_points > _MEAN_FROM else ""


def _means(curve: Curve) -> list[tuple[float, float]]:
    """Of a long curve the means of as many points as make a smooth line; nothing of a short one."""
    points = [point for stretch in curve.stretches for point in stretch]
    if len(points) <= _MEAN_FROM:
        return []
    size = -(-len(points) // _MEANS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts]


def _thin(stretches: Sequence[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    total = sum(map(len, stretches)) or 1
    share = [max(8, _MOST_POINTS * len(stretch) // total) for stretch in stretches]
    thin = [thinned(stretch, most) for stretch, most in zip(stretches, share, strict=True) if stretch]
    return thin if len(thin) <= _MOST_POINTS // 8 else [thinned([p for part in thin for p in part], _MOST_POINTS)]


def _mark(x: float, kind: str, title: str) -> str:
    """Starts and ends cross the picture; what happens often is a tick at its edge."""
    top, bottom = {"save": (HEIGHT - _BOTTOM - 8, HEIGHT - _BOTTOM), "skipped": (_TOP, _TOP + 8)}.get(
        kind, (_TOP, _TOP + 14) if kind == "nan" else (_TOP, HEIGHT - _BOTTOM)
    )
    said = f"<title>{html.escape(title)}</title>"
    return f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}">{said}</line>'


class _Scale:
    """From values to places in the picture."""

    def __init__(self, points: Points, marked: Sequence[float], *, log: bool) -> None:
        self._log = log
        values = [self._bent(value) for _, value in points]
        iterations = [*(x for x, _ in points), *marked]
        self.x_low, self.x_high = min(iterations), max(iterations)
        low, high = min(values), max(values)
        margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
        self._low, self._high = low - margin, high + margin

    def x(self, iteration: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return _LEFT + (iteration - self.x_low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (self._bent(value) - self._low) / (self._high - self._low)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Points, kind: str) -> str:
        """A stretch of a curve; a single point is a dot."""
        if len(points) == 1:
            (at, value) = points[0]
            return f'<circle class="{kind}" cx="{self.x(at):.1f}" cy="{self.y(value):.1f}" r="2"/>'
        path = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        return f'<polyline class="{kind}" points="{path}"/>'

    def axes(self) -> list[str]:
        """Lines and labels."""
        lines = []
        for value in _ticks(self._low, self._high, 5):
            shown = 10**value if self._log else value
            y = self.y(shown)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(shown)}</text>')
        for value in _ticks(self.x_low, self.x_high, 8):
            x = self.x(value)
            lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:,.10g}</text>')
        return lines

    def _bent(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step = next((step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about), step * 10)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
