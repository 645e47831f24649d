"""On a processor without fast bf16 products none is computed, whatever the model: each would take ten times as long."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from tests.devices import CPU, CPU_WITH_BF16
from tests.distributed.test_parity import MODELS, Case, batches_of
from tests.unit.serve.models import STYLES, Letters, collect, model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.assemble.model import build_chunks, build_run_optimizer
from megalith.assemble.schedule import build_schedule
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.nn import precision
from megalith.nn.linear import linear
from megalith.serve.engine import Engine
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Request, Sampling
from megalith.train.state import TrainState
from megalith.train.step import train_step

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "dot", "addmv", "_linear_pointwise")
HALF = (torch.float16, torch.bfloat16)
DATA = {"bert": "pairs", "t5": "spans"}  # of the models that read something else than texts


class HalfProducts(TorchDispatchMode):
    """Notes the matrix products whose factors are in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if (name in PRODUCTS or "attention" in name) and any(x.dtype in HALF for x in tensors):
            self.seen.add(f"{name}: {[tuple(x.shape) for x in tensors]}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def slow_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.device.HOST", CPU)


@pytest.fixture
def one_thread_of_autograd() -> Iterator[None]:
    """The backward pass must be where the dispatch mode is."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.usefixtures("one_thread_of_autograd")
@pytest.mark.parametrize("dtype", ["--bf16", "--fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_training_step(model: str, dtype: str) -> None:
    case = Case(Layout(), model, data=DATA.get(model.split("-")[0], ""))
    config, context = case.config(dtype), ParallelContext.solo()
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, MODELS[model].vocab_size, context, streams.own)
    optimizer = build_run_optimizer(config, chunks, context)
    state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context)
    batches = list(islice(batches_of(case, 0, 1), 2))
    with HalfProducts() as products:
        train_step(state, iter(batches), len(batches))
    assert not products.seen


@pytest.mark.parametrize("packs", [False, True], ids=["as it is", "packed"])
@pytest.mark.parametrize("style", STYLES)
def test_generation(style: str, packs: bool) -> None:
    model = model_of(style, torch.bfloat16)
    engine = Engine(ModelRunner(model, 40, 4, packs_weights=packs), Letters())
    requests = [Request((0, 1, 5), 4, sampling=Sampling(temperature=0.0), stop_ids=()) for _ in range(3)]
    with HalfProducts() as products:
        collect(engine, requests, gaps=(0, 1, 1))
    assert not products.seen, "a matrix times a vector (mv) reads bf16 as fast as it can be read"


@pytest.mark.parametrize("tiles", [False, True])
def test_one_row_of_bf16_is_multiplied_by_mv(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.device.HOST", CPU_WITH_BF16)
    monkeypatch.setattr(precision, "_ROW_BY_MV", tiles)
    x, weight = torch.randn(1, 24).bfloat16(), torch.randn(50, 24).bfloat16()
    with torch.no_grad(), HalfProducts() as products:
        found = linear(x, weight, None, None)
    assert bool(products.seen) != tiles
    torch.testing.assert_close(found, (x.double() @ weight.double().t()).bfloat16(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
def test_products_of_few_rows_are_those_of_many(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("megalith.nn.linear._WIDENED_AT_ONCE", 100)  # so that the weight comes in parts
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 24, generator=generator).bfloat16() for n in (rows, 50))
    bias = torch.randn(50, generator=generator).bfloat16()
    with torch.no_grad():
        few = linear(x, weight, bias, None)
    product = (x.double() @ weight.double().t()).bfloat16()
    torch.testing.assert_close(few, product + bias, rtol=2**-7, atol=2**-7)
