"""What was seen of one step of a part of a model, as integers: which memory each piece of it takes, keeps and frees.

A part is a chunk of a pipeline stage with at most two units of each kind; a unit is a layer, or the layers that are
recomputed together. Its step is cut into segments. Units of a kind take and keep the same memory, so that the segments
of one stand for those of all. Without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalith.plan.work import Work

MOST = 10  # tensors that are named
FROZEN = -1
FIRST, LAST = " first", " last"
"""Added to the operations of a step's first and last micro-batches where FSDP2 treats them otherwise."""

Bytes = Mapping[str, int]
"""Category (weights, gradients, optimizer, activations, logits, communication, libraries) -> bytes."""


class Tensors(NamedTuple):
    """Tensors that are alike."""

    size: int  # bytes of each
    category: str
    what: str  # shape, dtype, and where it was made
    number: int = 1


class Mark(NamedTuple):
    """Start of a segment: the operation (F, B, W, step or ""), and the piece of the part that is computed."""

    event: int  # number of events before it
    operation: str
    piece: str


@dataclass(frozen=True)
class Segment:
    """Memory of a piece of an operation, against that at its start.

    Attributes:
        change: at its end.
        peak: at the moment when it was largest.
        alive: the largest tensors of the piece at that moment, in the backward pass also those of the forward pass.
        kept: the largest tensors that it made and that were there at its end.
        work: what it computes and sends.
    """

    change: Bytes = field(default_factory=dict)
    peak: Bytes = field(default_factory=dict)
    alive: Sequence[Tensors] = ()
    kept: Sequence[Tensors] = ()
    work: Work = field(default_factory=Work)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Segment:
        alive, kept = ([Tensors(*one) for one in saved[name]] for name in ("alive", "kept"))
        return cls(saved["change"], saved["peak"], alive, kept, Work.from_json(saved["work"]))


class Parameter(NamedTuple):
    """A parameter: elements, bytes of each, the kind of its bucket, and the bytes of its optimizer states.

    `group` is the number of its group in the optimizer, or `FROZEN` if it is not trained.
    """

    elements: int
    itemsize: int
    kind: tuple[str, ...]
    states: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Record:
    """What was seen of a part.

    Attributes:
        segments: by "operation piece"; pieces are the numbers of the units, "before" and "after" them.
        parameters: by the number of the unit, and "" for those outside of units.
        gradient_itemsize: bytes of an element of the gradients.
        left: tensors that stay from step to step beside weights, gradients and states.
        message: bytes of what goes to the next stage.
    """

    segments: Mapping[str, Segment]
    parameters: Mapping[str, Sequence[Parameter]]
    gradient_itemsize: int
    left: Segment
    message: int

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Record:
        """Rebuild what `dataclasses.asdict` and JSON made of a record."""
        return cls(
            {name: Segment.from_json(one) for name, one in saved["segments"].items()},
            {
                name: [
                    Parameter(count, size, tuple(kind), tuple(states), own) for count, size, kind, states, own in group
                ]
                for name, group in saved["parameters"].items()
            },
            saved["gradient_itemsize"],
            Segment.from_json(saved["left"]),
            saved["message"],
        )


def largest(tensors: Iterable[Tensors]) -> list[Tensors]:
    """Return the largest tensors, alike ones in one entry."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for one in tensors:
        counts[one[:3]] += one.number
    return [Tensors(*what, count) for what, count in sorted(counts.items(), reverse=True)[:MOST] if what[0]]


def replay(events: Sequence[int], tensors: Sequence[Tensors], marks: Sequence[Mark]) -> list[tuple[Mark, Segment]]:
    """Return the segments between marks.

    Args:
        events: the number of a tensor that is made, or its complement where it is freed, in order.
    """
    alive: set[int] = set()
    made_by: dict[int, str] = {}  # number of a tensor -> the piece that made it
    found = []
    for mark, end in zip(marks, [*(mark.event for mark in marks[1:]), len(events)], strict=True):
        own, top = range(mark.event, end), mark.event
        now = most = 0
        for place in own:
            number = events[place]
            now += tensors[number].size if number >= 0 else -tensors[~number].size
            if now > most:
                now, most, top = now, now, place + 1
        change, peak = Counter[str](), Counter[str]()
        snapshot = list(alive)
        for place in own:
            if place == top:
                peak, snapshot = Counter(change), list(alive)
            number = events[place]
            if number >= 0:
                alive.add(number)
                made_by[number] = mark.piece
                change[tensors[number].category] += tensors[number].size
            else:
                alive.discard(~number)
                change[tensors[~number].category] -= tensors[~number].size
        if top == end:
            peak, snapshot = Counter(change), list(alive)
        made = {number for number in (events[place] for place in own) if number >= 0}
        segment = Segment(
            dict(change),
            dict(peak),
            largest(tensors[n] for n in snapshot if made_by[n] == mark.piece),
            largest(tensors[n] for n in alive if n in made),
        )
        found.append((mark, segment))
    return found
