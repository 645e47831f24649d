"""Pipeline schedules as data: what each stage computes in which order, and the messages that follow from it.

A model is cut into `stages * chunks` parts; part `chunk * stages + stage` is chunk `chunk` of stage `stage`, so that
the parts go round the ring of stages `chunks` times. An operation is F (forward), B (backward) or W (weight
gradients) of one micro-batch in one chunk. In a schedule without W operations B computes all gradients; in one with
them ("split") B computes the gradient of the input only.

Each stage works its operations off one after the other. What it sends and receives follows from them: `steps` adds
the messages in the order in which they are posted. Two laws are tested by `simulator.py` for all small cases: the
order of sending on each directed edge of the ring is the order of receiving on its other end, and no stage waits for
ever.

Sources: 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473, section 2.2; ZB-H1, Qi et al. 2023,
arXiv:2401.10241, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from megalith.errors import LayoutError

Kind = Literal["F", "B", "W"]

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "forward")
"""Names for `make_schedule`; "forward" is for evaluation."""

PREFETCH = 1
"""Operations ahead of which a receive is posted. The message then travels beside the operation before, while a
buffer (and on a GPU the few cores of a waiting NCCL kernel) is held no longer than that takes."""

WINDOW = 2
"""Sends of one edge that may be unfinished. Bounds the memory of messages under way; `simulator.py` shows that no
schedule waits for it."""


class Op(NamedTuple):
    """One operation of a stage."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


class Message(NamedTuple):
    """A tensor on its way: an activation to the next stage of the ring or a gradient to the previous one."""

    gradient: bool
    # source, target: stages; equal where there is one stage, and nothing is sent then
    source: int
    target: int
    chunk: int  # of the receiver
    micro_batch: int  # that it belongs to

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    def __str__(self) -> str:
        what = "gradient" if self.gradient else "activation"
        return (
            f"{what} of micro-batch {self.micro_batch} (chunk {self.chunk}) from stage {self.source} to {self.target}"
        )


class Step(NamedTuple):
    """One operation with its communication, in the order in which a stage carries them out."""

    receives: tuple[Message, ...]  # receives to post first, for this operation or a later one
    needs: Message | None  # what the operation waits for; posted by this step or an earlier one, or local
    op: Op  # the operation
    settles: Message | None  # the earlier send to wait for before the next one is posted
    makes: Message | None  # what the operation gives; sent, or kept where it is local
    ends_micro_batch: bool  # this stage does nothing more for this micro-batch


@dataclass(frozen=True)
class Program:
    """What one stage does."""

    steps: tuple[Step, ...]
    has_backward: bool  # gradients are computed; else it is an evaluation
    is_split: bool  # weight gradients are operations of their own


@dataclass(frozen=True)
class Schedule:
    """The operations of all stages."""

    name: str
    stages: int
    chunks: int
    micro_batches: int
    ops: tuple[tuple[Op, ...], ...]

    @cached_property
    def is_split(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return any(op.kind == "W" for op in self.ops[0])

    @cached_property
    def has_backward(self) -> bool:
        return any(op.kind == "B" for op in self.ops[0])

    def needs(self, stage: int, op: Op) -> Message | None:
        """What an operation of a stage waits for; None for the first forward part, the last backward part and W."""
        part = op.chunk * self.stages + stage
        if op.kind == "W" or part == (0 if op.kind == "F" else self.stages * self.chunks - 1):
            return None
        gradient = op.kind == "B"
        source = (stage + (1 if gradient else -1)) % self.stages
        return Message(gradient, source, stage, op.chunk, op.micro_batch)

    def makes(self, stage: int, op: Op) -> Message | None:
        """What another stage gets from an operation; None for the last forward part, the first backward part and W."""
        part = op.chunk * self.stages + stage + (1 if op.kind == "F" else -1)
        if op.kind == "W" or not 0 <= part < self.stages * self.chunks:
            return None
        chunk, target = divmod(part, self.stages)
        return Message(op.kind == "B", stage, target, chunk, op.micro_batch)

    def program(self, stage: int) -> Program:
        """What a stage is to do, for the interpreter (parallel/pipeline.py); made once."""
        if stage not in self._programs:
            self._programs[stage] = Program(self.steps(stage), self.has_backward, self.is_split)
        return self._programs[stage]

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def steps(self, stage: int, *, prefetch: int = PREFETCH, window: int = WINDOW) -> tuple[Step, ...]:
        """The operations of a stage with their communication; see `PREFETCH` and `WINDOW`."""
        ops = self.ops[stage]
        needs = [self.needs(stage, op) for op in ops]
        last = {op.micro_batch: place for place, op in enumerate(ops)}
        sent: dict[bool, list[Message]] = {False: [], True: []}
        steps, posted = [], 0
        for place, op in enumerate(ops):
            wanted = needs[posted : place + prefetch + 1]
            posted = max(posted, place + prefetch + 1)
            settles, makes = None, self.makes(stage, op)
            if makes is not None and not makes.is_local:
                earlier = sent[makes.gradient]
                settles = earlier[-window] if len(earlier) >= window else None
                earlier.append(makes)
            receives = tuple(message for message in wanted if message is not None and not message.is_local)
            ends = last[op.micro_batch] == place
            steps.append(Step(receives, needs[place], op, settles, makes, ends))
        return tuple(steps)


@dataclass(frozen=True)
class Flags:
    """How the user calls the sizes of a schedule."""

    stages: str = "--pipeline-model-parallel-size"
    chunks: str = "--num-virtual-stages-per-pipeline-rank"
    micro_batches: str = "micro-batches per step (global batch / micro-batch / data-parallel size)"


def violations(name: str, stages: int, chunks: int, micro_batches: int, flags: Flags | None = None) -> list[str]:
    """Why there is no such schedule: one message for each rule that is broken, naming values and remedies."""
    flags = flags or Flags()
    found = [
        f"{flag} {value} is below 1; give 1 or more"
        for flag, value in ((flags.stages, stages), (flags.chunks, chunks), (flags.micro_batches, micro_batches))
        if value < 1
    ]
    if name not in SCHEDULES:
        found.append(f"there is no schedule {name}; choose one of {', '.join(SCHEDULES)}")
    if name in ("1f1b", "zb-h1") and chunks > 1:
        found.append(
            f"the schedule {name} has one chunk of layers per stage, {flags.chunks} {chunks} asks for more; "
            f"choose interleaved or {flags.chunks} 1"
        )
    if name == "interleaved" and min(stages, chunks, micro_batches) >= 1 and micro_batches % stages:
        below = micro_batches - micro_batches % stages
        nearest = f"{below} or {below + stages}" if below else str(stages)
        found.append(
            f"{flags.micro_batches} {micro_batches} is not divisible by {flags.stages} {stages}, which the "
            f"interleaved schedule needs; nearest: {nearest}, or {flags.chunks} 1 for 1f1b"
        )
    return found


@lru_cache(maxsize=64)
def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Make a schedule by its name, one of `SCHEDULES`, once for these sizes; LayoutError if there is none for them."""
    found = violations(name, stages, chunks, micro_batches)
    if found:
        raise LayoutError("\n".join(found))
    ops_of: Callable[[int], list[Op]] = {
        "1f1b": lambda stage: _one_forward_one_backward(stages, stage, micro_batches),
        "interleaved": lambda stage: _interleaved(stages, stage, chunks, micro_batches),
        "zb-h1": lambda stage: _zero_bubble(stages, stage, micro_batches),
        "forward": lambda stage: _rounds("F", stages, chunks, micro_batches),
    }[name]
    ops = tuple(tuple(ops_of(stage)) for stage in range(stages))
    return Schedule(name, stages, chunks, micro_batches, ops)


def default_schedule(chunks: int) -> str:
    """The schedule of a training run that names none."""
    return "1f1b" if chunks == 1 else "interleaved"


def _alternate(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    ops = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        ops += [forward, backward]
    return ops + backwards[len(forwards) - warm_up :]


def _one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[Op]:
    """As many forwards ahead as there are stages after this one; at most stages - stage activations live."""
    return _alternate(
        [Op("F", 0, micro_batch) for micro_batch in range(micro_batches)],
        [Op("B", 0, micro_batch) for micro_batch in range(micro_batches)],
        stages - stage - 1,
    )


def _rounds(kind: Kind, stages: int, chunks: int, micro_batches: int) -> list[Op]:
    """All operations of a kind: `stages` micro-batches go through the chunks of a stage before the next ones do."""
    order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Op(kind, chunk, micro_batch)
        for start in range(0, micro_batches, stages)
        for chunk in order
        for micro_batch in range(start, min(start + stages, micro_batches))
    ]


def _interleaved(stages: int, stage: int, chunks: int, micro_batches: int) -> list[Op]:
    """1F1B over chunks: the bubble shrinks by the number of chunks, for as many times the messages.

    The first backward of stage 0 comes back after (chunks - 1) * stages forwards of the earlier chunks and
    2 * (stages - 1) of the way to the last stage and back.
    """
    return _alternate(
        _rounds("F", stages, chunks, micro_batches),
        _rounds("B", stages, chunks, micro_batches),
        (chunks - 1) * stages + 2 * (stages - stage - 1),
    )


def _zero_bubble(stages: int, stage: int, micro_batches: int) -> list[Op]:
    """ZB-H1: 1F1B whose backward passes only gradients of inputs on, with weight gradients where a stage would idle.

    Stage s is s weight gradients behind, so that each stage holds as many activations as the first one of 1F1B.
    """
    ops: list[Op] = []
    for op in _one_forward_one_backward(stages, stage, micro_batches):
        ops.append(op)
        if op.kind == "B" and op.micro_batch >= stage:
            ops.append(Op("W", 0, op.micro_batch - stage))
    return ops + [Op("W", 0, micro_batch) for micro_batch in range(max(0, micro_batches - stage), micro_batches)]
