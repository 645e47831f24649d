"""A simulated pipeline schedule as text: one row for each stage, time to the right, and a table of what it costs."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from megalith.schedules.pipeline import Op
from megalith.schedules.simulator import Costs, Simulation, Span

COLORS = {"F": (24, 31, 38, 45), "B": (22, 28, 34, 40), "W": (130, 136, 172, 178)}
"""Backgrounds (of the 256 colours of a terminal) by kind: one for each chunk in turn."""

TICK_COLUMNS = 10  # between two times on the ruler, at least
MIN_COLUMNS = 20  # of a panel, however narrow the terminal


def picture(simulation: Simulation, *, width: int | None = None, color: bool = False) -> str:
    """Draw a schedule.

    A cell is as wide as its operation is long and reads F3, B3 or W3: forward, backward and weight gradients of
    micro-batch 3; with several chunks F1.3, in chunk 1. Dots are waiting.

    Args:
        simulation: what to draw.
        width: columns of the terminal; a longer picture goes on below. None: never broken.
        color: with the colours of a terminal.
    """
    scale = _columns_per_time(simulation)
    names = [f"stage {stage} " for stage in range(simulation.schedule.stages)]
    margin = max(len(name) for name in [*names, "time "])
    total = _column(simulation.makespan, scale)
    room = total if width is None else max(MIN_COLUMNS, width - margin)
    room = ceil(total / ceil(total / room))  # panels of one length
    lines = []
    for start in range(0, total, room):
        stop = min(start + room, total)
        lines.append("time".ljust(margin) + _ruler(simulation.makespan, scale)[start:stop].rstrip())
        for name, spans in zip(names, simulation.spans, strict=True):
            lines.append(name.ljust(margin) + _row(simulation, spans, scale, start, stop, color))
        lines.append("")
    return "\n".join(lines)


def summary(simulation: Simulation, costs: Costs) -> str:
    """Say in words and numbers what a schedule is and what it costs."""
    schedule = simulation.schedule
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    lines = [
        f"{schedule.name}: {_count(schedule.stages, 'stage')}{chunks}, "
        f"{_count(schedule.micro_batches, 'micro-batch')}; {_times(simulation, costs)}",
        f"time {_number(simulation.makespan)}, bubble {float(simulation.bubble):.1%}",
        "",
        f"{'stage':>5}  {'computes':>9}  {'waits':>9}  {'bubble':>7}  live activations at most",
    ]
    for stage, peak in enumerate(simulation.peaks):
        work, idle = simulation.work(stage), simulation.idle(stage)
        live = _count(peak, "micro-batch")
        if schedule.chunks > 1:
            live += f" of one chunk = {_number(Fraction(peak, schedule.chunks))} of the stage"
        share = float(idle / simulation.makespan)
        lines.append(f"{stage:>5}  {_number(work):>9}  {_number(idle):>9}  {share:>7.1%}  {live}")
    return "\n".join(lines)


def _label(simulation: Simulation, op: Op) -> str:
    return str(op) if simulation.schedule.chunks > 1 else f"{op.kind}{op.micro_batch}"


def _columns_per_time(simulation: Simulation) -> Fraction:
    """The smallest scale at which the label of each operation and a bar fit into its cell."""
    spans = [span for row in simulation.spans for span in row]
    return max(Fraction(len(_label(simulation, span.op)) + 1) / (span.end - span.start) for span in spans)


def _column(time: Fraction, scale: Fraction) -> int:
    return int(time * scale)


def _row(simulation: Simulation, spans: tuple[Span, ...], scale: Fraction, start: int, stop: int, color: bool) -> str:
    """Columns [start, stop) of the row of one stage."""
    parts, column = [], start
    for span in spans:
        left, right = max(_column(span.start, scale), start), min(_column(span.end, scale), stop)
        if right <= left:
            continue
        parts.append("." * (left - column))
        cell = _label(simulation, span.op)[: right - left].ljust(right - left)
        if _column(span.end, scale) == right:
            cell = cell[:-1] + (" " if color else "|")
        parts.append(_painted(cell, span.op) if color else cell)
        column = right
    end = min(stop, _column(simulation.makespan, scale))
    return "".join(parts) + "." * (end - column)


def _painted(cell: str, op: Op) -> str:
    shades = COLORS[op.kind]
    return f"\x1b[97;48;5;{shades[op.chunk % len(shades)]}m{cell}\x1b[0m"


def _ruler(makespan: Fraction, scale: Fraction) -> str:
    """Round times over the columns at which they are."""
    tick = 1
    while _column(Fraction(tick), scale) < TICK_COLUMNS:
        tick *= 5 if str(tick)[0] == "1" else 2
    line = ""
    for time in range(0, int(makespan) + 1, tick):
        line = line.ljust(_column(Fraction(time), scale)) + str(time)
    return line


def _times(simulation: Simulation, costs: Costs) -> str:
    schedule = simulation.schedule
    words = [f"forward {_number(costs.forward)}"]
    if schedule.is_split:
        words += [f"input gradient {_number(costs.backward)}", f"weight gradient {_number(costs.weight)}"]
    elif schedule.has_backward:
        words.append(f"backward {_number(costs.backward + costs.weight)}")
    return f"one micro-batch takes a stage {', '.join(words)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'es' if noun.endswith('ch') and number != 1 else 's' if number != 1 else ''}"


def _number(value: Fraction) -> str:
    return f"{float(value):.6g}"
