"""Which layers are recomputed, what is kept between the passes, and that a recomputation repeats its draws."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megalith.distributed.context import Axis
from megalith.distributed.rng import Stream
from megalith.layout import Recompute
from megalith.nn.linear import Linear
from megalith.nn.placement import Split
from megalith.nn.recompute import RecomputedNorm, recomputed
from megalith.nn.region import SOLO
from megalith.parallel.tensor import TensorParallel


@pytest.mark.parametrize(
    ("method", "num_layers", "layers", "again", "plain"),
    [
        ("uniform", 1, 3, [[0], [1], [2]], []),
        ("uniform", 2, 5, [[0, 1], [2, 3], [4]], []),
        ("uniform", 9, 3, [[0, 1, 2]], []),
        ("uniform", 2, 0, [], []),
        ("block", 2, 4, [[0], [1]], [2, 3]),
        ("block", 4, 4, [[0], [1], [2], [3]], []),
        ("block", 9, 2, [[0], [1]], []),
        ("block", 1, 0, [], []),
    ],
)
def test_the_groups_of_a_stage(
    method: str, num_layers: int, layers: int, again: list[list[int]], plain: list[int]
) -> None:
    groups = list(Recompute(method, num_layers).groups(layers))
    assert [list(group.layers) for group in groups if group.again] == again
    assert [layer for group in groups if not group.again for layer in group.layers] == plain
    assert [layer for group in groups for layer in group.layers] == list(range(layers)), "in order"


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """What autograd keeps for the backward passes of what is computed inside."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel():  # torch 2.11 keeps an empty tensor besides
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield tensors


def test_the_input_alone_is_kept() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        return (x.exp() * x.sin()).tanh().cos()

    with kept() as plainly:
        wanted = torch.autograd.grad(compute(x).sum(), x)[0]
    with kept() as tensors:
        y = recomputed(compute, x, region=SOLO)
    assert len(plainly) > 4
    assert [tensor.data_ptr() for tensor in tensors] == [x.data_ptr()]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


class _Sink:
    """Writes down which parameter got what."""

    def __init__(self) -> None:
        self.gifts: list[tuple[torch.nn.Parameter, Tensor]] = []

    def accumulate_linear(
        self, parameter: torch.nn.Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        self.gifts.append((parameter, grad_TO.t() @ x_TI))

    def accumulate_embedding(self, parameter: torch.nn.Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        raise AssertionError("there is no table here")


def test_the_sink_gets_each_weight_itself_once_and_in_the_backward_pass() -> None:
    layers = [Linear(4, 4, Split(0), bias=True, dtype=torch.float64, device=torch.device("cpu")) for _ in range(2)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
        layer.sink = _Sink()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        return layers[1](layers[0](x).tanh())

    weights = [layer.weight for layer in layers]
    plain = x
    for layer in layers:
        plain = torch.nn.functional.linear(plain if layer is layers[0] else plain.tanh(), layer.weight, layer.bias)
    wanted = torch.autograd.grad(plain.square().sum(), weights)
    y = recomputed(compute, x, region=SOLO)
    assert not any(layer.sink.gifts for layer in layers if isinstance(layer.sink, _Sink))
    y.square().sum().backward()
    for layer, gradient in zip(layers, wanted, strict=True):
        assert isinstance(layer.sink, _Sink)
        ((parameter, gift),) = layer.sink.gifts
        assert parameter is layer.weight
        torch.testing.assert_close(gift, gradient)


def _drops(region: TensorParallel) -> Callable[[Tensor], Tensor]:
    """Draws from torch's stream, from that of the region, and from torch's again."""

    def compute(x: Tensor) -> Tensor:
        y = torch.dropout(x.tanh(), 0.5, True)
        with region.local_rng(0.5):
            y = torch.dropout(y.tanh(), 0.5, True)
        with region.local_rng(0.5):
            y = y * torch.rand(())
        return torch.dropout(y.exp(), 0.5, True) * y

    return compute


def test_the_output_of_a_norm_is_let_go_and_comes_again() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    grads = []
    for again in (False, True):
        norm = torch.nn.LayerNorm(4)
        if again:
            normed = RecomputedNorm(norm, x)
            with normed.not_kept():
                y = normed.output @ weight
            output = weakref.ref(normed.output)
            del normed
            assert output() is None, "the graph holds it"
        else:
            y = norm(x) @ weight
        grads.append(torch.autograd.grad(y.square().sum(), (x, weight)))
    assert all(torch.equal(plain, found) for plain, found in zip(*grads, strict=True))


def test_both_streams_are_replayed_and_go_on_as_without() -> None:
    """Two micro-batches, both forward, then both backward, the first one last: the second has drawn before."""
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        region = TensorParallel(Axis("tp", (0, 1), 0), Stream(5))
        xs = [torch.linspace(-1, 1, 40, requires_grad=True), torch.linspace(0, 2, 40, requires_grad=True)]
        compute = _drops(region)
        ys = [recomputed(compute, x, region=region) if again else compute(x) for x in xs]
        grads = [torch.autograd.grad(y.sum(), x)[0] for x, y in reversed(list(zip(xs, ys, strict=True)))]
        with region.local_rng(0.5):
            own = torch.rand(3)
        results.append([*(y.detach() for y in ys), *grads, own, torch.rand(3)])
    assert all(torch.equal(wanted, found) for wanted, found in zip(*results, strict=True))


def test_a_graph_may_be_used_twice() -> None:
    torch.manual_seed(3)
    region = TensorParallel(Axis("tp", (0, 1), 0), Stream(5))
    x = torch.linspace(-1, 1, 40, requires_grad=True)
    y = recomputed(_drops(region), x, region=region).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


def test_a_repetition_that_fails_leaves_the_stream_where_it_was() -> None:
    stream = Stream(5)
    replay = stream.replay()
    with stream.used():
        first, second = torch.rand(()), torch.rand(())
    with pytest.raises(ZeroDivisionError), replay, stream.used():
        assert torch.rand(()) == first
        raise ZeroDivisionError
    with stream.used():
        third = torch.rand(())
    with replay, stream.used():
        assert torch.rand(3).tolist() == [float(first), float(second), float(third)]
