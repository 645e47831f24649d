"""Layers shared by tensor-parallel ranks are the layers of one device: values, input and weight gradients in fp64.

Each rank computes a layer alone and its part of it with the others, from the same global weights; what the ranks
return is put together here, by the placements, and compared with what one of them computed alone.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.distributed.rng import Stream
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.transformer import Block
from megalith.nn.attention import AttentionShape, LocalAttention, SelfAttention
from megalith.nn.dropout import HiddenDropout
from megalith.nn.embedding import Embedding, TokenEmbedding
from megalith.nn.feed_forward import Activation, FeedForward
from megalith.nn.linear import Linear, column, row
from megalith.nn.loss import LogitsBuffer, OutputLayer, vocabulary_loss, whole_logits
from megalith.nn.moe.balance import Alone, Auxiliary
from megalith.nn.placement import Fused, GroupedHeads, Placement, Replicated, Split, dim_of, local_part, local_pieces
from megalith.nn.region import SOLO, Region
from megalith.nn.rope import rotation
from megalith.nn.sink import attach_sink
from megalith.parallel.tensor import SequenceParallel, TensorParallel

S, B, D, V = 8, 3, 16, 27  # V divides over neither 2 nor 4
TOLERANCE = 1e-10
KIND: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


class Columns(nn.Module):
    """Three linears that share their input."""

    def __init__(self, region: Region, bias: bool) -> None:
        super().__init__()
        self.region = region
        self.plain, self.fused = (
            Linear(D, region.shard(extent).size * parts, placement, bias=bias, **KIND)
            for extent, parts, placement in ((12, 1, Split(0)), (8, 2, Fused(0, 2)))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return column(x, self.region, self.plain, self.fused)


class Row(nn.Module):
    def __init__(self, region: Region, bias: bool) -> None:
        super().__init__()
        self.region, self.linear = region, Linear(region.shard(12).size, D, Split(1), bias=bias, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        return row(x, self.region, self.linear)


class ColumnRow(nn.Module):
    def __init__(self, region: Region, bias: bool) -> None:
        super().__init__()
        self.region = region
        self.first = Linear(D, region.shard(12).size, Split(0), bias=bias, **KIND)
        self.second = Linear(region.shard(12).size, D, Split(1), bias=bias, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        return row(column(x, self.region, self.first)[0].square(), self.region, self.second)


class Loss(nn.Module):
    def __init__(self, region: Region, bias: bool) -> None:
        super().__init__()
        self.region, self.output, self.sink = region, OutputLayer(V, D, region, **KIND), None

    def forward(self, x: Tensor) -> Tensor:
        return vocabulary_loss(x, self.output.weight, _tokens().t(), self.sink, LogitsBuffer(), self.region, V)


class Logits(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return whole_logits(x, self.output.weight, self.region, V)


class Words(nn.Module):
    def __init__(self, region: Region, bias: bool) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(V, D, Embedding(S, D, Replicated(), **KIND), 0.0, region, **KIND)

    def forward(self) -> Tensor:
        positions = torch.arange(S).expand(B, S).clone()
        positions[0, S // 2 :] -= S // 2  # as after an end of document
        return self.embedding(_tokens(), positions)


class Attention(SelfAttention):
    def __init__(self, region: Region, bias: bool, groups: int = 8) -> None:
        super().__init__(AttentionShape(D, 8, groups, 4), region, qkv_bias=bias, bias=bias, **KIND)

    def forward(self, x: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, rotation(torch.arange(S), 4, 100.0, interleaved=False, dtype=x.dtype))


class WholeBlock(Block):
    def __init__(self, region: Region, bias: bool, config: ModelConfig) -> None:
        config = dataclasses.replace(config, add_bias_linear=bias)
        super().__init__(config, 0, region, LocalAttention(), Alone(), Auxiliary(), **KIND)

    def forward(self, x: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, None)


class Model(nn.Module):
    def __init__(self, region: Region, bias: bool, config: ModelConfig) -> None:
        super().__init__()
        self.gpt = GPT(dataclasses.replace(config, add_bias_linear=bias), V, region=region, **KIND)

    def forward(self) -> Tensor:
        return self.gpt(_tokens(), labels_BS=_tokens(1))


GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=D,
    num_attention_heads=8,
    max_position_embeddings=S,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = dataclasses.replace(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=24,
    untie_embeddings_and_output_weights=True,
    group_query_attention=True,
    num_query_groups=2,
)


def _tokens(seed: int = 0) -> Tensor:
    """[B, S], with the first and the last id."""
    ids = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(seed))
    ids[0, 0], ids[1, 1] = 0, V - 1
    return ids


@dataclass(frozen=True)
class Case:
    """A layer, and of what the tensors on its borders are parts: the sequence, the last dimension, or nothing."""

    build: Callable[[Region, bool], nn.Module]
    inputs: str | None = "sequence"
    outputs: tuple[str, ...] = ("sequence",)


CASES = {
    "column": Case(Columns, outputs=("last", "fused")),
    "row": Case(Row, inputs="last"),
    "column and row": Case(ColumnRow),
    "loss": Case(Loss, outputs=("whole",)),
    "logits": Case(Logits, outputs=("whole",)),
    "embedding": Case(Words, inputs=None),
    "attention": Case(Attention),
    "attention, 4 groups": Case(lambda region, bias: Attention(region, bias, 4)),
    "attention, 2 groups": Case(lambda region, bias: Attention(region, bias, 2)),
    "attention, 1 group": Case(lambda region, bias: Attention(region, bias, 1)),
    "gelu": Case(lambda region, bias: FeedForward(D, 24, Activation("gelu_tanh"), region, bias=bias, **KIND)),
    "swiglu": Case(lambda region, bias: FeedForward(D, 24, Activation("silu", gated=True), region, bias=bias, **KIND)),
    "gpt2 block": Case(lambda region, bias: WholeBlock(region, bias, GPT2)),
    "llama block": Case(lambda region, bias: WholeBlock(region, bias, LLAMA)),
    "gpt2": Case(lambda region, bias: Model(region, bias, GPT2), inputs=None, outputs=("whole",)),
    "llama": Case(lambda region, bias: Model(region, bias, LLAMA), inputs=None, outputs=("whole",)),
}


class AddingSink:
    """Weight gradients by name."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.grads = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        self._of = {parameter: self.grads[name] for name, parameter in named.items()}

    def accumulate_linear(
        self, parameter: nn.Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        self._of[parameter] += grad_TO.t() @ x_TI

    def accumulate_embedding(self, parameter: nn.Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        self._of[parameter].index_add_(0, ids_T, grad_TD)


def _part(x: Tensor, kind: str, region: Region) -> Tensor:
    """This rank's part of a tensor on the border of a layer."""
    if kind == "sequence":
        return region.local_sequence(x)
    placements: dict[str, Placement] = {"last": Split(x.ndim - 1), "fused": Fused(x.ndim - 1, 2)}
    return local_part(x, placements[kind], region.size, region.index) if kind in placements else x


def _placements(module: nn.Module) -> dict[str, Placement]:
    return {
        f"{prefix}.{name}".lstrip("."): placement
        for prefix, layer in module.named_modules()
        if hasattr(layer, "placements") and not isinstance(layer, GPT)
        for name, placement in layer.placements().items()
    }


def _fill(module: nn.Module, whole: dict[str, Tensor], region: Region) -> None:
    table = _placements(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(local_part(whole[name], table[name], region.size, region.index))


def _gradients(module: nn.Module, x: Tensor | None, upstream: list[Tensor], with_sink: bool) -> dict[str, Tensor]:
    """Run a layer forward and backward; its outputs and all gradients by name."""
    sink = AddingSink(dict(module.named_parameters())) if with_sink else None
    attach_sink(module, sink)
    if x is not None:
        x = x.detach().clone().requires_grad_()
    outputs = module() if x is None else module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, upstream)
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    if x is not None:
        assert x.grad is not None
        found["input"] = x.grad
    for name, parameter in module.named_parameters():
        taken = sink.grads[name] if sink is not None else torch.zeros_like(parameter)
        found[name] = taken if parameter.grad is None else taken + parameter.grad
    return found


def _region(sequence: bool) -> TensorParallel:
    axis = ParallelContext.create(Layout(tp=dist.get_world_size()), torch.device("cpu")).tp
    return SequenceParallel(axis) if sequence else TensorParallel(axis)


def _both(name: str, sequence: bool, bias: bool, with_sink: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a rank finds alone, and with the others."""
    case, region, drawn = CASES[name], _region(sequence), torch.Generator().manual_seed(7)
    alone, shared = case.build(SOLO, bias), case.build(region, bias)
    assert _placements(alone) == _placements(shared)
    whole = {key: torch.randn(value.shape, generator=drawn, dtype=torch.float64) for key, value in _named(alone)}
    _fill(alone, whole, SOLO)
    _fill(shared, whole, region)
    x = None
    if case.inputs is not None:
        x = torch.randn(S, B, 12 if case.inputs == "last" else D, generator=drawn, dtype=torch.float64)
    with torch.no_grad():
        outputs = alone() if x is None else alone(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn(output.shape, generator=drawn, dtype=torch.float64) for output in outputs]
    wanted = _gradients(alone, x, upstream, with_sink)
    local_upstream = [_part(y, kind, region) for y, kind in zip(upstream, case.outputs, strict=True)]
    local_x = None if x is None or case.inputs is None else _part(x, case.inputs, region)
    found = _gradients(shared, local_x, local_upstream, with_sink)
    kinds = {"input": case.inputs, **{f"output {index}": kind for index, kind in enumerate(case.outputs)}}
    for key, kind in kinds.items():
        if kind is not None:
            wanted[key] = _part(wanted[key], kind, region)
    return wanted, found


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(module.named_parameters())


def _run(name: str, sequence: bool) -> dict[tuple[bool, bool], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    options = [(bias, with_sink) for bias in (False, True) for with_sink in (False, True)]
    return {option: _both(name, sequence, *option) for option in options}


def _assembled(parts: list[Tensor], wanted: Tensor, placement: Placement, partial: bool) -> Tensor:
    """The global gradient from those of all ranks; rows that several hold are summed where each has a part."""
    dim, whole = dim_of(placement), torch.zeros_like(wanted)
    for index, part in enumerate(parts):
        for piece in local_pieces(placement, wanted.shape[dim], len(parts), index):
            mine = part.narrow(dim, piece.local, piece.length)
            target = whole.narrow(dim, piece.whole, piece.length)
            if len(piece.holders) == 1 or partial or isinstance(placement, GroupedHeads):
                target += mine
            else:
                assert index == 0 or torch.equal(target, mine), "what is replicated differs"
                target.copy_(mine)
    return whole


def _close(actual: Tensor, wanted: Tensor, what: str) -> None:
    assert actual.shape == wanted.shape, what
    assert (actual - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), what


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("size", "sequence"), [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)])
def test_shared_layers_are_those_of_one_device(ranks: Any, name: str, size: int, sequence: bool) -> None:
    results = ranks.run(size, _run, name, sequence)
    for bias, with_sink in results[0]:
        table = _placements(CASES[name].build(SOLO, bias))
        by_rank = [result[bias, with_sink] for result in results]
        for key, wanted in by_rank[0][0].items():
            if key in table:
                whole = _assembled([found[key] for _, found in by_rank], wanted, table[key], sequence)
                _close(whole, wanted, f"{key}, bias {bias}, sink {with_sink}")
            else:
                for alone, found in by_rank:
                    _close(found[key], alone[key], f"{key}, bias {bias}, sink {with_sink}")


@dataclass
class Recorder:
    """An observer that notes what is communicated: operation and elements."""

    seen: list[tuple[str, int]]

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.seen.append((operation, 0 if tensor is None else tensor.numel()))

    def after(self, operation: str, axis: Axis) -> None:
        pass

    def waiting(self, peer: int | None = None) -> None: ...

    def waited(self) -> None: ...


def _communication(name: str, sequence: bool) -> list[tuple[str, int]]:
    region = _region(sequence)
    seen: list[tuple[str, int]] = []
    region.axis = dataclasses.replace(region.axis, observer=Recorder(seen))
    layer = CASES[name].build(region, True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = _part(torch.randn(S, B, D, dtype=torch.float64), "sequence", region).requires_grad_()
    layer(x).sum().backward()
    return seen


HIDDEN = S * B * D


@pytest.mark.parametrize("name", ["llama block", "gpt2 block"])
def test_a_block_communicates_what_it_must_and_no_more(ranks: Any, name: str) -> None:
    for seen in ranks.run(2, _communication, name, False):
        assert seen == [("all_reduce", HIDDEN)] * 4  # behind two rows, and for the inputs of two columns
    for seen in ranks.run(2, _communication, name, True):
        forward = [("all_gather", HIDDEN // 2), ("reduce_scatter", HIDDEN)] * 2
        # The gradient in front of a row's product; the input of the column again; the gradient of that input.
        backward = [("all_gather", HIDDEN // 2)] * 2 + [("reduce_scatter", HIDDEN)]
        assert seen == forward + backward * 2


def test_the_loss_communicates_two_numbers_per_token_and_the_gradient(ranks: Any) -> None:
    for seen in ranks.run(2, _communication, "loss", False):
        assert seen == [("all_reduce", S * B), ("all_reduce", 2 * S * B), ("all_reduce", HIDDEN)]


def _masks(sequence: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What dropout leaves of ones in hidden states and in a layer's own part, and the next default draw."""
    region = _region(sequence)
    region.stream = Stream(2718 + region.index, torch.device("cpu"))
    torch.manual_seed(1)
    hidden = HiddenDropout(0.5, region)(torch.ones(64))
    with region.local_rng(0.5):
        own = torch.dropout(torch.ones(64), 0.5, True)
    return hidden, own, torch.rand(1)


def test_dropout_is_alike_where_hidden_states_are_and_different_where_not(ranks: Any) -> None:
    (hidden, own, after), (other_hidden, other_own, other_after) = ranks.run(2, _masks, False)
    assert torch.equal(hidden, other_hidden)
    assert not torch.equal(own, other_own)
    assert torch.equal(after, other_after)
    (hidden, own, after), (other_hidden, other_own, other_after) = ranks.run(2, _masks, True)
    assert not torch.equal(hidden, other_hidden)
    assert not torch.equal(hidden, own)
    assert torch.equal(after, other_after)


def test_local_shapes_are_those_of_the_layers() -> None:
    for index in range(4):
        region = TensorParallel(Axis("tp", (0, 1, 2, 3), index))
        for case in CASES.values():
            whole = dict(case.build(SOLO, True).named_parameters())
            shared = case.build(region, True)
            for name, placement in _placements(shared).items():
                wanted = local_part(whole[name], placement, 4, index).shape
                assert shared.get_parameter(name).shape == wanted, name


def _half(dtype: torch.dtype, sequence: bool) -> tuple[float, float]:
    """How far loss and input gradient of a small model in half precision are from one device's, relative."""
    region, results = _region(sequence), []
    for place in (SOLO, region):
        torch.manual_seed(0)
        model = GPT(LLAMA, V, region=place, dtype=dtype)
        initialise(model, 3)
        losses = model(_tokens(), labels_BS=_tokens(1))
        losses.mean().backward()
        norm = model.decoder.layers["0"].input_layernorm.weight.grad
        assert norm is not None
        if place.needs_grad_reduce:
            comm.all_reduce(norm, region.axis)
        results.append((losses.detach(), norm.float()))
    (loss, grad), (registered_loss, own_grad) = results
    return float((registered_loss - loss).abs().max()), float((own_grad - grad).abs().max() / grad.abs().max())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_within_its_rounding(ranks: Any, dtype: torch.dtype, sequence: bool) -> None:
    for loss, gradient in ranks.run(2, _half, dtype, sequence):
        assert 0.0 < loss < 0.02
        assert 0.0 < gradient < 0.05


def _compiled(sequence: bool) -> tuple[float, float]:
    """The largest differences of losses and of a gradient between a compiled and a plain model."""
    region, results = _region(sequence), []
    for compiled in (False, True):
        model = GPT(LLAMA, V, region=region, dtype=torch.float64)
        initialise(model, 3)
        if compiled:
            model.compile_blocks()
        losses = model(_tokens(), labels_BS=_tokens(1))
        losses.mean().backward()
        gradient = model.get_parameter("decoder.layers.1.mlp.linear_fc1.weight").grad
        assert gradient is not None
        results.append((losses.detach(), gradient))
    (loss, grad), (other_loss, other_grad) = results
    return float((loss - other_loss).abs().max()), float((grad - other_grad).abs().max())


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU, and g++ is absent"
)
@pytest.mark.parametrize("sequence", [False, True])
def test_compiled_blocks_are_shared_alike(ranks: Any, sequence: bool) -> None:
    for loss, gradient in ranks.run(2, _compiled, sequence):
        assert loss < 1e-12
        assert gradient < 1e-12
