"""Runs pipeline schedules on paper: proves that they end, gives their time and live activations, and draws them.

The model is that of NCCL, which is stricter than gloo's. A stage computes one operation at a time; sends and receives
run beside it. Each directed edge of the ring of stages is a communicator of its own (distributed/p2p.py): the sends of
one end and the receives of the other are matched in the order in which they are posted, and neither side buffers. If no
stage can go on, the schedule deadlocks. Within this model the result does not depend on timing, so that one run is a
proof. gloo matches messages by tag and therefore hides orders that would deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from megalith.schedules.pipeline import PREFETCH, WINDOW, Message, Op, Schedule, Step

COLORS = {"F": (24, 31, 38, 45), "B": (22, 28, 34, 40), "W": (130, 136, 172, 178)}
"""Backgrounds (of the 256 colours of a terminal) by kind: one for each chunk in turn."""

TICK_COLUMNS = 10  # between two times on the ruler, at least
MIN_COLUMNS = 20  # of a panel, however narrow the terminal


class Deadlock(Exception):
    """Some stages wait for ever; says which for what."""


class Mismatch(Exception):
    """The two ends of a communicator expect different messages: the data would be mixed up."""


@dataclass(frozen=True)
class Costs:
    """Times for one micro-batch in one whole stage; a chunk takes its share of them."""

    forward: Fraction = Fraction(1)  # F
    backward: Fraction = Fraction(1)  # the gradient of the input
    weight: Fraction = Fraction(1)  # the gradients of the weights; part of B where the schedule does not split it
    message: Fraction = Fraction(0)  # the way of a tensor to another stage

    def of(self, op: Op, schedule: Schedule) -> Fraction:
        """The time of one operation."""
        if op.kind == "F":
            whole = self.forward
        elif op.kind == "W":
            whole = self.weight
        else:
            whole = self.backward if schedule.is_split else self.backward + self.weight
        return whole / schedule.chunks


class Span(NamedTuple):
    """An operation in time."""

    op: Op
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Simulation:
    """What a schedule does in time."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by stage, in order
    # by stage, the most micro-batches of a chunk whose activations are held at once: from F to the last operation of
    # the backward pass, W where it is split
    peaks: tuple[int, ...]

    @property
    def makespan(self) -> Fraction:
        """From the first operation of any stage to the last of any stage."""
        return max((spans[-1].end for spans in self.spans), default=Fraction(0))

    def work(self, stage: int) -> Fraction:
        """The time in which a stage computes."""
        return sum((span.end - span.start for span in self.spans[stage]), Fraction(0))

    def idle(self, stage: int) -> Fraction:
        """The time in which a stage waits, between the first start and the last end of the whole pipeline."""
        return self.makespan - self.work(stage)

    @property
    def bubble(self) -> Fraction:
        """The share of the time of all stages in which they wait."""
        whole = self.makespan * self.schedule.stages
        return sum((self.idle(stage) for stage in range(self.schedule.stages)), Fraction(0)) / whole


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, prefetch: int = PREFETCH, window: int = WINDOW
) -> Simulation:
    """Run a schedule on paper.

    Raises:
        Deadlock: it would never end.
        Mismatch: a stage would take one message for another.
    """
    costs, stages = costs or Costs(), range(schedule.stages)
    network = _Network(costs.message)
    spans: list[list[Span]] = [[] for _ in stages]
    workers = {
        stage: _work(schedule, schedule.steps(stage, prefetch=prefetch, window=window), costs, network, own)
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
    """The directed edges: what either end has posted, and when each message was complete."""

    def __init__(self, cost: Fraction) -> None:
        self._cost = cost
        self._posted: dict[tuple[int, int, bool], tuple[list[_Post], list[_Post]]] = defaultdict(lambda: ([], []))
        self._free: dict[tuple[int, int, bool], Fraction] = defaultdict(Fraction)
        self.complete: dict[Message, Fraction] = {}

    def post(self, message: Message, time: Fraction, *, sends: bool) -> None:
        """Queue a send or a receive, and carry out the transfer if the other end has queued it too."""
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
    """A message in the queue of one end of an edge, and since when."""

    message: Message
    time: Fraction


def _work(
    schedule: Schedule, steps: Iterable[Step], costs: Costs, network: _Network, spans: list[Span]
) -> Iterator[str]:
    """Carry out the steps of a stage; says what it waits for whenever it cannot go on."""
    clock, made = Fraction(0), set[Message]()
    for step in steps:
        for message in step.receives:
            network.post(message, clock, sends=False)
        if step.needs is not None and step.needs.is_local:
            while step.needs not in made:
                yield f"cannot compute {step.op}, whose input it has not made"
        elif step.needs is not None:
            while step.needs not in network.complete:
                yield f"waits for the {step.needs}"
            clock = max(clock, network.complete[step.needs])
        spans.append(Span(step.op, clock, clock + costs.of(step.op, schedule)))
        clock = spans[-1].end
        if step.settles is not None:
            while step.settles not in network.complete:
                yield f"waits until stage {step.settles.target} takes the {step.settles}"
            clock = max(clock, network.complete[step.settles])
        if step.makes is not None and step.makes.is_local:
            made.add(step.makes)
        elif step.makes is not None:
            network.post(step.makes, clock, sends=True)


def _peak(schedule: Schedule, ops: Sequence[Op]) -> int:
    """The most activations held at once by a stage that carries out `ops` in this order."""
    if not schedule.has_backward:
        return 1 if ops else 0
    last = "W" if schedule.is_split else "B"
    live = peak = 0
    for op in ops:
        live += op.kind == "F"
        peak = max(peak, live)
        live -= op.kind == last
    return peak


def picture(simulation: Simulation, *, width: int | None = None, color: bool = False) -> str:
    """Draw a schedule.

    A cell is as wide as its operation is long and reads F3, B3 or W3: forward, backward and weight gradients of
    micro-batch 3; with several chunks F1.3, in chunk 1. Dots are waiting.

    Args:
        width: columns of the terminal; a longer picture goes on below. None: never broken.
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
        shades = COLORS[span.op.kind]
        shade = shades[span.op.chunk % len(shades)]
        parts.append(f"\x1b[97;48;5;{shade}m{cell}\x1b[0m" if color else cell)
        column = right
    end = min(stop, _column(simulation.makespan, scale))
    return "".join(parts) + "." * (end - column)


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
