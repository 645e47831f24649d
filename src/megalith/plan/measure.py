"""A step of a part of a model on torch's meta device, whose tensors have shapes and no memory.

The part is built, trained for two steps of one micro-batch (with FSDP2 of three where a step has several) by the code
that trains a run, and watched in the second one. Other ranks are not there: collectives return what they are given
(`comm`). The capability of the device that the plan is for decides which kernels are taken.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megalith
from megalith import device as devices
from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients
from megalith.config import RunConfig
from megalith.device import HOST, Capability, nvidia
from megalith.distributed.context import Axis, ParallelContext
from megalith.distributed.rng import Stream
from megalith.models.language_model import LanguageModel, Stage
from megalith.optim.gradients import GradientBuffers
from megalith.optim.optimizer import Optimizer
from megalith.plan import experts as routing
from megalith.plan.devices import Device
from megalith.plan.experts import replaced, routed
from megalith.plan.memory import Part
from megalith.plan.record import FIRST, FROZEN, LAST, Mark, Parameter, Record, Segment, Tensors, largest, replay
from megalith.plan.work import Op as Launch
from megalith.plan.work import Sent, Work, count_op, size_of
from megalith.schedules.pipeline import Op
from megalith.train import step as training
from megalith.train.step import MicroBatchRunner

META = torch.device("meta")
_PACKAGE = str(Path(megalith.__file__).parent)
_CATEGORIES = {
    "distributed": "communication",
    "optim": "optimizer",
    "optim/gradients.py": "gradients",
    "parallel/fsdp.py": "communication",
}


_IN_PLACE = (torch.ops.aten._fused_sgd_.default,)
"""Operators without results that torch lacks on the meta device."""
_NO_LAUNCH = {
    *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "detach", "set_", "_unsafe_view"),
    "all_gather_copy_in",  # of FSDP2: this rank's rows alone
}


class _Started:
    """A collective of a plan, from its start to the wait for it."""

    def __init__(self, sent: Sent, ops: list[Launch]) -> None:
        self.sent, self._ops, self._start, self._end = sent, ops, len(ops), len(ops)

    def wait(self) -> None:
        self._end = len(self._ops)

    def done(self) -> Sent:
        meanwhile = Work.of([Work(tuple(self._ops[self._start : self._end]))])
        return self.sent._replace(under=meanwhile.ops)


class MemoryTrace(TorchDispatchMode):
    """Follows the memory of all tensors of a device: `events` and `tensors` as of `replay`.

    On the meta device `ops` are the launches, and `collectives` what the axes of a plan were to send.

    Args:
        block: bytes of whose multiples a tensor takes memory.
    """

    def __init__(self, device: torch.device, block: int = 1) -> None:
        super().__init__()
        self.events: list[int] = []
        self.tensors: list[Tensors] = []
        self.marks: list[Mark] = []
        self.ops: list[Launch] = []
        self.collectives: list[_Started] = []
        self._places: list[tuple[int, int]] = []  # of the marks among these
        self._device, self._block = device, block
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._alive: set[int] = set()
        resize, see = torch.UntypedStorage.resize_, self._resized  # by which FSDP2 frees what it has gathered
        self._watched = replaced(torch.UntypedStorage, resize_=lambda memory, size: see(memory, resize(memory, size)))

    def __enter__(self) -> Self:
        self._watched.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watched.__exit__(*error)

    def mark(self, operation: str, piece: str = "") -> None:
        """Start a segment."""
        self.marks.append(Mark(len(self.events), operation, piece))
        self._places.append((len(self.ops), len(self.collectives)))

    def start(self, operation: str, axis: Axis, tensor: Tensor | None) -> _Started:
        """Receive a collective of an axis of a plan."""
        size = 0 if tensor is None else size_of(tensor) * (axis.size if operation == "all_gather" else 1)
        self.collectives.append(_Started(Sent(axis.name, operation, size), self.ops))
        return self.collectives[-1]

    def works(self) -> list[Work]:
        """Return what is computed and sent from each mark to the next."""
        ends = [*self._places[1:], (len(self.ops), len(self.collectives))]
        return [
            Work.of([Work(tuple(self.ops[start:stop]), tuple(one.done() for one in self.collectives[first:last]))])
            for (start, first), (stop, last) in zip(self._places, ends, strict=True)
        ]

    def made(self, start: int, stop: int) -> set[int]:
        """Return the tensors that were made between two events and are there at the second."""
        alive: set[int] = set()
        for number in self.events[start:stop]:
            (alive.add if number >= 0 else alive.discard)(max(number, ~number))
        return alive

    def name_gradients(self) -> None:
        """Call gradients what backward passes made and kept, which are autograd's tensors and FSDP2's."""
        ends = [*self.marks[1:], Mark(len(self.events), "", "")]
        starts = dict[str, int]()  # operation -> its first event
        for mark, end in zip(self.marks, ends, strict=True):
            if mark.operation[:1] == "B" and end.operation != mark.operation:
                for number in self.made(starts.pop(mark.operation, mark.event), end.event):
                    self.tensors[number] = self.tensors[number]._replace(category="gradients")
            elif mark.operation[:1] == "B":
                starts.setdefault(mark.operation, mark.event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lacking = self._device == META and func in _IN_PLACE
        out = None if lacking else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            wraps = hasattr(tensor, "__tensor_flatten__")  # others, as DTensor does, and has no memory
            if isinstance(tensor, Tensor) and tensor.device == self._device and not wraps:
                self._see(tensor)
        if self._device == META:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name, schema = func._schema.name.partition("::")[2], func._schema
        kinds = [one.alias_info is None or one.alias_info.is_write for one in schema.returns]
        if name in _NO_LAUNCH or (kinds and not any(kinds)):  # a view
            return
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        if any(tensor.device == META for tensor in tensors):
            given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | kwargs
            self.ops.append(count_op(name, list(given.values()), out, causal=bool(given.get("is_causal"))))

    def _see(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        if memory in self._known:
            return
        size = -(-memory.nbytes() // self._block) * self._block
        category, where = _place()
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        what = f"{shape} {str(tensor.dtype).removeprefix('torch.')}, {where}"
        number = self._known[memory] = len(self.tensors)
        self.tensors.append(Tensors(size, category, what))
        self._resized(memory, memory)
        weakref.finalize(memory, self._end, number).atexit = False

    def _resized(self, memory: Any, resized: Any) -> Any:
        number = self._known.get(memory)
        if number is not None and not memory.nbytes():
            self._end(number)
        elif number is not None and number not in self._alive:
            self._alive.add(number)
            self.events.append(number)
        return resized

    def _end(self, number: int) -> None:
        if number in self._alive:
            self._alive.remove(number)
            self.events.append(~number)


def _place() -> tuple[str, str]:
    """Return category and function of the package that makes a tensor."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "init_all_gather_outputs":  # of FSDP2
            return "weights", "gathered"
        if file.startswith(_PACKAGE) and not file.startswith((f"{_PACKAGE}/plan/", f"{_PACKAGE}/cli/")):
            file = file[len(_PACKAGE) + 1 :]
            function = frame.f_code.co_name
            if file == "nn/loss.py" and function == "take":
                return "logits", "logits"
            category = _CATEGORIES.get(file) or _CATEGORIES.get(file.partition("/")[0], "activations")
            return category, f"{file} {function}"
        frame = frame.f_back
    return "activations", "autograd"


def _attend(
    able: Capability, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, **options: Any
) -> Any:
    """Take the attention kernel of the planned device, which torch SDPA would not on the meta device."""
    scale, aten = options["scale"], torch.ops.aten
    if able is HOST:
        if dropout:
            return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, scale=scale)[0]
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0]
    if mask is None and "flash" in able.attention and q.dtype in able.half:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
    if (repeats := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout, causal, scale=scale)[0]


class _RMSNorm(torch.autograd.Function):
    """The fused kernels of GPUs, which torch would compose of others on the meta device: one launch of each pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] * x, torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    weight = torch.ones(tuple(shape), dtype=x.dtype, device=x.device) if weight is None else weight
    normed: Tensor = _RMSNorm.apply(x, weight)
    return normed


@contextmanager
def planned(device: Device) -> Iterator[None]:
    """Let the meta device stand for a device within the block."""
    able = HOST if device.compute is None else nvidia(device.name, device.compute, device.gib * 2**30)
    before = devices.HOST_KINDS
    devices.DESCRIBED[META] = able
    devices.HOST_KINDS = (*before, META.type) if able is HOST else before
    try:
        kernels: dict[str, Any] = {"scaled_dot_product_attention": partial(_attend, able)}
        if able is not HOST:
            kernels["rms_norm"] = _rms_norm
        with replaced(nn.functional, **kernels):
            yield
    finally:
        devices.HOST_KINDS = before
        del devices.DESCRIBED[META]


def context_of(run: RunConfig, rank: int, start: Callable[[str, Axis, Any], Any] = lambda *_: None) -> ParallelContext:
    """Return the context of a rank without process groups, and without other replicas to share its updates with.

    Args:
        start: receives each collective.
    """
    layout, solo = run.layout, ParallelContext.solo(META)
    axes = {}
    for names, axis in solo.axes.items():
        ordered = axis.name.split("+")
        (ranks,) = (ranks for ranks in layout.groups(*ordered) if rank in ranks)
        shares = names in (frozenset(("cp", "dp")), frozenset(("edp",))) and not run.fully_sharded
        axes[names] = axis if shares else Axis(axis.name, ranks, ranks.index(rank), planned=start)
    pairs = ((ranks[0], ranks[-1]) for ranks in layout.groups("pp") if layout.pp > 1)
    ends = next((Axis("ends", pair, pair.index(rank), planned=start) for pair in pairs if rank in pair), None)
    return ParallelContext(layout, rank, META, axes, ends)


def measure(run: RunConfig, part: Part, vocab_size: int, device: Device) -> Record:
    """Return what a part of the model needs on a device.

    Args:
        vocab_size: padded.
    """
    if not (part.units or part.is_first or part.is_last):  # it passes on what it gets
        return Record({"step all": Segment()}, {}, 0, Segment(), 0)
    run = replace(run, optimizer=replace(run.optimizer, optimizer_cpu_offload=False))  # of whole ranks (`memory`)
    if part.recomputed is not None and run.train.recompute_method == "block":
        run = replace(run, train=replace(run.train, recompute_num_layers=part.recomputed))
    if run.model.family.encoder_decoder:
        encoder = sum(layer < run.model.num_layers for layer in part.layers)
        decoder = len(part.layers) - encoder
        run = replace(run, model=replace(run.model, num_layers=encoder, decoder_num_layers=decoder))
    stage = Stage(part.layers, is_first=part.is_first, is_last=part.is_last)
    moved = replaced(training, to_device=lambda x, device: x.to(device))  # pinned memory is of accelerators
    with planned(device), MemoryTrace(META, device.block) as trace, routed(run, trace.start), moved:
        context = context_of(run, part.rank, trace.start)
        trace.mark("", "weights")
        chunks = build_chunks(run, vocab_size, context, Stream(1), stages=[stage])
        optimizer = build_run_optimizer(run, chunks, context)
        deferred = defer_weight_gradients(run, chunks, optimizer)
        trace.mark("", "first step")
        step = partial(_step, run, context, chunks[0], optimizer, deferred, trace)
        step(None)
        optimizer.zero_grad()
        trace.mark("", "left")
        message = step(part.units)
        trace.mark("", "again")
        if run.layout.ep > 1:  # for the time, which a balanced router would take
            with replaced(routing, ROWS=1):
                step(part.units)
    if run.fully_sharded:
        trace.name_gradients()
    found = replay(trace.events, trace.tensors, trace.marks)
    first, end, again = (
        next(number for number, (mark, _) in enumerate(found) if mark.piece == piece)
        for piece in ("first step", "left", "again")
    )
    left = _left(trace, found[first][0].event, found[end][0].event)
    works = {_name(mark): work for (mark, _), work in zip(found[end:], trace.works()[end:], strict=True)}
    segments = {
        _name(mark): replace(segment, work=works[_name(mark)]) for mark, segment in found[end:again] if mark.operation
    }
    itemsize = optimizer.gradients.dtype.itemsize
    return Record(segments, _parameters(chunks[0], optimizer, part.units), itemsize, left, message)


def _name(mark: Mark) -> str:
    return f"{mark.operation} {mark.piece}".strip()


def _left(trace: MemoryTrace, start: int, stop: int) -> Segment:
    """Return what was made between two events and is there at the second."""
    alive = trace.made(start, stop)
    change: dict[str, int] = {}
    for number in alive:
        one = trace.tensors[number]
        change[one.category] = change.get(one.category, 0) + one.size
    return Segment(change, change, kept=largest(trace.tensors[number] for number in alive))


def _parameters(
    model: LanguageModel, optimizer: Optimizer, units: Sequence[Sequence[int]]
) -> dict[str, list[Parameter]]:
    gradients = optimizer.gradients
    blocks = iter(model.blocks())  # of prediction are after those of the units
    unit_of = {
        parameter: str(number)
        for number, layers in enumerate(units)
        for block in islice(blocks, len(layers))
        for parameter in block.parameters()
    }
    states: dict[str, list[int]] = {}
    for box in optimizer.state_boxes():
        states.setdefault(box.name.partition(".")[2], []).append(box.tensor.numel() * box.tensor.element_size())
    found: dict[str, list[Parameter]] = {}
    groups = {name: number for number, group in enumerate(optimizer.groups) for name in group.names}
    for name, parameter in model.named_parameters():
        if isinstance(gradients, GradientBuffers):
            kind = gradients.layout.bucket_of(name).kind if name in groups else ()
            sizes = parameter.numel(), parameter.element_size()
        else:  # of the first rank, which has as many rows as others have with padding
            kind, (start, stop) = (), gradients.owned_range(name)
            sizes = stop - start, model.dtype.itemsize
        one = Parameter(*sizes, kind, tuple(states.get(name, ())), groups.get(name, FROZEN))
        found.setdefault(unit_of.get(parameter, ""), []).append(one)
    return found


def _batch(run: RunConfig) -> dict[str, Tensor]:
    shape = (run.train.micro_batch_size, run.data.seq_length)
    if run.model.family.encoder_decoder:  # of zeros, so that there is padding
        long = torch.zeros(shape, dtype=torch.int64, device="cpu")
        short = long.new_zeros(shape[0], run.data.decoder_seq_length or 0)
        decoder = dict.fromkeys(("text_dec", "labels", "loss_mask", "dec_mask"), short)
        return {"text_enc": long, "enc_mask": long, **decoder}
    if run.model.family.objective == "masked":  # values decide: some words are hidden, and there is padding
        fields = ("text", "types", "labels", "padding_mask", "loss_mask")
        batch = {name: torch.zeros(shape, dtype=torch.int64, device="cpu") for name in fields}
        batch["loss_mask"][:, : ceil(run.data.mask_prob * shape[1])] = 1
        return {**batch, "is_random": batch["text"][:, 0]}
    ids = {name: torch.zeros(shape, dtype=torch.int64, device=META) for name in ("tokens", "labels", "position_ids")}
    return {**ids, "loss_mask": torch.ones(shape, device=META)}


def _step(
    run: RunConfig,
    context: ParallelContext,
    model: LanguageModel,
    optimizer: Optimizer,
    deferred: Any,
    trace: MemoryTrace,
    units: Sequence[Sequence[int]] | None,
) -> int:
    """Train one step of one micro-batch, with FSDP2 of a first, another and a last one if there are several.

    Mark its pieces if `units` are given. Return the bytes of a message.
    """
    several = run.fully_sharded and run.num_micro_batches > 1
    kinds = (FIRST, "", LAST) if several else ("",)
    batches = (_batch(run) for _ in kinds)
    runner = MicroBatchRunner([model], batches, context, num_micro_batches=run.num_micro_batches)
    model.train()
    optimizer.zero_grad(len(kinds) if several else run.num_micro_batches)
    for number, kind in enumerate(kinds):
        message = _micro_batch(runner, number, kind, deferred, trace, units)
    if units is not None:
        trace.mark("step", "all")
    optimizer.measure()
    optimizer.complete_step([0.0, 1e6, 0.0], 1e-4, 0.1)
    return message


def _micro_batch(
    runner: MicroBatchRunner,
    number: int,
    kind: str,
    deferred: Any,
    trace: MemoryTrace,
    units: Sequence[Sequence[int]] | None,
) -> int:
    """Compute both passes of a micro-batch; `kind` is added to the names of its operations."""
    (model,) = runner.chunks
    mark = (lambda *names: None) if units is None else trace.mark
    hooks = _mark_units(model, trace, units, kind) if units else []
    hidden = grad = None
    mark(f"F{kind}", "batch")
    shape, dtype = runner.activation_shape(number)
    mark("", "input")
    if not model.stage.is_first:
        hidden = torch.empty(shape, dtype=dtype, device=META, requires_grad=True)
    mark(f"F{kind}", "before")
    runner.prepare(Op("F", 0, number))
    output = runner.forward(0, number, hidden)
    root: Any = output if output.dim() == 0 else get_gradient_edge(output)
    output = output.detach()
    message = 0 if output.dim() == 0 else output.untyped_storage().nbytes()
    if message:
        grad = torch.empty_like(output)
        mark("", "message")
    del output
    mark(f"B{kind}", "after")
    if deferred is None:
        torch.autograd.backward(root, grad)
    else:
        with deferred.collect(0):
            torch.autograd.backward(root, grad)
    del root
    runner.release(number)
    for hook in hooks:
        hook.remove()
    mark("W", "all")
    if deferred is not None:
        deferred.run_deferred(0)
    mark("", "sent")
    return message


def _mark_units(model: LanguageModel, trace: MemoryTrace, units: Sequence[Sequence[int]], kind: str) -> list[Any]:
    """Mark where units begin in either pass; return the handles of the hooks."""
    blocks, hooks = list(model.blocks()), []
    passed: set[str] = set()  # recomputation calls layers again

    def enters(name: str) -> bool:
        new = name not in passed
        passed.add(name)
        return new

    def begin(piece: str, first: bool, module: nn.Module, args: Any) -> None:
        if enters(f"begin {piece}"):
            trace.mark(f"F{kind}", piece)
            if first and args[0].requires_grad:
                args[0].register_hook(lambda grad: trace.mark(f"B{kind}", "before"))

    def end(piece: str, last: bool, module: nn.Module, args: Any, output: Tensor) -> None:
        if enters(f"end {piece}"):
            output.register_hook(lambda grad: trace.mark(f"B{kind}", piece))
            if last:
                trace.mark(f"F{kind}", "after")

    start = 0
    for number, layers in enumerate(units):
        stop = start + len(layers)
        is_first, is_last = number == 0, number == len(units) - 1
        hooks.append(blocks[start].register_forward_pre_hook(partial(begin, str(number), is_first), prepend=True))
        hooks.append(blocks[stop - 1].register_forward_hook(partial(end, str(number), is_last), prepend=True))
        start = stop
    return hooks
