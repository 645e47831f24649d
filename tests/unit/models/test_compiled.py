"""Compiled layers: graphs without breaks, no compilation after the third step, the gradients of uncompiled layers.

By the compiler's front end alone; the generated kernels are tested in test_gpt.py, in tests/distributed/test_parity.py
and in tests/gpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import Parameter

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.errors import ConfigError
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn import operators
from megalith.nn.linear import Linear
from megalith.nn.placement import Split
from megalith.nn.region import SOLO
from megalith.optim.build import build_optimizer
from megalith.parallel.pipeline import DeferredWeightGrads

from ...front_end import front_end, graphs
from ...styles import as_llama, with_latent_attention

VOCABULARY = 40
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=24,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = as_llama(GPT2)
LATENT = with_latent_attention(GPT2)
UNFUSED = dataclasses.replace(GPT2, transformer_impl="local")


def parts(*names: str) -> Recompute:
    return Recompute(parts=frozenset(names))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how often its layers are compiled in training."""

    config: ModelConfig
    recompute: Recompute | None = None
    dtype: torch.dtype = torch.float64
    kinds: int = 1


CASES = {
    "gpt2": Case(GPT2),
    "llama": Case(LLAMA),
    "bf16": Case(LLAMA, dtype=torch.bfloat16),
    "fp16": Case(GPT2, dtype=torch.float16),
    "latent": Case(LATENT),
    "windows": Case(dataclasses.replace(LLAMA, window_size="3,0", window_attn_skip_freq="2"), kinds=2),
    "dropout": Case(dataclasses.replace(UNFUSED, hidden_dropout=0.2, attention_dropout=0.2)),
    "full recomputation": Case(GPT2, Recompute("uniform", 2)),
    "recomputed norms and mlp": Case(LLAMA, parts("layernorm", "mlp")),
    "recomputed norms": Case(GPT2, parts("layernorm")),
    "recomputed attention": Case(
        dataclasses.replace(UNFUSED, hidden_dropout=0.2, attention_dropout=0.2), parts("core_attn")
    ),
    "recomputed heads": Case(LATENT, parts("mla_up_proj")),
}
ALWAYS = ("llama", "recomputed norms and mlp")


@pytest.fixture(autouse=True)
def breaks() -> Iterator[dict[str, Any]]:
    with front_end() as found:
        yield found


def _model(case: Case) -> GPT:
    model = GPT(
        dataclasses.replace(case.config, init_method_std=0.3), VOCABULARY, recompute=case.recompute, dtype=case.dtype
    )
    initialise(model, seed=5)
    return model


def _tokens(size: int, length: int = 9) -> Tensor:
    return torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(size))


class Run:
    """Training steps and evaluations of a model, with its sink."""

    def __init__(self, model: GPT, *, compiled: bool) -> None:
        self.model = model
        self.optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
        if compiled:
            model.compile_blocks()

    def step(self, size: int) -> tuple[float, dict[str, Tensor]]:
        """Take a step; its loss and its gradients."""
        torch.manual_seed(size)
        self.optimizer.zero_grad()
        loss = self.loss(size)
        loss.backward()
        grads = {name: grad.clone() for name, grad in self.optimizer.gradients.grads.items()}
        self.optimizer.step(0.01, 0.1)
        return loss.item(), grads

    def loss(self, size: int) -> Tensor:
        tokens = _tokens(size)
        losses: Tensor = self.model(tokens, labels_BS=tokens.flip(1))
        return losses.mean()

    def evaluate(self, size: int) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(size)
        self.model.train()
        return loss.item()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in CASES]
)
def test_layers_are_one_graph_with_the_gradients_of_uncompiled_ones(name: str, breaks: dict[str, Any]) -> None:
    case = CASES[name]
    plain, compiled = (Run(_model(case), compiled=compiled) for compiled in (False, True))
    rounding = {"rtol": 1e-12, "atol": 1e-13} if case.dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
    for number, size in enumerate((3, 2, 4)):
        (loss, grads), (wanted, wanted_grads) = compiled.step(size), plain.step(size)
        assert loss == pytest.approx(wanted, rel=rounding["rtol"])
        for parameter, grad in grads.items():
            torch.testing.assert_close(
                grad, wanted_grads[parameter], **rounding, msg=partial("{}: {}".format, parameter)
            )
        if number == 0:
            assert graphs() == case.kinds  # layers that are alike share one
        if number == 1:  # the second size of micro-batches makes the size a variable
            assert graphs() == 2 * case.kinds
            assert compiled.evaluate(2) == pytest.approx(plain.evaluate(2), rel=rounding["rtol"])
            torch.compiler.set_stance("fail_on_recompile")
    assert compiled.evaluate(4) == pytest.approx(plain.evaluate(4), rel=rounding["rtol"])
    assert not breaks


def _kept(recompute: Recompute | None) -> int:
    """Elements that a compiled layer keeps for the backward pass."""
    model = _model(Case(LLAMA, recompute))
    model.compile_blocks()
    (block, *_), x = model.blocks(), torch.randn(9, 4, 16, dtype=torch.float64, requires_grad=True)
    y = block(x, None)
    return sum(tensor.numel() for tensor in y.grad_fn.saved_tensors)


def test_recomputed_parts_of_a_graph_are_not_kept() -> None:
    kept = [_kept(recompute) for recompute in (None, parts("layernorm"), parts("layernorm", "mlp"))]
    assert kept[0] > kept[1] > kept[2]


class Recorder:
    """A sink that keeps what it gets."""

    defers = False

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        self.found.append((grad_TO, x_TI))

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        raise AssertionError("no embedding here")


@pytest.fixture
def layer() -> Linear:
    linear = Linear(3, 5, Split(0), bias=False, dtype=torch.float64)
    torch.nn.init.normal_(linear.weight)
    operators.number_layers(linear, SOLO)
    return linear


def _operands(layer: Linear) -> tuple[Tensor, Parameter, Tensor | None, str | None]:
    return torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True), layer.weight, layer.number, SOLO.name


@pytest.mark.parametrize("operator", [operators.column, operators.row])
def test_the_operators_are_what_torch_takes_them_for(operator: Any, layer: Linear) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (*_operands(layer), False), test_utils=tests)


def test_a_sink_that_defers_gets_copies_of_what_a_graph_overwrites(layer: Linear) -> None:
    recorder = Recorder()
    layer.sink = deferred = DeferredWeightGrads(recorder)
    x, *rest = _operands(layer)
    y = operators.column(x, *rest, True)
    grad = torch.randn_like(y)
    wanted = [grad.clone().flatten(0, 1), x.detach().clone().flatten(0, 1)]
    with deferred.collect(1):
        y.backward(grad)
    grad.zero_()
    x.detach().zero_()
    deferred.run_deferred(1)
    (found,) = recorder.found
    assert all(map(torch.equal, found, wanted))
    assert layer.weight.grad is None


def test_what_cannot_be_compiled_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(_model(Case(GPT2)), compiled=True)
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda *inputs: torch._dynamo.graph_break())
    with pytest.raises(ConfigError, match=r"--compile.*decoder\.layers\.0.*leave --compile out"):
        run.step(2)


def test_layers_of_too_many_kinds_do_not_continue_uncompiled() -> None:
    run = Run(_model(CASES["windows"]), compiled=True)
    named = pytest.raises(ConfigError, match=r"--compile.*decoder\.layers\.1")
    with torch._dynamo.config.patch(recompile_limit=1), named:
        run.step(2)
