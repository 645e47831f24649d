"""The loss curve, for the terminal in Braille dots and as a PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Point = tuple[float, float]
"""(iteration, loss)."""

DOTS_PER_COLUMN, DOTS_PER_ROW = 2, 4
BRAILLE = 0x2800
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the Braille character for each dot, by column and row. Source: Unicode, block Braille Patterns."""


@dataclass(frozen=True)
class Curve:
    """What is drawn.

    Attributes:
        training: loss of every step, in order.
        validation: loss of every evaluation.
        killed_at: iteration at which the run was killed, if it was.
    """

    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    killed_at: int | None = None


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """Average about `width` neighbours: fewer at the start, where the loss falls fast, and fewer to come at the end."""
    losses = [loss for _, loss in points]
    smoothed = []
    for index, (iteration, _) in enumerate(points):
        reach = min(width // 2, index)
        window = losses[index - reach : index + reach + 1]
        smoothed.append((iteration, sum(window) / len(window)))
    return smoothed


def draw(curve: Curve, width: int, height: int, *, braille: bool = True) -> list[str]:
    """Draw the smoothed training loss with its axes.

    Args:
        width: characters of a line, the labels included.
        height: lines of the plot, without those of the iterations below.
        braille: False for terminals that only have ASCII.
    """
    points = smooth([point for point in curve.training if math.isfinite(point[1])], len(curve.training) // 50)
    if len(points) < 2:
        return ["(too few steps for a curve)"]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    labels = [f"{high - (high - low) * row / (height - 1):6.2f} " for row in range(height)]
    plot_width = width - len(labels[0]) - 1
    dots = place_dots(points, plot_width * DOTS_PER_COLUMN, height * DOTS_PER_ROW)
    rows = [row_of_dots(dots, row, plot_width, braille=braille) for row in range(height)]
    bar = "\u2502" if braille else "|"
    lines = [label + bar + text.rstrip() for label, text in zip(labels, rows, strict=True)]
    return [*lines, *iteration_axis(curve, plot_width, len(labels[0]), braille=braille)]


def place_dots(points: Sequence[Point], columns: int, rows: int) -> set[Point]:
    """Find the (column, row) of each dot of a line through the points; row 0 is the highest loss."""
    iterations, losses = [point[0] for point in points], [point[1] for point in points]
    first, last, low, high = iterations[0], iterations[-1], min(losses), max(losses)
    dots: set[Point] = set()
    previous: int | None = None
    position = 0
    for column in range(columns):
        iteration = first + (last - first) * column / (columns - 1)
        while position + 2 < len(points) and iterations[position + 1] < iteration:
            position += 1
        (left, left_loss), (right, right_loss) = points[position], points[position + 1]
        loss = left_loss + (right_loss - left_loss) * (iteration - left) / (right - left)
        row = round((high - loss) / ((high - low) or 1.0) * (rows - 1))
        # A steep piece is drawn as a column of dots, so that the line has no holes.
        start = row if previous is None else previous + (1 if row > previous else -1 if row < previous else 0)
        dots |= {(column, between) for between in range(min(start, row), max(start, row) + 1)}
        previous = row
    return dots


def row_of_dots(dots: set[Point], row: int, width: int, *, braille: bool) -> str:
    """Turn the dots of one line of text into characters."""
    text = []
    for column in range(width):
        bits = 0
        for dx in range(DOTS_PER_COLUMN):
            for dy in range(DOTS_PER_ROW):
                if (column * DOTS_PER_COLUMN + dx, row * DOTS_PER_ROW + dy) in dots:
                    bits |= DOT_BITS[dx][dy]
        text.append((chr(BRAILLE + bits) if braille else "*") if bits else " ")
    return "".join(text)


def iteration_axis(curve: Curve, width: int, indent: int, *, braille: bool) -> list[str]:
    """Draw the lower axis, a mark where the run was killed, and the first and last iteration."""
    first, last = curve.training[0][0], curve.training[-1][0]
    line = ["\u2500" if braille else "-"] * width
    numbers = f"{first:g}".ljust(width - len(f"{last:g}")) + f"{last:g}"
    if curve.killed_at is not None:
        at = round((curve.killed_at - first) / (last - first) * (width - 1))
        line[at] = "\u253c" if braille else "x"
        note = f"killed at {curve.killed_at}"
        start = max(len(f"{first:g}") + 1, min(at - len(note) // 2, width - len(note) - len(f"{last:g}") - 1))
        numbers = numbers[:start] + note + numbers[start + len(note) :]
    corner = "\u2514" if braille else "+"
    return [" " * indent + corner + "".join(line), " " * (indent + 1) + numbers]


def save_png(curve: Curve, path: Path, title: str) -> bool:
    """Write the curve as a picture; False where matplotlib is not installed (the extra `plot`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*columns_of(curve.training), color="#9dbfe0", linewidth=0.7, label="training, every step")
    smoothed = smooth(curve.training, max(3, len(curve.training) // 50))
    axes.plot(*columns_of(smoothed), color="#1f5f9f", linewidth=1.6, label="training, averaged")
    axes.plot(*columns_of(curve.validation), "o", color="#d1495b", markersize=5, label="validation")
    if curve.killed_at is not None:
        axes.axvline(curve.killed_at, color="#777777", linestyle=":", label="killed, then resumed")
    axes.set(title=title, xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(str(path))
    return True


def columns_of(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [iteration for iteration, _ in points], [loss for _, loss in points]
