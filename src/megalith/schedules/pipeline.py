"""Pipeline schedules as data: operations of each stage in order, and the messages between stages.

A model is cut into `stages * chunks` parts; part `chunk * stages + stage` is chunk `chunk` of stage `stage`, so that
the parts go round the ring of stages `chunks` times. An operation is F (forward), B (backward) or W (weight
gradients) of one micro-batch in one chunk. In a schedule without W operations B computes all gradients; in one with
them ("split") B computes the gradient of the input only.

Each stage executes its operations in sequence. `actions` derives the messages, in the order in which they are posted.
`simulator.py` tests two invariants for all small cases: messages are sent on each directed edge of the ring in the
order in which the other end receives them, and no stage waits for ever.

Sources: 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473, section 2.2; ZB-H1, Qi et al. 2023,
arXiv:2401.10241, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal, NamedTuple

from megalith.errors import LayoutError

Kind = Literal["F", "B", "W"]

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "forward")
"""Names for `make_schedule`; "forward" is for evaluation. `grouped` adds the size of a group to "interleaved"."""

PREFETCH = 1
"""Number of operations by which a receive is posted early. The transfer overlaps with the previous operation, and the
buffer (on a GPU also the SMs of a waiting NCCL kernel) is occupied no longer than that."""

WINDOW = 2
"""Maximum number of pending sends per edge; larger by what a group has more micro-batches than there are stages, which
wait on their way from the last stage to the first. Bounds the memory of messages in flight; `simulator.py` shows that
no schedule waits because of it."""


class Op(NamedTuple):
    """Operation of a stage."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


class Message(NamedTuple):
    """Activation sent to the next stage of the ring, or gradient sent to the previous one."""

    gradient: bool
    # stages; equal with a single stage, where nothing is sent
    source: int
    target: int
    chunk: int  # of the receiver
    micro_batch: int

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    def __str__(self) -> str:
        what = "gradient" if self.gradient else "activation"
        return (
            f"{what} of micro-batch {self.micro_batch} (chunk {self.chunk}) from stage {self.source} to {self.target}"
        )


class Action(NamedTuple):
    """Operation of a stage with its communication; fields in the order of execution."""

    receives: tuple[Message, ...]  # receives to post first, for this operation or a later one
    input: Message | None  # message that the operation waits for; its receive is already posted, or it is local
    op: Op  # the operation
    wait_for_send: Message | None  # earlier send to wait for before the output is sent
    output: Message | None  # message that the operation produces; kept if it is local
    ends_micro_batch: bool  # whether this is the stage's last operation for this micro-batch


@dataclass(frozen=True)
class Program:
    """Actions of one stage."""

    actions: tuple[Action, ...]
    has_backward: bool  # False for evaluation
    is_split: bool  # whether weight gradients are separate operations


@dataclass(frozen=True)
class Schedule:
    """Operations of all stages."""

    name: str
    stages: int
    chunks: int
    micro_batches: int
    ops: tuple[tuple[Op, ...], ...]
    window: int = WINDOW

    @cached_property
    def is_split(self) -> bool:
        """Return whether weight gradients are separate operations."""
        return any(op.kind == "W" for op in self.ops[0])

    @cached_property
    def has_backward(self) -> bool:
        return any(op.kind == "B" for op in self.ops[0])

    def input_of(self, stage: int, op: Op) -> Message | None:
        """Return the message that an operation waits for; None for the first forward and last backward part, and W."""
        part = op.chunk * self.stages + stage
        if op.kind == "W" or part == (0 if op.kind == "F" else self.stages * self.chunks - 1):
            return None
        gradient = op.kind == "B"
        source = (stage + (1 if gradient else -1)) % self.stages
        return Message(gradient, source, stage, op.chunk, op.micro_batch)

    def output_of(self, stage: int, op: Op) -> Message | None:
        """Return the message that an operation produces; None for the last forward and first backward part, and W."""
        part = op.chunk * self.stages + stage + (1 if op.kind == "F" else -1)
        if op.kind == "W" or not 0 <= part < self.stages * self.chunks:
            return None
        chunk, target = divmod(part, self.stages)
        return Message(op.kind == "B", stage, target, chunk, op.micro_batch)

    def program(self, stage: int) -> Program:
        """Return the program of a stage for the interpreter (parallel/pipeline.py), cached."""
        if stage not in self._programs:
            self._programs[stage] = Program(self.actions(stage), self.has_backward, self.is_split)
        return self._programs[stage]

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def actions(self, stage: int, *, prefetch: int = PREFETCH, window: int | None = None) -> tuple[Action, ...]:
        """Return the operations of a stage with their communication; see `PREFETCH` and `WINDOW`."""
        ops, window = self.ops[stage], window or self.window
        inputs = [self.input_of(stage, op) for op in ops]
        last = {op.micro_batch: place for place, op in enumerate(ops)}
        sent: dict[bool, list[Message]] = {False: [], True: []}
        actions, posted = [], 0
        for place, op in enumerate(ops):
            wanted = inputs[posted : place + prefetch + 1]
            posted = max(posted, place + prefetch + 1)
            wait_for_send, output = None, self.output_of(stage, op)
            if output is not None and not output.is_local:
                earlier = sent[output.gradient]
                wait_for_send = earlier[-window] if len(earlier) >= window else None
                earlier.append(output)
            receives = tuple(message for message in wanted if message is not None and not message.is_local)
            ends = last[op.micro_batch] == place
            actions.append(Action(receives, inputs[place], op, wait_for_send, output, ends))
        return tuple(actions)


@dataclass(frozen=True)
class SizeNames:
    """Names of the sizes of a schedule in messages."""

    stages: str = "--pipeline-model-parallel-size"
    chunks: str = "--num-virtual-stages-per-pipeline-rank"
    micro_batches: str = "micro-batches per step (global batch / micro-batch / data-parallel size)"


def grouped(name: str, group: int | None) -> str:
    """Return the name of an interleaved schedule in which `group` micro-batches pass a chunk before the next chunk."""
    return name if group is None else f"{name}:{group}"


def _split_name(name: str) -> tuple[str, int | None]:
    """Return a name of `SCHEDULES` and the size of its groups; the inverse of `grouped`."""
    plain, _, group = name.partition(":")
    return (plain, int(group)) if plain == "interleaved" and group.isdecimal() else (name, None)


def round_of(name: str, stages: int) -> int:
    """Return after how many micro-batches the stages of a pipeline repeat what they do."""
    return _split_name(name)[1] or stages


def fits_groups(stages: int, group: int, micro_batches: int) -> bool:
    """Return whether the first stage never waits for the last one as the micro-batches pass the chunks in groups.

    Each group, what is left for the last one included, needs as many micro-batches as there are stages.
    """
    return group >= stages and (micro_batches % group == 0 or micro_batches % group >= stages)


def nearest_fitting(stages: int, group: int, micro_batches: int, unit: int = 1) -> str:
    """Return the numbers of micro-batches around this one that `fits_groups` accepts, times `unit`: `8 or 12`."""
    below = next((size for size in range(micro_batches - 1, 0, -1) if fits_groups(stages, group, size)), None)
    above = next(size for size in count(micro_batches + 1) if fits_groups(stages, group, size))
    return f"{unit * above}" if below is None else f"{unit * below} or {unit * above}"


def violations(name: str, stages: int, chunks: int, micro_batches: int, flags: SizeNames | None = None) -> list[str]:
    """Return a message for each rule that such a schedule breaks, with values and remedies."""
    flags = flags or SizeNames()
    found = [
        f"{flag} {value} is below 1; give 1 or more"
        for flag, value in ((flags.stages, stages), (flags.chunks, chunks), (flags.micro_batches, micro_batches))
        if value < 1
    ]
    name, group = _split_name(name)
    if name not in SCHEDULES:
        found.append(f"unknown schedule {name}; choose one of {', '.join(SCHEDULES)}")
    if name in ("1f1b", "zb-h1") and chunks > 1:
        found.append(
            f"the schedule {name} has one chunk of layers per stage, {flags.chunks} {chunks} asks for more; "
            f"choose interleaved or {flags.chunks} 1"
        )
    if name == "interleaved" and min(stages, chunks, micro_batches) >= 1:
        found += _group_violations(stages, group, micro_batches, flags)
    return found


def _group_violations(stages: int, group: int | None, micro_batches: int, flags: SizeNames) -> list[str]:
    if group is not None and group < stages:
        return [
            f"the schedule interleaved:{group} has groups of fewer micro-batches than {flags.stages} {stages}; choose "
            f"interleaved:{stages} or more"
        ]
    if fits_groups(stages, group or stages, micro_batches):
        return []
    what = f"is not divisible by {flags.stages} {stages}, which the interleaved schedule needs"
    if group is not None:
        what = f"leaves {micro_batches % group} for the last group of {group}, fewer than {flags.stages} {stages}"
    nearest = nearest_fitting(stages, group or stages, micro_batches)
    return [f"{flags.micro_batches} {micro_batches} {what}; nearest: {nearest}, or {flags.chunks} 1 for 1f1b"]


@lru_cache(maxsize=64)
def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Build the schedule of this name, one of `SCHEDULES` or `grouped`, cached; LayoutError if the sizes do not fit."""
    found = violations(name, stages, chunks, micro_batches)
    if found:
        raise LayoutError("\n".join(found))
    group = min(round_of(name, stages), max(stages, micro_batches))
    ops_of: Callable[[int], list[Op]] = {
        "1f1b": lambda stage: _one_forward_one_backward(stages, stage, micro_batches),
        "interleaved": lambda stage: _interleaved(stages, stage, chunks, micro_batches, group),
        "zb-h1": lambda stage: _zero_bubble(stages, stage, micro_batches),
        "forward": lambda stage: _groups("F", stages, chunks, micro_batches),
    }[_split_name(name)[0]]
    ops = tuple(tuple(ops_of(stage)) for stage in range(stages))
    return Schedule(name, stages, chunks, micro_batches, ops, WINDOW + group - stages)


def default_schedule(chunks: int) -> str:
    """Return the schedule of training if the configuration names none."""
    return "1f1b" if chunks == 1 else "interleaved"


def _alternate(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    ops = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        ops += [forward, backward]
    return ops + backwards[len(forwards) - warm_up :]


def _one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[Op]:
    """Return 1F1B: as many warm-up forwards as stages follow; at most stages - stage live activations."""
    return _alternate(
        [Op("F", 0, micro_batch) for micro_batch in range(micro_batches)],
        [Op("B", 0, micro_batch) for micro_batch in range(micro_batches)],
        stages - stage - 1,
    )


def _groups(kind: Kind, group: int, chunks: int, micro_batches: int) -> list[Op]:
    """Return all operations of a kind: `group` micro-batches pass all chunks of a stage before the next ones."""
    order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Op(kind, chunk, micro_batch)
        for start in range(0, micro_batches, group)
        for chunk in order
        for micro_batch in range(start, min(start + group, micro_batches))
    ]


def _interleaved(stages: int, stage: int, chunks: int, micro_batches: int, group: int) -> list[Op]:
    """Return 1F1B over chunks, which divides the bubble by the number of chunks and multiplies the messages by it.

    Stage 0 runs its first backward after (chunks - 1) * group forwards of the earlier chunks and 2 * (stages - 1)
    during the way to the last stage and back.
    """
    return _alternate(
        _groups("F", group, chunks, micro_batches),
        _groups("B", group, chunks, micro_batches),
        (chunks - 1) * group + 2 * (stages - stage - 1),
    )


def _zero_bubble(stages: int, stage: int, micro_batches: int) -> list[Op]:
    """Return ZB-H1: 1F1B whose B computes input gradients only, with weight gradients in idle time.

    Stage s delays s weight gradients, so that each stage holds as many activations as the first stage of 1F1B.
    """
    ops: list[Op] = []
    for op in _one_forward_one_backward(stages, stage, micro_batches):
        ops.append(op)
        if op.kind == "B" and op.micro_batch >= stage:
            ops.append(Op("W", 0, op.micro_batch - stage))
    return ops + [Op("W", 0, micro_batch) for micro_batch in range(max(0, micro_batches - stage), micro_batches)]
