"""The interpreter of pipeline schedules: one loop that runs every program of schedules/pipeline.py.

A program says what to compute, what to send and receive and in which order; a `StageRunner` says how. Evaluations of a
process that is a pipeline by itself (one stage, one chunk) run through the same loop; its steps need no schedule
(train/step.py).

What is in memory for a micro-batch between its forward and its backward pass is the input and the graph; the output
is let go when it has been sent, for the graph is kept by its end (Megatron's `deallocate_pipeline_outputs`).
Receives are posted an operation ahead and sends are not awaited before the one after the next, so that both travel
beside the computation: in gloo's threads, in NCCL's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from megalith.distributed.p2p import Pending, PipelineLinks, receive, send
from megalith.kernels.torch_private import version_of
from megalith.nn.sink import GradientSink
from megalith.schedules.pipeline import Message, Op, Program, Step

Timed = Callable[[str], AbstractContextManager[None]]
"""Measures a block by the name of what is done in it: `COMPUTATIONS`, or the wait for a message."""

COMPUTATIONS = {"F": "forward-compute", "B": "backward-compute", "W": "weight-gradient-compute"}


def untimed(name: str) -> AbstractContextManager[None]:
    """No one wants to know."""
    return nullcontext()


class StageRunner(Protocol):
    """What a stage computes, and what it wants to know.

    Each micro-batch is first mentioned (`border`, `before`) in order, so that its data may be drawn then.
    """

    def border(self, micro_batch: int) -> tuple[Sequence[int], torch.dtype]:
        """Shape and dtype of the hidden states between two stages, [S, B, D] for a transformer; may differ by
        micro-batch, and is the same between all stages."""
        ...

    def before(self, op: Op) -> None:
        """`op` is next; it may have to wait for its input."""
        ...

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Compute one chunk of this stage for one micro-batch; `hidden` is None for the first chunk of all.

        Returns:
            Hidden states for the part after; from the last of all the scalar to differentiate, scaled as the gradients
            are to be. In an evaluation what the last part returns is left to itself.
        """
        ...

    def end(self, micro_batch: int) -> None:
        """This stage is done with a micro-batch."""
        ...


def run(
    program: Program,
    runner: StageRunner,
    links: PipelineLinks | None = None,
    deferred: DeferredSink | None = None,
    timed: Timed = untimed,
) -> None:
    """Run all micro-batches of a step, or of an evaluation, through this stage. All stages call it at the same time.

    Args:
        links: to the other stages; None where there is one.
        deferred: the sink of its layers, for a program that splits the backward pass.
        timed: measures what is computed, and how long messages are waited for.
    """
    assert deferred is not None or not program.is_split, "a program with W operations needs a DeferredSink"
    worker = _Worker(program, runner, links, deferred, timed)
    with torch.set_grad_enabled(program.has_backward):
        for step in program.steps:
            worker.carry_out(step)
        worker.finish()


class _Worker:
    """A stage in the course of a program: messages under way, and the graphs that wait for their backward pass."""

    def __init__(
        self,
        program: Program,
        runner: StageRunner,
        links: PipelineLinks | None,
        deferred: DeferredSink | None,
        timed: Timed,
    ) -> None:
        self._runner, self._links, self._timed = runner, links, timed
        self._deferred = deferred if program.is_split else None
        self._has_backward = program.has_backward
        self._arriving: dict[Message, Pending] = {}
        self._leaving: dict[Message, Pending] = {}
        self._kept: dict[Message, Tensor] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}

    def carry_out(self, step: Step) -> None:
        for message in step.receives:
            self._arriving[message] = self._receive(message)
        self._runner.before(step.op)
        arrived = self._take(step.needs)
        with self._timed(COMPUTATIONS[step.op.kind]):
            made = self._compute(step.op, arrived)
        if step.settles is not None:
            self._leaving.pop(step.settles).wait()
        if step.makes is not None:
            assert made is not None
            self._give(step.makes, made)
        if step.ends_micro_batch:
            self._runner.end(step.op.micro_batch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for transfer in self._leaving.values():
            transfer.wait()
        assert not (self._arriving or self._kept or self._graphs), "the program left something undone"

    def _compute(self, op: Op, arrived: Tensor | None) -> Tensor | None:
        if op.kind == "F":
            return self._forward(op, arrived)
        if op.kind == "B":
            return self._backward(op, arrived)
        assert self._deferred is not None
        self._deferred.play((op.chunk, op.micro_batch))
        return None

    def _forward(self, op: Op, hidden: Tensor | None) -> Tensor:
        if hidden is not None and self._has_backward:
            hidden.requires_grad_()
        output = self._runner.forward(op.chunk, op.micro_batch, hidden)
        if self._has_backward:
            end = output if output.dim() == 0 else get_gradient_edge(output)
            self._graphs[op.chunk, op.micro_batch] = hidden, end
        return output.detach()

    def _backward(self, op: Op, grad: Tensor | None) -> Tensor | None:
        key = (op.chunk, op.micro_batch)
        hidden, end = self._graphs.pop(key)
        if self._deferred is None:
            torch.autograd.backward(end, grad)
        else:
            with self._deferred.collect(key):
                torch.autograd.backward(end, grad)
        if hidden is None:
            return None
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

    def _receive(self, message: Message) -> Pending:
        assert self._links is not None, "a pipeline of several stages needs links"
        shape, dtype = self._runner.border(message.micro_batch)
        edge = self._links.from_next if message.gradient else self._links.from_previous
        return receive(edge, shape, dtype, self._links.device)

    def _take(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        if message.is_local:
            return self._kept.pop(message)
        with self._timed("backward-recv" if message.gradient else "forward-recv"):
            return self._arriving.pop(message).wait()

    def _give(self, message: Message, tensor: Tensor) -> None:
        if message.is_local:
            self._kept[message] = tensor
            return
        assert self._links is not None, "a pipeline of several stages needs links"
        edge = self._links.to_previous if message.gradient else self._links.to_next
        self._leaving[message] = send(tensor, edge)


class _Gift(NamedTuple):
    """A gradient that is not yet computed."""

    give: Callable[[Parameter, Tensor, Tensor], None]
    parameter: Parameter
    factors: tuple[Tensor, Tensor]
    versions: tuple[int, int]


class DeferredSink:
    """Passes everything on to another sink: at once, or when it is told to."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._queues: dict[Hashable, list[_Gift]] = {}
        self._open: list[_Gift] | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Put off what is given inside, until `play(key)`."""
        assert self._open is None and key not in self._queues, f"weight gradients of {key} are put off already"
        self._open = self._queues[key] = []
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def play(self, key: Hashable) -> None:
        """Pass on what was put off under `key`, in the order in which it came."""
        for gift in self._queues.pop(key):
            assert gift.versions == _versions(*gift.factors), (
                "a factor of a weight gradient was overwritten before the weight gradient was computed; "
                "whoever uses its memory again must lend it (GradientSink.matmul)"
            )
            gift.give(gift.parameter, *gift.factors)

    def matmul(self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, lent: bool = False) -> None:
        """As `GradientSink.matmul`; what is only lent cannot be put off."""
        if self._open is None or lent:
            self._sink.matmul(parameter, grad_TO, x_TI)
        else:
            self._put_off(self._sink.matmul, parameter, grad_TO, x_TI)

    def rows(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """As `GradientSink.rows`."""
        if self._open is None:
            self._sink.rows(parameter, ids_T, grad_TD)
        else:
            self._put_off(self._sink.rows, parameter, ids_T, grad_TD)

    def _put_off(
        self, give: Callable[[Parameter, Tensor, Tensor], None], parameter: Parameter, first: Tensor, second: Tensor
    ) -> None:
        assert self._open is not None
        self._open.append(_Gift(give, parameter, (first, second), _versions(first, second)))


def _versions(first: Tensor, second: Tensor) -> tuple[int, int]:
    """How often the memory of each was written to by torch."""
    return version_of(first), version_of(second)
