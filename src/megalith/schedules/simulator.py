"""Simulation of pipeline schedules: absence of deadlock, time, live activations, and a drawing.

It models NCCL, which is stricter than gloo. A stage computes one operation at a time; sends and receives overlap with
it. Each directed edge of the ring of stages has its own communicator (distributed/p2p.py): sends of one end and
receives of the other are matched in the order in which they are posted, without buffering. If no stage can continue,
the schedule deadlocks. Within this model the result does not depend on timing, so that one run is a proof. gloo matches
messages by tag and therefore hides orders that would deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from megalith.schedules.pipeline import PREFETCH, Action, Message, Op, Schedule

COLORS = {"F": (24, 31, 38, 45), "B": (22, 28, 34, 40), "W": (130, 136, 172, 178)}
"""Kind -> background colors (of a terminal's 256), used for the chunks in turn."""

TICK_COLUMNS = 10  # minimum distance of two times on the ruler
MIN_COLUMNS = 20  # minimum width of a panel


class Deadlock(Exception):
    """Raised if some stages wait for ever; names them and what they wait for."""


class Mismatch(Exception):
    """Raised if the two ends of a communicator expect different messages."""


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch in a whole stage; a chunk takes its share."""

    forward: Fraction = Fraction(1)  # F
    backward: Fraction = Fraction(1)  # gradient of the input
    weight: Fraction = Fraction(1)  # gradients of the weights; part of B unless the schedule is split
    message: Fraction = Fraction(0)  # transfer of a tensor to another stage

    def of(self, op: Op, schedule: Schedule) -> Fraction:
        """Return the time of one operation."""
        if op.kind == "F":
            whole = self.forward
        elif op.kind == "W":
            whole = self.weight
        else:
            whole = self.backward if schedule.is_split else self.backward + self.weight
        return whole / schedule.chunks


class Span(NamedTuple):
    """Operation with its start and end time."""

    op: Op
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by stage, in order
    # by stage, maximum number of live activations (micro-batches of a chunk), from F to the end of the backward pass
    peaks: tuple[int, ...]

    @property
    def makespan(self) -> Fraction:
        """Return the time from the first operation of any stage to the end of the last one."""
        return max((spans[-1].end for spans in self.spans), default=Fraction(0))

    def work(self, stage: int) -> Fraction:
        """Return the time in which a stage computes."""
        return sum((span.end - span.start for span in self.spans[stage]), Fraction(0))

    def idle(self, stage: int) -> Fraction:
        """Return the time in which a stage waits, between start and end of the whole pipeline."""
        return self.makespan - self.work(stage)

    @property
    def bubble(self) -> Fraction:
        """Return the idle share of the time of all stages."""
        whole = self.makespan * self.schedule.stages
        return sum((self.idle(stage) for stage in range(self.schedule.stages)), Fraction(0)) / whole


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, prefetch: int = PREFETCH, window: int | None = None
) -> Simulation:
    """Simulate a schedule.

    Raises:
        Deadlock: stages wait for each other for ever.
        Mismatch: a stage would receive another message than it expects.
    """
    costs, stages = costs or Costs(), range(schedule.stages)
    network = _Network(costs.message)
    spans: list[list[Span]] = [[] for _ in stages]
    workers = {
        stage: _work(schedule, schedule.actions(stage, prefetch=prefetch, window=window), costs, network, own)
        for stage, own in zip(stages, spans, strict=True)
    }
    while workers:
        before = len(network.complete), sum(map(len, spans))
        waits = {stage: what for stage, worker in workers.items() if (what := next(worker, None)) is not None}
        if waits and before == (len(network.complete), sum(map(len, spans))):
            raise Deadlock("; ".join(f"stage {stage} {what}" for stage, what in waits.items()))
        workers = {stage: workers[stage] for stage in waits}
    peaks = tuple(_peak(schedule, ops) for ops in schedule.ops)
    return Simulation(schedule, tuple(map(tuple, spans)), peaks)


class _Network:
    """Directed edges: the posts at either end, and the completion time of each message."""

    def __init__(self, cost: Fraction) -> None:
        self._cost = cost
        self._posted: dict[tuple[int, int, bool], tuple[list[_Post], list[_Post]]] = defaultdict(lambda: ([], []))
        self._free: dict[tuple[int, int, bool], Fraction] = defaultdict(Fraction)
        self.complete: dict[Message, Fraction] = {}

    def post(self, message: Message, time: Fraction, *, sends: bool) -> None:
        """Queue a send or receive, and complete the transfer if the other end is queued."""
        edge = (message.source, message.target, message.gradient)
        sent, received = self._posted[edge]
        own, other = (sent, received) if sends else (received, sent)
        own.append(_Post(message, time))
        place = len(own) - 1
        if place >= len(other):
            return
        if sent[place].message != received[place].message:
            raise Mismatch(
                f"stage {message.source} sends the {sent[place].message} where stage {message.target} expects the "
                f"{received[place].message}"
            )
        self._free[edge] = self._cost + max(sent[place].time, received[place].time, self._free[edge])
        self.complete[message] = self._free[edge]


class _Post(NamedTuple):
    """Message in the queue of one end of an edge, and the time of its post."""

    message: Message
    time: Fraction


def _work(
    schedule: Schedule, actions: Iterable[Action], costs: Costs, network: _Network, spans: list[Span]
) -> Iterator[str]:
    """Execute the actions of a stage; yield what it waits for whenever it is blocked."""
    clock, made = Fraction(0), set[Message]()
    for action in actions:
        for message in action.receives:
            network.post(message, clock, sends=False)
        if action.input is not None and action.input.is_local:
            while action.input not in made:
                yield f"cannot compute {action.op}, whose input it has not made"
        elif action.input is not None:
            while action.input not in network.complete:
                yield f"waits for the {action.input}"
            clock = max(clock, network.complete[action.input])
        spans.append(Span(action.op, clock, clock + costs.of(action.op, schedule)))
        clock = spans[-1].end
        if action.wait_for_send is not None:
            while action.wait_for_send not in network.complete:
                yield f"waits until stage {action.wait_for_send.target} takes the {action.wait_for_send}"
            clock = max(clock, network.complete[action.wait_for_send])
        if action.output is not None and action.output.is_local:
            made.add(action.output)
        elif action.output is not None:
            network.post(action.output, clock, sends=True)


def _peak(schedule: Schedule, ops: Sequence[Op]) -> int:
    """Return the maximum number of live activations of a stage that executes `ops` in this order."""
    if not schedule.has_backward:
        return 1 if ops else 0
    last = "W" if schedule.is_split else "B"
    live = peak = 0
    for op in ops:
        live += op.kind == "F"
        peak = max(peak, live)
        live -= op.kind == last
    return peak


def draw(simulation: Simulation, *, width: int | None = None, color: bool = False) -> str:
    """Draw a schedule as text.

    The width of a cell is proportional to the operation's time. F3, B3 and W3 are forward, backward and weight gradient
    of micro-batch 3; with several chunks F1.3 is in chunk 1. Dots are idle time.

    Args:
        width: columns after which the drawing is wrapped; None: not wrapped.
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
    """Return name, sizes, time, bubble and live activations of a simulation as text."""
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
    """Return the smallest scale at which every label and a separator fit into its cell."""
    spans = [span for row in simulation.spans for span in row]
    return max(Fraction(len(_label(simulation, span.op)) + 1) / (span.end - span.start) for span in spans)


def _column(time: Fraction, scale: Fraction) -> int:
    return int(time * scale)


def _row(simulation: Simulation, spans: tuple[Span, ...], scale: Fraction, start: int, stop: int, color: bool) -> str:
    """Return the columns [start, stop) of one stage's row."""
    parts, column = [], start
    for span in spans:
        left, right = max(_column(span.start, scale), start), min(_column(span.end, scale), stop)
        if right <= left:
            continue
        parts.append("." * (left - column))
        cell = _label(simulation, span.op)[: right - left].ljust(right - left)
        if _column(span.end, scale) == right:
            cell = cell[:-1] + (" " if color else "|")
        shades = COLORS[span.op.kind]
        shade = shades[span.op.chunk % len(shades)]
        parts.append(f"\x1b[97;48;5;{shade}m{cell}\x1b[0m" if color else cell)
        column = right
    end = min(stop, _column(simulation.makespan, scale))
    return "".join(parts) + "." * (end - column)


def _ruler(makespan: Fraction, scale: Fraction) -> str:
    """Return a line of round times above their columns."""
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
