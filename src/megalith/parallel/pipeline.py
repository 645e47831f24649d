"""The interpreter of pipeline schedules: one loop that runs every program of schedules/pipeline.py.

A program says what to compute, what to send and receive and in which order; a `StageRunner` says how. Without pipeline
parallelism, evaluation also runs through this loop; training (train/step.py) only if it defers weight gradients.

Between forward and backward pass a micro-batch keeps its input and its graph in memory; the output is freed when it
has been sent, since its `GradientEdge` keeps the graph alive (Megatron's `deallocate_pipeline_outputs`).
Receives are posted one operation ahead and each send is awaited two sends later, so communication overlaps computation:
in gloo's threads, on NCCL's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from megalith.distributed.p2p import AsyncHandle, P2PChannels, receive, send
from megalith.kernels.torch_private import version_of
from megalith.nn.sink import GradientSink
from megalith.schedules.pipeline import Action, Message, Op, Program

Timed = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager that times a block under a name: one of `COMPUTATIONS`, or the wait for a message."""

COMPUTATIONS = {"F": "forward-compute", "B": "backward-compute", "W": "weight-gradient-compute"}
"""Kind of operation -> timer name. B is the full backward pass, or in a program with W only its input gradients."""


def no_timer(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class StageRunner(Protocol):
    """The computation of a pipeline stage.

    Each micro-batch is first passed to `activation_shape` or `prepare`, in order, so the runner can load data lazily.
    """

    def activation_shape(self, micro_batch: int) -> tuple[Sequence[int], torch.dtype]:
        """Return shape and dtype of the activations sent between stages, [S, B, D] for a transformer.

        They may differ by micro-batch, and are the same between all stages.
        """
        ...

    def prepare(self, op: Op) -> None:
        """Prepare for `op`, which is next; its input may not have arrived yet."""
        ...

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Compute one chunk of this stage for one micro-batch; `hidden` is None for the model's first chunk.

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
    p2p_channels: P2PChannels | None = None,
    deferred: DeferredWeightGrads | None = None,
    timed: Timed = no_timer,
) -> None:
    """Run all micro-batches of a step or an evaluation through this stage; all stages call it together.

    Args:
        p2p_channels: to and from the other stages; None with a single stage.
        deferred: this stage's gradient sink; required if the program splits the backward pass (zb-h1).
        timed: times computations and waits for messages.
    """
    assert deferred is not None or not program.is_split, "a program with W operations needs a DeferredWeightGrads"
    executor = _StageExecutor(program, runner, p2p_channels, deferred, timed)
    with torch.set_grad_enabled(program.has_backward):
        for action in program.actions:
            executor.execute(action)
        executor.finish()


class _StageExecutor:
    """State of a stage while it runs a program: messages in flight, and graphs awaiting their backward pass."""

    def __init__(
        self,
        program: Program,
        runner: StageRunner,
        p2p_channels: P2PChannels | None,
        deferred: DeferredWeightGrads | None,
        timed: Timed,
    ) -> None:
        self._runner, self._p2p_channels, self._timed = runner, p2p_channels, timed
        self._deferred = deferred if program.is_split else None
        self._has_backward = program.has_backward
        self._pending_recvs: dict[Message, AsyncHandle] = {}
        self._pending_sends: dict[Message, AsyncHandle] = {}
        self._local_messages: dict[Message, Tensor] = {}
        self._saved_graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge | None]] = {}

    def execute(self, action: Action) -> None:
        for message in action.receives:
            self._pending_recvs[message] = self._receive(message)
        self._runner.prepare(action.op)
        arrived = self._wait_for(action.input)
        with self._timed(COMPUTATIONS[action.op.kind]):
            output = self._compute(action.op, arrived)
        if action.wait_for_send is not None:
            self._pending_sends.pop(action.wait_for_send).wait()
        if action.output is not None:
            assert output is not None
            self._send(action.output, output)
        if action.ends_micro_batch:
            self._runner.release(action.op.micro_batch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for transfer in self._pending_sends.values():
            transfer.wait()
        undone = self._pending_recvs or self._local_messages or self._saved_graphs
        assert not undone, "the program ended with messages or graphs left over"

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
            backward_root: Tensor | GradientEdge | None = output
            if output.dim() > 0:  # a first stage of frozen embeddings alone has no graph
                backward_root = get_gradient_edge(output) if output.requires_grad else None
            self._saved_graphs[op.chunk, op.micro_batch] = hidden, backward_root
        return output.detach()

    def _backward(self, op: Op, grad: Tensor | None) -> Tensor | None:
        key = (op.chunk, op.micro_batch)
        hidden, backward_root = self._saved_graphs.pop(key)
        if backward_root is None:
            return None
        if self._deferred is None:
            torch.autograd.backward(backward_root, grad)
        else:
            with self._deferred.collect(key):
                torch.autograd.backward(backward_root, grad)
        if hidden is None:
            return None
        # A chunk's output need not depend on its input; the previous stage waits for a gradient all the same.
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

    def _receive(self, message: Message) -> AsyncHandle:
        assert self._p2p_channels is not None, "a pipeline of several stages needs p2p_channels"
        shape, dtype = self._runner.activation_shape(message.micro_batch)
        channel = self._p2p_channels.from_next if message.gradient else self._p2p_channels.from_previous
        return receive(channel, shape, dtype, self._p2p_channels.device)

    def _wait_for(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        if message.is_local:
            return self._local_messages.pop(message)
        with self._timed("backward-recv" if message.gradient else "forward-recv"):
            return self._pending_recvs.pop(message).wait()

    def _send(self, message: Message, tensor: Tensor) -> None:
        if message.is_local:
            self._local_messages[message] = tensor
            return
        assert self._p2p_channels is not None, "a pipeline of several stages needs p2p_channels"
        channel = self._p2p_channels.to_previous if message.gradient else self._p2p_channels.to_next
        self._pending_sends[message] = send(tensor, channel)


_Accumulate = Callable[[Parameter, Tensor, Tensor], None]


class _DeferredGradient(NamedTuple):
    """A weight gradient whose product is deferred: the sink method to call and its arguments."""

    accumulate: _Accumulate
    parameter: Parameter
    operands: tuple[Tensor, Tensor]
    versions: tuple[int, int]


class DeferredWeightGrads:
    """Gradient sink that forwards to another sink, at once or in `run_deferred` (zero-bubble schedules)."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._queues: dict[Hashable, list[_DeferredGradient]] = {}
        self._current_queue: list[_DeferredGradient] | None = None

    @property
    def defers(self) -> bool:
        return self._current_queue is not None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Defer the weight gradients computed inside until `run_deferred(key)`."""
        assert self._current_queue is None and key not in self._queues, f"{key} is deferred already"
        self._current_queue = self._queues[key] = []
        try:
            yield
        finally:
            self._current_queue = None

    @torch.no_grad()
    def run_deferred(self, key: Hashable) -> None:
        """Accumulate the weight gradients deferred under `key`, in the order of their backward passes."""
        for item in self._queues.pop(key):
            assert item.versions == _versions(*item.operands), (
                "an operand of a weight gradient was overwritten before the weight gradient was computed; "
                "pass buffer_reused=True where its memory is reused (GradientSink.accumulate_linear)"
            )
            item.accumulate(item.parameter, *item.operands)

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        """Accumulate or defer; never deferred with `buffer_reused` (`GradientSink.accumulate_linear`)."""
        if not self.defers or buffer_reused:
            self._sink.accumulate_linear(parameter, grad_TO, x_TI)
        else:
            self._defer(self._sink.accumulate_linear, parameter, grad_TO, x_TI)

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """Accumulate or defer (`GradientSink.accumulate_embedding`)."""
        if not self.defers:
            self._sink.accumulate_embedding(parameter, ids_T, grad_TD)
        else:
            self._defer(self._sink.accumulate_embedding, parameter, ids_T, grad_TD)

    def _defer(self, accumulate: _Accumulate, parameter: Parameter, first: Tensor, second: Tensor) -> None:
        assert self._current_queue is not None
        self._current_queue.append(_DeferredGradient(accumulate, parameter, (first, second), _versions(first, second)))


def _versions(first: Tensor, second: Tensor) -> tuple[int, int]:
    """Return torch's version counters of both tensors."""
    return version_of(first), version_of(second)
