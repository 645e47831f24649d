"""Products with packed weights are the products, and a model whose weights are packed answers as before."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.devices import CPU, CPU_WITH_BF16

from megalith.kernels.cpu import products
from megalith.kernels.cpu.products import Packing
from megalith.kernels.torch_private import has_fp16_linear, has_onednn_bf16, has_onednn_linear
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

from ..serve.models import STYLES

needs_fbgemm = pytest.mark.skipif(not has_fp16_linear(), reason="this torch or processor has no fp16 products")
needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN operator for linear layers")
BATCHES = (
    Batch([Chunk([3, 1, 4, 1, 5], 0, [0, 1]), Chunk([9, 2], 0, [5])]),
    Batch([Chunk([6], 5, [0, 1])]),
    Batch([Chunk([5], 2, [5], num_logits=0)]),
)


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE_WEIGHT", 1)
    monkeypatch.setattr(products, "_MIN_ROWS", 1)  # as on a processor for which MKL is slow
    monkeypatch.setattr(products, "_PACKED_AT_ONCE", 300)  # so that a weight comes in parts
    monkeypatch.setattr("megalith.device.HOST", CPU)


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 65])
def test_products_of_half_precision(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 24, generator=generator).to(dtype) for n in (rows, 50))
    bias = torch.randn(50, generator=generator).to(dtype)
    product, biased = (Packing().product(weight, b, torch.float32) for b in (None, bias))
    assert product is not None and biased is not None
    wanted = (x.double() @ weight.double().t()).to(dtype)
    for found, right in ((product(x), wanted), (biased(x), wanted + bias)):
        assert found.dtype == dtype
        torch.testing.assert_close(found, right, rtol=2**-7, atol=2**-7)


@needs_fbgemm
@pytest.mark.parametrize("largest", [1e-30, 3e-3, 1.0, 1e30])
def test_bf16_weights_are_exact_whatever_their_size(largest: float) -> None:
    weight = (largest * torch.logspace(0, -8, 64)).bfloat16().view(8, 8)
    product = Packing().product(weight, None, torch.float32)
    assert product is not None
    assert torch.equal(product(torch.eye(8, dtype=torch.bfloat16)), weight.t())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_not_packed(value: float) -> None:
    weight = torch.ones(8, 8, dtype=torch.bfloat16)
    weight[3, 5] = value
    assert Packing().product(weight, None, torch.float32) is None


@pytest.mark.parametrize("lacks", [("has_onednn_bf16", lambda: False), ("_LARGE_WEIGHT", 65)], ids=["bf16", "size"])
def test_bf16_is_packed_only_where_it_is_faster(lacks: tuple[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, *lacks)
    assert Packing().product(torch.ones(8, 8, dtype=torch.bfloat16), None, torch.bfloat16) is None


@pytest.mark.skipif(not has_onednn_bf16(), reason="oneDNN has no bf16 on this processor")
@pytest.mark.parametrize("few", [False, True], ids=["one layout", "one for few rows"])
@pytest.mark.parametrize("rows", [1, 4, 16, 65])
def test_products_of_bf16(rows: int, few: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 24), (50, 24), (50,)))
    packing = Packing(few)
    product = packing.product(weight, bias, torch.bfloat16)
    assert product is not None
    assert packing.num_bytes == (1 + (few and has_fp16_linear())) * weight.nbytes
    found = product(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t() + bias, rtol=2**-7, atol=2**-6)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 16, 65])
def test_products_of_fp32(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(50, 24), torch.randn(50)
    product = Packing().product(weight, bias, torch.float32)
    assert product is not None
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=needs_fbgemm), pytest.param(torch.float32, marks=needs_onednn)],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_model_with_packed_weights(style: str, tied: bool, dtype: torch.dtype) -> None:
    config = dataclasses.replace(STYLES[style], untie_embeddings_and_output_weights=not tied)
    model = GPT(config, 32, dtype=dtype)
    initialise(model, 5)
    model.requires_grad_(False)
    plain = ModelRunner(model, 8, 4)
    wanted = [plain.run(batch) for batch in BATCHES]
    held = sum(parameter.nbytes for parameter in model.parameters())
    packed = ModelRunner(model, 8, 4, packs_weights=True)
    for batch, right in zip(BATCHES, wanted, strict=True):
        torch.testing.assert_close(packed.run(batch), right)
    copied = tied and dtype == torch.bfloat16
    assert packed.weight_bytes == held + copied * model.output_weight.nbytes
    assert sum(parameter.nbytes for parameter in model.parameters()) < held / 2, "weights are there twice"


@needs_fbgemm
@pytest.mark.skipif(not has_onednn_bf16(), reason="oneDNN has no bf16 on this processor")
@pytest.mark.parametrize(("small", "faster"), [(True, True), (True, False), (False, True)])
def test_only_a_small_model_has_weights_in_two_layouts(
    small: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.device.HOST", CPU_WITH_BF16)
    monkeypatch.setattr("megalith.serve.model_runner.FEW_ROWS_BY_FBGEMM", faster)
    model = GPT(STYLES["gpt2"], 32, dtype=torch.bfloat16)
    initialise(model, 5)
    model.requires_grad_(False)
    held = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr("megalith.serve.model_runner._SMALL_MODEL", held if small else held - 1)
    plain = ModelRunner(model, 8, 4)
    wanted = [plain.run(batch) for batch in BATCHES]
    packed = ModelRunner(model, 8, 4, packs_weights=True)
    for batch, right in zip(BATCHES, wanted, strict=True):
        torch.testing.assert_close(packed.run(batch), right, rtol=0.05, atol=0.05)
    left = sum(parameter.nbytes for parameter in model.parameters())
    moved = held - left + model.output_weight.nbytes  # it is the word embedding too, which stays
    assert packed.weight_bytes == left + (2 if small and faster else 1) * moved
