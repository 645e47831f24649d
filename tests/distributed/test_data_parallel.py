"""Data parallelism: replicas that see parts of a batch train as one process does that sees all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import Optimizer, build_optimizer
from megalith.optim.gradients import ALIGNMENT

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    max_position_embeddings=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
VOCABULARY = 48
MICRO_BATCHES = 2
BATCH = 4  # samples of a micro-batch over all replicas
SEQUENCE = 8
SMALL = 2000  # elements of a bucket: several of them in these models

PRECISIONS = {
    "fp64": (torch.float64, PrecisionConfig()),
    "fp32": (torch.float32, PrecisionConfig()),
    "bf16": (torch.bfloat16, PrecisionConfig(bf16=True)),
    "fp16": (torch.float16, PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1)),
}
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5}


def _context(layout: Layout, observer: Any = None) -> ParallelContext:
    return ParallelContext.create(layout, torch.device("cpu"), observer=observer)


def _model(dtype: torch.dtype, *, tied: bool = True) -> GPT:
    config = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=not tied)
    model = GPT(config, VOCABULARY, dtype=dtype)
    initialise(model, 1)
    return model


def _tokens(step: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _backward(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> None:
    losses = model(tokens[:, :-1], labels_BS=tokens[:, 1:])
    (losses.mean() / MICRO_BATCHES * optimizer.loss_scale).backward()


def _accumulate(model: nn.Module, optimizer: Optimizer, step: int, data: Axis) -> None:
    """The forward and backward passes of one step on this replica's part of each micro-batch."""
    optimizer.zero_grad(MICRO_BATCHES)
    for micro_batch in range(MICRO_BATCHES):
        _backward(model, optimizer, comm.own_part(_tokens(step, micro_batch), data))


def _trained(
    precision: str, context: ParallelContext, *, steps: int = 4, clip: float = 1.0, lr: float = 0.01, **how: Any
) -> dict[str, Any]:
    """Train; returns what one process and each replica must agree on."""
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype)
    optimizer = build_optimizer(
        model, OptimizerConfig(clip_grad=clip), settings, count_zeros=True, context=context, **how
    )
    outcomes = []
    for step in range(steps):
        _accumulate(model, optimizer, step, context.dp)
        outcomes.append(optimizer.step(lr, 0.1))
    optimizer.settle()
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "state": {name: value.clone() for name, value in optimizer.gathered_state()},
        "norms": [outcome.grad_norm for outcome in outcomes],
        "zeros": [outcome.num_zeros for outcome in outcomes],
        "params_norm": optimizer.params_norm(),
        "steps": optimizer.step_count,
    }


def _replica(layout: Layout, precision: str, how: dict[str, Any]) -> dict[str, Any]:
    return _trained(precision, _context(layout), **how)


def _close(actual: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    difference = (actual.double() - wanted.double()).abs().max()
    assert difference <= tolerance * wanted.double().abs().max(), (name, float(difference))


def _same_training(results: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    for result in results:
        assert result["norms"] == results[0]["norms"], "every rank has the same norm"
        assert (result["steps"], result["zeros"]) == (wanted["steps"], results[0]["zeros"])
        assert result["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
        assert result["params_norm"] == pytest.approx(wanted["params_norm"], rel=tolerance)
        assert result["state"].keys() == wanted["state"].keys()
        for kind in ("weights", "state"):
            for name, value in wanted[kind].items():
                assert torch.equal(result[kind][name], results[0][kind][name]), f"{name} differs over the replicas"
                _close(result[kind][name], value, tolerance, name)


@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_train_as_one_process(ranks: Any, world_size: int, precision: str, zero1: bool) -> None:
    how = {"zero1": zero1, "bucket_size": SMALL, "clip": 0.1, "lr": 0.01 if precision == "fp64" else 1e-4}
    wanted = _trained(precision, ParallelContext.solo(), clip=0.1, lr=how["lr"])
    assert min(wanted["norms"]) > 0.1, "clipping is active"
    results = ranks.run(world_size, _replica, Layout(dp=world_size), precision, how)
    _same_training(results, wanted, TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_of_half_precision(ranks: Any, world_size: int, precision: str) -> None:
    """Close to one process as far as rounding lets them; divided state is the same state."""
    lr, steps = 1e-4, 4
    how = {"bucket_size": SMALL, "clip": 0.1, "lr": lr, "steps": steps}
    alone = _trained(precision, ParallelContext.solo(), clip=0.1, lr=lr, steps=steps)
    replicated, divided = (
        ranks.run(world_size, _replica, Layout(dp=world_size), precision, how | {"zero1": zero1})
        for zero1 in (False, True)
    )
    _same_training(divided, replicated[0], 1e-5)
    assert replicated[0]["norms"] == pytest.approx(alone["norms"], rel=1e-2)
    assert min(alone["norms"]) > 0.1, "clipping is active"
    for name, value in alone["weights"].items():
        # What is analytically zero is noise, which Adam makes steps of about its rate of.
        difference = (replicated[0]["weights"][name].double() - value.double()).abs()
        assert (difference <= 2 * lr * steps + 2**-7 * value.double().abs()).all(), name
        assert difference.median() <= lr / 10 + 2**-8 * value.double().abs().median(), name
