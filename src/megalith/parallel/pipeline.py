"""The interpreter of pipeline schedules: one loop that runs every program of schedules/pipeline.py.

A program says what to compute, what to send and receive and in which order; a `StageRunner` says how. Evaluations of a
process that is a pipeline by itself (one stage, one chunk) run through the same loop; its steps need no schedule
(train/step.py).

Between forward and backward pass a micro-batch keeps its input and its graph in memory; the output is freed when it
has been sent, since its gradient edge keeps the graph alive (Megatron's `deallocate_pipeline_outputs`).
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
"""Returns a context manager that times a block under a name: one of `COMPUTATIONS`, or the wait for a message."""

COMPUTATIONS = {"F": "forward-compute", "B": "backward-compute", "W": "weight-gradient-compute"}


def no_timer(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class StageRunner(Protocol):
    """The computation of a pipeline stage.

    Micro-batches are first named (`activation_shape`, `before`) in order, so that the runner can load their data then.
    """

    def activation_shape(self, micro_batch: int) -> tuple[Sequence[int], torch.dtype]:
        """Return shape and dtype of the activations sent between stages, [S, B, D] for a transformer.

        They may differ by micro-batch, and are the same between all stages.
        """
        ...

    def before(self, op: Op) -> None:
        """Prepare for `op`, which is next; its input may not have arrived yet."""
        ...

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Compute one chunk of this stage for one micro-batch; `hidden` is None for the first chunk of all.

        Returns:
            Hidden states for the next stage; from the last chunk the scalar to differentiate, scaled as the gradients
            should be. In an evaluation the last chunk may return anything.
        """
        ...

    def release(self, micro_batch: int) -> None:
        """Free the inputs of a micro-batch after its last use on this stage."""
        ...


def run(
    program: Program,
    runner: StageRunner,
    links: PipelineLinks | None = None,
    deferred: DeferredSink | None = None,
    timed: Timed = no_timer,
) -> None:
    """Run all micro-batches of a step or an evaluation through this stage; all stages call it together.

    Args:
        links: to the other stages; None where there is one.
        deferred: the sink of its layers, for a program that splits the backward pass.
        timed: times computations and waits for messages.
    """
    assert deferred is not None or not program.is_split, "a program with W operations needs a DeferredSink"
    worker = _Worker(program, runner, links, deferred, timed)
    with torch.set_grad_enabled(program.has_backward):
        for step in program.steps:
            worker.carry_out(step)
        worker.finish()


class _Worker:
    """State of a stage while it runs a program: messages in flight, and graphs awaiting their backward pass."""

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
        arrived = self._wait_for(step.input)
        with self._timed(COMPUTATIONS[step.op.kind]):
            made = self._compute(step.op, arrived)
        if step.wait_for_send is not None:
            self._leaving.pop(step.wait_for_send).wait()
        if step.output is not None:
            assert made is not None
            self._send(step.output, made)
        if step.ends_micro_batch:
            self._runner.release(step.op.micro_batch)

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
        self._deferred.run_deferred((op.chunk, op.micro_batch))
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
        shape, dtype = self._runner.activation_shape(message.micro_batch)
        edge = self._links.from_next if message.gradient else self._links.from_previous
        return receive(edge, shape, dtype, self._links.device)

    def _wait_for(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        if message.is_local:
            return self._kept.pop(message)
        with self._timed("backward-recv" if message.gradient else "forward-recv"):
            return self._arriving.pop(message).wait()

    def _send(self, message: Message, tensor: Tensor) -> None:
        if message.is_local:
            self._kept[message] = tensor
            return
        assert self._links is not None, "a pipeline of several stages needs links"
        edge = self._links.to_previous if message.gradient else self._links.to_next
        self._leaving[message] = send(tensor, edge)


class _DeferredGradient(NamedTuple):
    """A weight gradient whose product is deferred: the sink method to call and its arguments."""

    accumulate: Callable[[Parameter, Tensor, Tensor], None]
    parameter: Parameter
    factors: tuple[Tensor, Tensor]
    versions: tuple[int, int]


class DeferredSink:
    """Gradient sink that forwards to another sink: at once, or deferred until `run_deferred` (zero-bubble
    schedules)."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._queues: dict[Hashable, list[_DeferredGradient]] = {}
        self._open: list[_DeferredGradient] | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Defer the weight gradients computed inside until `run_deferred(key)`."""
        assert self._open is None and key not in self._queues, f"weight gradients of {key} are deferred already"
        self._open = self._queues[key] = []
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def run_deferred(self, key: Hashable) -> None:
        """Accumulate the weight gradients deferred under `key`, in the order in which they came."""
        for item in self._queues.pop(key):
            assert item.versions == _versions(*item.factors), (
                "a factor of a weight gradient was overwritten before the weight gradient was computed; "
                "pass lent=True where its memory is reused (GradientSink.matmul)"
            )
            item.accumulate(item.parameter, *item.factors)

    def matmul(self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, lent: bool = False) -> None:
        """As `GradientSink.matmul`; lent factors are never deferred."""
        if self._open is None or lent:
            self._sink.matmul(parameter, grad_TO, x_TI)
        else:
            self._defer(self._sink.matmul, parameter, grad_TO, x_TI)

    def rows(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """As `GradientSink.rows`."""
        if self._open is None:
            self._sink.rows(parameter, ids_T, grad_TD)
        else:
            self._defer(self._sink.rows, parameter, ids_T, grad_TD)

    def _defer(
        self,
        accumulate: Callable[[Parameter, Tensor, Tensor], None],
        parameter: Parameter,
        first: Tensor,
        second: Tensor,
    ) -> None:
        assert self._open is not None
        self._open.append(_DeferredGradient(accumulate, parameter, (first, second), _versions(first, second)))


def _versions(first: Tensor, second: Tensor) -> tuple[int, int]:
    """Return torch's version counters of both tensors."""
    return version_of(first), version_of(second)
