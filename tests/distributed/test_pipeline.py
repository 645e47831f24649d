"""The pipeline interpreter: every schedule gives the loss and every gradient of one process, in fp64.

The model is a stack of Linear + tanh with biases, cut into layers by `split_layers`; micro-batches have their own
lengths. Weight gradients go through a sink, biases through autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.distributed.context import ParallelContext
from megalith.layout import Layout, Stages, read_parts, split_as_given, split_layers
from megalith.nn.linear import Linear
from megalith.nn.placement import Replicated
from megalith.nn.sink import attach_sink
from megalith.optim.gradients import GradientBuffers
from megalith.parallel.pipeline import DeferredWeightGrads, run
from megalith.schedules.pipeline import WINDOW, Op, make_schedule

SIZE, BATCH, LAYERS = 5, 2, 8


def _layer(number: int) -> Linear:
    """Layer `number` of the model, the same wherever it is made."""
    layer = Linear(SIZE, SIZE, Replicated(), bias=True, dtype=torch.float64, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return layer


def _input(micro_batch: int) -> Tensor:
    """[S, B, D] with a length of its own."""
    length = 3 + micro_batch * 7 % 5
    generator = torch.Generator().manual_seed(1000 + micro_batch)
    return torch.randn(length, BATCH, SIZE, dtype=torch.float64, generator=generator)


def _loss(hidden: Tensor, micro_batches: int) -> Tensor:
    return hidden.square().mean() / micro_batches


class Toy:
    """A stage of the stack; notes what it is told."""

    def __init__(self, layers: Sequence[Sequence[int]], ctx: ParallelContext, micro_batches: int) -> None:
        self.chunks = [{number: _layer(number) for number in numbers} for numbers in layers]
        self.micro_batches = micro_batches
        self.is_last_stage = ctx.pp.is_last
        self.losses: dict[int, float] = {}
        self.ops: list[Op] = []
        self.met: list[int] = []
        self.ended: list[int] = []

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{number}.{name}", parameter)
            for chunk in self.chunks
            for number, layer in chunk.items()
            for name, parameter in layer.named_parameters()
        ]

    def activation_shape(self, micro_batch: int) -> tuple[Sequence[int], torch.dtype]:
        self.met.append(micro_batch)
        return _input(micro_batch).shape, torch.float64

    def prepare(self, op: Op) -> None:
        self.met.append(op.micro_batch)
        self.ops.append(op)

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        x = _input(micro_batch) if hidden is None else hidden
        for layer in self.chunks[chunk].values():
            x = torch.tanh(layer(x))
        if not (self.is_last_stage and chunk == len(self.chunks) - 1):
            # Not dense, and sent all the same; of a stage without layers the input itself.
            return x.transpose(0, 1).contiguous().transpose(0, 1) if self.chunks[chunk] else x
        loss = _loss(x, self.micro_batches)
        self.losses[micro_batch] = loss.item()
        return loss

    def release(self, micro_batch: int) -> None:
        self.ended.append(micro_batch)


def _train(
    name: str, chunks: int, micro_batches: int, given: Stages | None = None
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses by micro-batch (last stage) and gradients by name of one step on this rank.

    `given` are the layers by [stage][chunk], where they are not divided evenly.
    """
    ctx = ParallelContext.create(Layout(pp=dist.get_world_size()), torch.device("cpu"))
    stages = given or split_layers(LAYERS, ctx.pp.size, chunks)
    toy = Toy(stages[ctx.pp.index], ctx, micro_batches)
    gradients = GradientBuffers([*toy.named(), ("unused", nn.Parameter(torch.zeros(1).double()))], torch.float64)
    deferred = DeferredWeightGrads(gradients) if name == "zb-h1" else None
    for chunk in toy.chunks:
        for layer in chunk.values():
            attach_sink(layer, deferred or gradients)
    program = make_schedule(name, ctx.pp.size, chunks, micro_batches).program(ctx.pp.index)
    for _ in range(2):  # a second step finds nothing left over from the first
        gradients.begin()
        toy.ops, toy.met, toy.ended = [], [], []
        run(program, toy, ctx.p2p_channels, deferred)
        gradients.finish()
    assert toy.ops == [action.op for action in program.actions]
    assert list(dict.fromkeys(toy.met)) == sorted(toy.ended) == list(range(micro_batches))
    return toy.losses, {key: gradients.grads[key].clone() for key, _ in toy.named()}


def _alone(micro_batches: int) -> tuple[dict[int, float], dict[str, Tensor]]:
    """What `_train` should give, by autograd in one process."""
    layers = [_layer(number) for number in range(LAYERS)]
    losses = {}
    for micro_batch in range(micro_batches):
        x = _input(micro_batch)
        for layer in layers:
            x = torch.tanh(layer(x))
        loss = _loss(x, micro_batches)
        loss.backward()
        losses[micro_batch] = loss.item()
    grads = {f"{number}.{name}": p.grad for number, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return losses, {name: grad for name, grad in grads.items() if grad is not None}


CASES = [
    ("1f1b", 2, 1, 1),
    ("1f1b", 2, 1, 5),
    ("1f1b", 4, 1, 2),
    ("1f1b", 4, 1, 8),
    ("interleaved", 2, 2, 2),
    ("interleaved", 2, 2, 6),
    ("interleaved", 4, 2, 4),
    ("interleaved", 4, 2, 8),
    ("interleaved:3", 2, 2, 5),
    ("interleaved:7", 4, 2, 12),
    ("zb-h1", 2, 1, 1),
    ("zb-h1", 2, 1, 5),
    ("zb-h1", 4, 1, 3),
    ("zb-h1", 4, 1, 8),
    ("1f1b", 1, 1, 3),
    ("interleaved", 1, 2, 3),
    ("zb-h1", 1, 1, 3),
]


def _same_as_alone(results: Sequence[tuple[dict[int, float], dict[str, Tensor]]], micro_batches: int) -> None:
    expected_losses, expected = _alone(micro_batches)
    losses = {key: value for found, _ in results for key, value in found.items()}
    grads = {key: value for _, found in results for key, value in found.items()}
    assert losses.keys() == expected_losses.keys() and grads.keys() == expected.keys()
    for key, loss in losses.items():
        assert loss == pytest.approx(expected_losses[key], rel=1e-12)
    for name, grad in grads.items():
        assert expected[name].abs().max() > 1e-6
        assert (grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


@pytest.mark.parametrize(("name", "stages", "chunks", "micro_batches"), CASES)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Any, name: str, stages: int, chunks: int, micro_batches: int
) -> None:
    _same_as_alone(ranks.run(stages, _train, name, chunks, micro_batches), micro_batches)


@pytest.mark.parametrize(("name", "ends"), [("1f1b", (1, 3)), ("zb-h1", (4, 4))])
def test_stages_of_their_own_sizes(ranks: Any, name: str, ends: tuple[int, int]) -> None:
    """Also stages without any layer, which pass on what they get."""
    stages = split_layers(LAYERS, 4, first=ends[0], last=ends[1])
    _same_as_alone(ranks.run(4, _train, name, 1, 5, stages), 5)


@pytest.mark.parametrize(
    ("layout", "stages", "name", "chunks"),
    [("E|t*4|t*3|tL", 4, "1f1b", 1), ("E|t*3||(t|)*4tL", 4, "interleaved:5", 2), ("Et|t|t*6|L", 2, "interleaved", 2)],
)
def test_stages_of_a_layout(ranks: Any, layout: str, stages: int, name: str, chunks: int) -> None:
    """What `--pipeline-model-parallel-layout` says, empty stages at the ends and between them."""
    given = split_as_given(LAYERS, stages, read_parts(layout), 0)
    assert {len(parts) for parts in given} == {chunks}
    _same_as_alone(ranks.run(stages, _train, name, chunks, 10, given), 10)


def _evaluate(chunks: int, micro_batches: int) -> dict[int, float]:
    ctx = ParallelContext.create(Layout(pp=dist.get_world_size()), torch.device("cpu"))
    toy = Toy(split_layers(LAYERS, ctx.pp.size, chunks)[ctx.pp.index], ctx, micro_batches)
    run(make_schedule("forward", ctx.pp.size, chunks, micro_batches).program(ctx.pp.index), toy, ctx.p2p_channels)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for _, parameter in toy.named())
    return toy.losses


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(1, 1, 2), (2, 1, 7), (2, 2, 3), (4, 2, 6)])
def test_evaluation(ranks: Any, stages: int, chunks: int, micro_batches: int) -> None:
    """Forward only, also where the micro-batches do not divide by the stages."""
    *others, last = ranks.run(stages, _evaluate, chunks, micro_batches)
    assert others == [{}] * (stages - 1)
    assert last == pytest.approx(_alone(micro_batches)[0], rel=1e-12)


class _IntoWatched(torch.autograd.Function):
    """Identity, into memory of numpy, whose end can be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: list[weakref.ref[Any]]) -> Tensor:
        memory = x.numpy().copy().view(_Memory)
        watched.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Memory(np.ndarray):  # type: ignore[type-arg]
    """An array that weak references may name."""


class _Watched(Toy):
    """A stage that counts its outputs that are still in memory when a forward pass begins."""

    watched: list[weakref.ref[Any]]
    most: int

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        self.most = max(self.most, sum(reference() is not None for reference in self.watched))
        output = super().forward(chunk, micro_batch, hidden)
        dense: Tensor = output if output.dim() == 0 else _IntoWatched.apply(output.contiguous(), self.watched)
        return dense


def _most_outputs() -> int:
    ctx = ParallelContext.create(Layout(pp=dist.get_world_size()), torch.device("cpu"))
    toy = _Watched(split_layers(LAYERS, ctx.pp.size)[ctx.pp.index], ctx, 12)
    toy.watched, toy.most = [], 0
    run(make_schedule("1f1b", ctx.pp.size, 1, 12).program(ctx.pp.index), toy, ctx.p2p_channels)
    return toy.most


def test_outputs_are_let_go_when_they_are_sent(ranks: Any) -> None:
    """Stage 0 of four holds four graphs, and not more outputs than may be under way."""
    assert ranks.run(4, _most_outputs)[0] == WINDOW < 4
