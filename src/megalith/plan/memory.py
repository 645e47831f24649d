"""Memory of every kind of rank of a run, added up from the records of its parts; integers alone.

Weights, gradients and optimizer states follow from the parameters of all layers, laid out as the gradients are
(`flat`). The activations under way when an operation begins follow from the program of the stage, which is the one that
the run executes (schedules/pipeline.py); what an operation adds, from the segments of its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from math import lcm

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.flat import FlatLayout, lay_out_gradients
from megalith.layout import Group
from megalith.plan.devices import Device
from megalith.plan.record import FIRST, FROZEN, LAST, Parameter, Record, Segment, Tensors, largest
from megalith.plan.work import Work
from megalith.schedules.pipeline import Action, Op, make_schedule, round_of

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "libraries")
_ROUNDS = 4  # of a schedule, after which a pipeline repeats itself


@dataclass(frozen=True)
class Part:
    """A chunk of a stage with at most two units of each kind.

    Attributes:
        rank: the first one of its stage.
        units: their layers, by global numbers.
        recomputed: number of units that are recomputed; None where layers are not recomputed as a whole.
        kinds: of the units; equal kinds take equal memory.
    """

    rank: int
    is_first: bool
    is_last: bool
    units: tuple[tuple[int, ...], ...]
    recomputed: int | None
    kinds: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.units))


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks of some pipeline stages, in bytes by category.

    Attributes:
        stages: those that need as much, or a little less.
        layers: of each of these.
        allocated: between two steps.
        peak: at the moment when it is largest.
        moment: what is computed then.
        tensors: the largest ones at that moment.
        work: what is computed and sent in a forward (F) and a backward pass (B, with W for the weight gradients that a
            schedule puts off) of a micro-batch, and in the update (step).
    """

    stages: tuple[int, ...]
    layers: int
    allocated: Mapping[str, int]
    peak: Mapping[str, int]
    moment: str
    tensors: Sequence[Tensors]
    work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def allocated_bytes(self) -> int:
        return sum(self.allocated.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def plan_memory(run: RunConfig, device: Device, record_of: Callable[[Part], Record]) -> list[RankMemory]:
    """Return the memory of each kind of rank, in the order of the pipeline.

    Raises:
        ConfigError: T5 recomputes some layers of a stack.
    """
    if run.model.family.encoder_decoder and run.recompute and run.recompute.method == "block":
        raise ConfigError("--recompute-method block: of T5 its memory is not planned; use uniform in the plan")
    alike: dict[object, list[int]] = {}
    for stage in range(run.layout.pp):
        chunks = [_split(run, stage, number) for number in range(len(run.stages[stage]))]
        alike.setdefault(
            tuple((part.is_first, part.is_last, tuple(part.kinds[place] for place in order)) for part, order in chunks),
            [],
        ).append(stage)
    # Of stages with equal layers the first has the most micro-batches under way.
    return [_Stage(run, device, stages, record_of).memory() for stages in alike.values()]


def _split(run: RunConfig, stage: int, number: int) -> tuple[Part, list[int]]:
    """Return the part that stands for a chunk, and the number of the unit in it that stands for each of the chunk."""
    model, layout = run.model, run.layout
    again = run.recompute is not None and run.recompute.method != ""
    units: list[tuple[int, ...]] = []
    kinds: list[str] = []
    for stack, layers in stacks_of(run, run.stages[stage][number]).items():
        groups = run.recompute.groups(len(layers)) if run.recompute else [Group(range(len(layers)), again=False)]
        for group in groups:
            own = [layers[place] for place in group.layers]
            for unit in [tuple(own)] if group.again else [(layer,) for layer in own]:
                options: object = [
                    (model.experts[n], model.windows[n], model.rotated_layers[n]) for n in unit if not stack
                ]
                if stack:  # between two stacks are norm and embedding, and gradients of what all layers read
                    options = f"{stack} {len(unit)}{' top' * (unit[-1] == layers[-1])}"
                two = bool(stack) or model.lora_rank is not None  # below the lowest nothing is trained
                end = " first" * (unit[0] == layers[0]) + " last" * (unit[-1] == layers[-1])  # of what is gathered
                units.append(unit)
                kinds.append(
                    f"{'recomputed ' * group.again}{options}{' lowest' * (two and unit[0] in (0, layers[0]))}"
                    f"{end * run.fully_sharded}"
                )
    counts: Counter[str] = Counter()
    chosen = [place for place, kind in enumerate(kinds) if (counts.update([kind]) or counts[kind] <= 2)]
    last = {kinds[place]: index for index, place in enumerate(chosen)}
    part = Part(
        rank=layout.rank({"tp": 0, "cp": 0, "dp": 0, "pp": stage}),
        is_first=stage == number == 0,
        is_last=stage == layout.pp - 1 and number == len(run.stages[stage]) - 1,
        units=tuple(units[place] for place in chosen),
        recomputed=sum(kinds[place].startswith("recomputed") for place in chosen) if again else None,
        kinds=tuple(kinds[place] for place in chosen),
    )
    return part, [last[kind] for kind in kinds]


def stacks_of(run: RunConfig, layers: Sequence[int]) -> dict[str, Sequence[int]]:
    """Return the layers of a chunk by stack: of T5 the decoder's after the encoder's; of others one without a name."""
    if not run.model.family.encoder_decoder:
        return {"": layers}
    return {"encoder": layers, "decoder": range(len(layers), len(layers) + run.model.num_decoder_layers)}


@dataclass
class _Moment:
    """A moment of a step: bytes against a start, what is computed, and the tensors of both."""

    bytes: Mapping[str, int]
    text: str
    tensors: list[Tensors] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class _Chunk:
    """A chunk of a stage: its operations, each a sequence of pieces."""

    def __init__(self, part: Part, record: Record, order: Sequence[int], *, sharded: bool) -> None:
        self.record, self.order, self._seen, self._sharded = record, order, len(part.units), sharded
        self._unit = "layer" if all(len(unit) == 1 for unit in part.units) else "group of layers"
        units = [str(number) for number in order]
        passes = {
            way + kind: self._pieces(way + kind, pieces)
            for kind in (FIRST, "", LAST)
            for way, pieces in (
                ("F", ["batch", "before", *units, "after"]),
                ("B", ["after", *reversed(units), "before"]),
            )
        }
        self.forward, self.backward = passes["F"], passes["B"]
        self.changes = {name: _sum(piece.change for _, piece in pieces) for name, pieces in passes.items()}
        shared = ("weights", "gradients") if sharded else ()  # by all micro-batches
        self.kept, self.freed = (
            Counter({name: size for name, size in self.changes[way].items() if name not in shared}) for way in "FB"
        )
        self.peaks = {
            name: self._peak("forward" if name[0] == "F" else "backward", pieces) for name, pieces in passes.items()
        }
        self.peaks["W"] = self._peak("weight gradients", self._pieces("W", ["all"]))
        self.gathered, now = dict[str, tuple[int, int]](), 0  # by FSDP2, before and after an operation
        for name, change in self.changes.items():
            before, now = now, now + change["weights"] * sharded
            self.gathered[name] = before, now
        self.reduced = {name: change["gradients"] * sharded for name, change in self.changes.items()}

    def name(self, op: Op, number: int) -> str:
        """Return the name of an operation of one of so many micro-batches."""
        name = op.kind + (FIRST if op.micro_batch == 0 else LAST if op.micro_batch == number - 1 else "")
        return name if self.changes.get(name) else op.kind

    def _pieces(self, operation: str, names: Iterable[str]) -> list[tuple[str, Segment]]:
        found = ((name, self.record.segments.get(f"{operation} {name}")) for name in names)
        return [(name, segment) for name, segment in found if segment is not None]

    def _peak(self, what: str, pieces: Sequence[tuple[str, Segment]]) -> _Moment:
        """Return the largest moment of an operation against its start."""
        now, best = Counter[str](), _Moment({}, what)
        for place, (name, piece) in enumerate(pieces):
            here = _sum([now, piece.peak])
            if sum(here.values()) > best.total or place == 0:
                number = place - 1 if what == "forward" else len(pieces) - 1 - place
                where = f" at {self._unit} {number} of {len(self.order)}" if name.isdigit() else ""
                best = _Moment(here, f"{what} pass{where}" if what != "weight gradients" else what)
                best.tensors = [*self._earlier(what, place), *piece.alive]
            now.update(piece.change)
        return best

    def _earlier(self, what: str, place: int) -> list[Tensors]:
        """Return the tensors of the forward pass that other pieces keep at a moment."""
        if what == "forward":
            pieces = self.forward[:place]
        elif what == "backward":
            pieces = self.forward[: max(0, len(self.forward) - 1 - place)]
        else:
            pieces = []
        return self._tensors(pieces)

    def _tensors(self, pieces: Sequence[tuple[str, Segment]]) -> list[Tensors]:
        passing = "communication" if self._sharded else ""  # each unit frees what the one before has received
        return [one for _, piece in pieces for one in piece.kept if one.category != passing]

    def work(self) -> dict[str, Work]:
        """Return what a micro-batch computes and sends in each operation."""
        found = {"F": self.forward, "B": self.backward, "W": self._pieces("W", ["all"])}
        passes = {name: Work.of(piece.work for _, piece in pieces) for name, pieces in found.items()}
        for name, own in passes.items():  # what FSDP2 sends is that of all replicas' sums (`time`)
            passes[name] = replace(own, sent=tuple(one for one in own.sent if one.axis != "cp+dp"))
        more = len(self.order) / max(1, self._seen)  # nothing else is put off
        passes["W"] = Work(tuple(op._replace(number=more * op.number) for op in passes["W"].ops), passes["W"].sent)
        return passes

    def kept_tensors(self) -> list[Tensors]:
        return self._tensors(self.forward)

    def parameters(self) -> Iterable[Parameter]:
        """Yield the parameters of all layers."""
        for unit in self.order:
            yield from self.record.parameters.get(str(unit), ())
        yield from self.record.parameters.get("", ())


class _Stage:
    """Adds up the memory of the first of some stages that are alike."""

    def __init__(
        self, run: RunConfig, device: Device, stages: Sequence[int], record_of: Callable[[Part], Record]
    ) -> None:
        self.run, self.device, self.stages = run, device, tuple(stages)
        split = [_split(run, stages[0], number) for number in range(len(run.stages[stages[0]]))]
        sharded = run.fully_sharded
        self.chunks = [_Chunk(part, record_of(part), order, sharded=sharded) for part, order in split]
        # of whichever chunk: outputs of all but the last of the pipeline are alike
        self.message = max(chunk.record.message for chunk in self.chunks)
        if run.layout.pp > 1 and not self.message:
            self.message = self._message_size()

    def _message_size(self) -> int:
        """Return the bytes of the hidden states between stages."""
        run = self.run
        layout, precision = run.layout, run.precision.params_dtype
        itemsize = 4 if precision == "float32" or run.model.fp32_residual_connection else 2
        rows = run.data.seq_length // layout.cp // (layout.tp if run.parallel.sequence_parallel_here else 1)
        return rows * run.train.micro_batch_size * run.model.hidden_size * itemsize

    def memory(self) -> RankMemory:
        fixed = self._fixed()
        left = _sum(chunk.record.left.change for chunk in self.chunks)
        allocated = _sum([fixed, left, {"libraries": self.device.libraries}])
        moment = max(self._passes(), self._update(), key=lambda one: one.total)
        peak = _sum([allocated, moment.bytes])
        whole = [one for chunk in self.chunks for one in chunk.record.left.kept]
        if not self.run.fully_sharded:
            whole.append(Tensors(fixed["gradients"], "gradients", "gradients, flat"))
        return RankMemory(
            self.stages,
            sum(len(own) for chunk in self.run.stages[self.stages[0]] for own in stacks_of(self.run, chunk).values()),
            allocated,
            peak,
            moment.text,
            largest([*moment.tensors, *whole]),
            {name: Work.of(work) for name, work in self._work().items()},
        )

    def _work(self) -> dict[str, list[Work]]:
        """Return what is computed and sent in each operation, by chunk."""
        found: dict[str, list[Work]] = {"step": []}
        for chunk in self.chunks:
            for name, work in chunk.work().items():
                found.setdefault(name, []).append(work)
            ratio = float(self._updated(chunk))
            seen = chunk.record.segments["step all"].work
            scaled = tuple(op._replace(flops=op.flops * ratio, bytes=op.bytes * ratio) for op in seen.ops)
            found["step"].append(Work(scaled, seen.sent))
        return found

    def _updated(self, chunk: _Chunk) -> Fraction:
        """Return the parameters that the rank updates over those that were seen to be updated."""
        watched = (one for group in chunk.record.parameters.values() for one in group)
        updated, seen = (
            sum(one.elements for one in all_ if one.group != FROZEN) for all_ in (chunk.parameters(), watched)
        )
        ratio = Fraction(updated) / max(1, seen)
        return ratio / (self.run.layout.cp * self.run.layout.dp) if self.run.parallel.shards_optimizer_only else ratio

    def _fixed(self) -> Counter[str]:
        """Return the bytes of weights, gradients and optimizer states."""
        layout, block = self.run.layout, self.device.block
        whole = dict(enumerate(one for chunk in self.chunks for one in chunk.parameters()))
        parameters = {name: one for name, one in whole.items() if one.group != FROZEN}
        experts = layout.tp * layout.cp * layout.dp // (layout.expert_tp * layout.ep)
        has_experts = any(one.kind[:1] == ("experts",) for one in parameters.values())
        dense, sparse = layout.cp * layout.dp, experts if layout.ep > 1 or layout.expert_tp != layout.tp else 0
        replicas = lcm(dense, sparse if has_experts and sparse else 1)
        flat = lay_out_gradients(
            {str(name): (one.elements,) for name, one in parameters.items()},
            {str(name): one.kind for name, one in parameters.items()},
            1 if self.run.fully_sharded else replicas,
        )
        itemsize = max(chunk.record.gradient_itemsize for chunk in self.chunks)
        zero1 = self.run.parallel.shards_optimizer_only
        shares = {name: self._share(flat, str(name), one, dense, sparse or dense) for name, one in parameters.items()}
        sizes = {name: int(one.elements * shares[name]) for name, one in parameters.items()}
        ordered = sorted((name for name, size in sizes.items() if size), key=lambda name: parameters[name].group)
        left = self._offloaded * sum(sizes.values())
        on_host = {name for name in ordered if (left := left - sizes[name]) >= -1e-6}  # `optimizer.choose_offloaded`
        states = sum(
            _rounded(int(size * shares[name]), block)
            for name, one in parameters.items()
            if name not in on_host
            for size in one.states
        )
        flattened = parameters if zero1 and replicas > 1 else {}
        weights = sum(_rounded(one.elements * one.itemsize, block) for n, one in whole.items() if n not in flattened)
        if flattened:
            weights += _rounded(flat.size * next(iter(flattened.values())).itemsize, block)
        gradients = _rounded(flat.size * itemsize, block)
        return Counter(weights=weights, gradients=gradients, optimizer=states)

    @property
    def _offloaded(self) -> float:
        """Return the part of the optimizer states that is on the host; of a CPU all are, and none is moved."""
        return self.run.optimizer.offloaded if self.device.compute else 0.0

    def _share(self, flat: FlatLayout, name: str, parameter: Parameter, dense: int, experts: int) -> Fraction:
        """Return the part of a parameter that the first replica updates."""
        replicas = experts if parameter.kind[:1] == ("experts",) else dense
        if not self.run.parallel.shards_optimizer_only or replicas == 1 or not parameter.elements:
            return Fraction(1)
        (start, stop), bucket = flat.span(name), flat.bucket_of(name)
        end = bucket.start + (bucket.stop - bucket.start) // replicas
        return Fraction(max(0, min(stop, end) - start), stop - start)

    def _update(self) -> _Moment:
        """Return the largest moment of the optimizer's update, whose temporary tensors grow with the parameters."""
        found = _Moment({}, "update of the weights")
        for chunk in self.chunks:
            seen = chunk.record.segments["step all"]
            own = {name: int(size * max(self._updated(chunk), Fraction(1))) for name, size in seen.peak.items()}
            found = max(found, _Moment(own, found.text, list(seen.alive)), key=lambda one: one.total)
        return found

    def _passes(self) -> _Moment:
        """Return the largest moment of the forward and backward passes of a step, against its start."""
        run, pp = self.run, self.run.layout.pp
        number = min(run.num_micro_batches, _ROUNDS * round_of(run.pipeline_schedule, pp))
        schedule = make_schedule(run.pipeline_schedule, pp, len(self.chunks), max(1, number))
        sharded = self._fixed()["gradients"] if run.fully_sharded else 0  # those of the last step go as it begins
        under_way = _UnderWay(self.chunks, self.message, -sharded, number, is_split=schedule.is_split)
        best, best_total, what = _Moment({}, ""), -1, None
        for action in schedule.actions(self.stages[0]):
            here, chunk = under_way.begin(action), self.chunks[action.op.chunk]
            own = chunk.peaks[chunk.name(action.op, number)]
            total = sum(here.values()) + own.total
            if total > best_total:
                best, best_total, what = _Moment(_sum([here, own.bytes]), own.text), total, action.op
                others = under_way.others(action.op)
                kept = [one._replace(number=n * one.number) for c, n in others.items() for one in self._kept(c)]
                best.tensors = [*own.tensors, *kept]
                if sum(others.values()):
                    best.text += f", with {sum(others.values())} other micro-batches under way"
            under_way.end(action)
        assert what is not None, "a schedule has operations"
        return best

    def _kept(self, chunk: int) -> list[Tensors]:
        return self.chunks[chunk].kept_tensors()


class _UnderWay:
    """Micro-batches between their first and last operation on a stage, and messages to and from other stages.

    Args:
        gradients: bytes of FSDP2's as a step begins, against those between steps.
        number: of micro-batches.
    """

    def __init__(self, chunks: Sequence[_Chunk], message: int, gradients: int, number: int, *, is_split: bool) -> None:
        self._chunks, self._message, self._is_split = chunks, message, is_split
        self._gradients, self._number, self._gathered = gradients, number, dict[int, int]()
        self._held: dict[tuple[int, int], Counter[str]] = {}
        self._posted = self._sent = self._local = 0

    def begin(self, action: Action) -> Counter[str]:
        """Return the bytes that are there when an operation begins, its input included."""
        self._posted += len(action.receives)
        messages, chunk = self._posted + self._sent + self._local, self._chunks[action.op.chunk]
        self._gathered[action.op.chunk] = chunk.gathered.get(chunk.name(action.op, self._number), (0, 0))[0]
        sharded = {"weights": sum(self._gathered.values()), "gradients": self._gradients}
        return _sum([*self._held.values(), sharded, {"communication": messages * self._message}])

    def others(self, op: Op) -> Counter[int]:
        """Return the number of other micro-batches under way, by chunk."""
        return Counter(chunk for chunk, micro_batch in self._held if (chunk, micro_batch) != (op.chunk, op.micro_batch))

    def end(self, action: Action) -> None:
        """Account for the end of an operation."""
        op, chunk = action.op, self._chunks[action.op.chunk]
        name = chunk.name(op, self._number)
        self._gradients += chunk.reduced.get(name, 0)
        self._gathered[op.chunk] = chunk.gathered.get(name, (0, 0))[1]
        if action.input is not None:
            self._posted -= not action.input.is_local
            self._local -= action.input.is_local
        output = {"activations": -self._message * (action.output is not None)}
        key = (op.chunk, op.micro_batch)
        if op.kind == "F":
            received = {"activations": self._message * (action.input is not None)}
            self._held[key] = _sum([chunk.kept, output, received])
        elif op.kind == "B" and self._is_split:
            self._held[key] = _sum([self._held[key], chunk.freed, output, output])  # the input goes, its gradient too
        else:
            del self._held[key]
        self._sent -= action.wait_for_send is not None
        if action.output is not None:
            self._sent += not action.output.is_local
            self._local += action.output.is_local


def _sum(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return total


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block
