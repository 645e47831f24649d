"""Runs pipeline schedules on paper: proves that they end, and gives their exact time, bubble and live activations.

The model is that of NCCL, which is stricter than gloo's. A stage computes one operation at a time; sends and receives
run beside it. Each communicator is a queue on either side: it works on what was posted first, a send needs the
receive of the other side to be at the head of its queue too, and neither side buffers. What is posted as one batch
runs at once and completes together. If no stage and no queue can go on, the schedule deadlocks. Within this model the
result does not depend on timing, so that one run is a proof.

gloo matches messages wherever they stand in the queue and therefore hides the deadlocks that this finds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from megalith.schedules.pipeline import PREFETCH, WINDOW, Message, Op, Schedule, Step

Wiring = Literal["edges", "pairs"]
"""One communicator for each directed edge of the ring, as we have it, or for each pair of stages."""


class Deadlock(Exception):
    """Some stages wait for ever; says which for what."""


class Mismatch(Exception):
    """The two ends of a communicator expect different messages: the data would be mixed up."""


@dataclass(frozen=True)
class Costs:
    """Times for one micro-batch in one whole stage; a chunk takes its share of them.

    Attributes:
        forward: F.
        backward: the gradient of the input.
        weight: the gradients of the weights; part of B where the schedule does not split it.
        message: the way of a tensor to another stage.
    """

    forward: Fraction = Fraction(1)
    backward: Fraction = Fraction(1)
    weight: Fraction = Fraction(1)
    message: Fraction = Fraction(0)

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
    """What a schedule does in time.

    Attributes:
        schedule: the schedule.
        spans: by stage, in order.
        peaks: by stage, the most micro-batches of a chunk whose activations are held at once: from F to the last
            operation of the backward pass, W where it is split.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
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
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    wiring: Wiring = "edges",
    batched: bool = False,
    prefetch: int = PREFETCH,
    window: int = WINDOW,
) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: what to run.
        costs: times of its operations.
        wiring: what is a communicator.
        batched: messages that are posted to one communicator with no operation between them are one batch.
        prefetch, window: as `Schedule.steps` takes them.

    Raises:
        Deadlock: it would never end.
        Mismatch: a stage would take one message for another.
    """
    costs = costs or Costs()
    network = _Network(wiring)
    stages = [
        _Stage(number, deque(_actions(schedule.steps(number, prefetch=prefetch, window=window), wiring, batched)))
        for number in range(schedule.stages)
    ]
    while any(stage.actions for stage in stages):
        went_on = [stage.go_on(network, schedule, costs) for stage in stages]
        if not network.go_on(costs.message) and not any(went_on):
            raise Deadlock("; ".join(f"stage {stage.number} {stage.waits_for()}" for stage in stages if stage.actions))
    peaks = tuple(_peak(schedule, ops) for ops in schedule.ops)
    return Simulation(schedule, tuple(tuple(stage.spans) for stage in stages), peaks)


class _Post(NamedTuple):
    """A batch that a stage posts to a communicator."""

    communicator: Hashable
    messages: tuple[Message, ...]


class _Wait(NamedTuple):
    """A stage waits until its end of a transfer is complete."""

    message: Message


_Action = _Post | _Wait | Op


def _communicator(message: Message, wiring: Wiring) -> Hashable:
    if wiring == "pairs":
        return frozenset((message.source, message.target))
    return (message.source, message.target, message.gradient)


def _actions(steps: Sequence[Step], wiring: Wiring, batched: bool) -> Iterator[_Action]:
    """What a stage does, one thing after the other; messages posted without an operation between them together."""
    posted: list[Message] = []
    for step in steps:
        posted += step.receives
        if step.needs is not None and not step.needs.is_local:
            yield from _posts(posted, wiring, batched)
            posted = []
            yield _Wait(step.needs)
        yield from _posts(posted, wiring, batched)
        posted = []
        yield step.op
        if step.settles is not None:
            yield _Wait(step.settles)
        if step.makes is not None and not step.makes.is_local:
            posted.append(step.makes)
    yield from _posts(posted, wiring, batched)


def _posts(messages: Iterable[Message], wiring: Wiring, batched: bool) -> Iterator[_Post]:
    if not batched:
        yield from (_Post(_communicator(message, wiring), (message,)) for message in messages)
        return
    together: dict[Hashable, list[Message]] = {}
    for message in messages:
        together.setdefault(_communicator(message, wiring), []).append(message)
    yield from (_Post(communicator, tuple(batch)) for communicator, batch in together.items())


@dataclass
class _Batch:
    """Messages of one stage in the queue of a communicator."""

    messages: tuple[Message, ...]
    time: Fraction  # when it was posted, later when its last transfer was done
    waiting: list[Message]


class _Network:
    """All communicators: queues of batches by communicator and stage, and the transfers that are complete."""

    def __init__(self, wiring: Wiring) -> None:
        self._queues: dict[Hashable, dict[int, deque[_Batch]]] = defaultdict(lambda: defaultdict(deque))
        self._free: dict[tuple[Hashable, int], Fraction] = defaultdict(Fraction)
        self.complete: dict[tuple[int, Message], Fraction] = {}

    def post(self, stage: int, post: _Post, time: Fraction) -> None:
        self._queues[post.communicator][stage].append(_Batch(post.messages, time, list(post.messages)))

    def go_on(self, cost: Fraction) -> bool:
        """Carry out every transfer that can be; tell whether there was one."""
        went_on = False
        for communicator, queues in self._queues.items():
            while self._transfer(communicator, queues, cost):
                went_on = True
        return went_on

    def _transfer(self, communicator: Hashable, queues: dict[int, deque[_Batch]], cost: Fraction) -> bool:
        heads = {stage: queue[0] for stage, queue in queues.items() if queue}
        for source, head in heads.items():
            for target, other in heads.items():
                sent = next((m for m in head.waiting if m.source == source and m.target == target), None)
                received = next((m for m in other.waiting if m.source == source and m.target == target), None)
                if source == target or sent is None or received is None:
                    continue
                if sent != received:
                    raise Mismatch(f"stage {source} sends the {sent} where stage {target} expects the {received}")
                ends = ((source, head), (target, other))
                time = cost + max(max(batch.time, self._free[communicator, stage]) for stage, batch in ends)
                for stage, batch in ends:
                    self._done(communicator, queues[stage], stage, batch, sent, time)
                return True
        return False

    def _done(
        self,
        communicator: Hashable,
        queue: deque[_Batch],
        stage: int,
        batch: _Batch,
        message: Message,
        time: Fraction,
    ) -> None:
        batch.waiting.remove(message)
        batch.time = max(batch.time, time)
        if not batch.waiting:
            queue.popleft()
            self._free[communicator, stage] = batch.time
            self.complete.update({(stage, each): batch.time for each in batch.messages})


@dataclass
class _Stage:
    """A stage at work."""

    number: int
    actions: deque[_Action]
    clock: Fraction = Fraction(0)
    spans: list[Span] = field(default_factory=list)
    made: set[Message] = field(default_factory=set)

    def go_on(self, network: _Network, schedule: Schedule, costs: Costs) -> bool:
        """Work until there is something to wait for; tell whether anything was done."""
        before = len(self.actions)
        while self.actions:
            action = self.actions[0]
            if isinstance(action, _Post):
                network.post(self.number, action, self.clock)
            elif isinstance(action, _Wait):
                complete = network.complete.get((self.number, action.message))
                if complete is None:
                    break
                self.clock = max(self.clock, complete)
            elif not self._compute(action, schedule, costs):
                break
            self.actions.popleft()
        return len(self.actions) < before

    def _compute(self, op: Op, schedule: Schedule, costs: Costs) -> bool:
        needs, makes = schedule.needs(self.number, op), schedule.makes(self.number, op)
        if needs is not None and needs.is_local and needs not in self.made:
            return False
        start, self.clock = self.clock, self.clock + costs.of(op, schedule)
        self.spans.append(Span(op, start, self.clock))
        if makes is not None:
            self.made.add(makes)
        return True

    def waits_for(self) -> str:
        action = self.actions[0]
        if not isinstance(action, _Wait):
            return f"cannot compute {action}, whose input it has not made"
        if action.message.source == self.number:
            return f"waits until stage {action.message.target} takes the {action.message}"
        return f"waits for the {action.message}"


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
