"""Recomputation on a CUDA device: its random streams are replayed, and its memory falls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed.context import Axis
from megalith.distributed.rng import Stream
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.recompute import Recompute, recomputed
from megalith.optim import build_optimizer
from megalith.parallel.tensor import TensorParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

LAYERS, HIDDEN, LENGTH, BATCH = 6, 256, 256, 4


def _step(backend: str, precision: PrecisionConfig, recompute: Recompute | None) -> tuple[list[Tensor], int]:
    """The loss and all gradients of two micro-batches with dropout; and the bytes held between the passes."""
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        attention_backend=backend,
    )
    model = GPT(config, 128, recompute=recompute, dtype=getattr(torch, precision.params_dtype), device="cuda")
    initialise(model, 3)
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    tokens = torch.randint(0, 128, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)).cuda()
    torch.manual_seed(7)
    optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    losses = [model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean() for _ in range(2)]
    held = torch.cuda.memory_allocated() - before
    for loss in losses:
        loss.backward()
    optimizer.gradients.finish()
    seen = [*losses, *optimizer.gradients.grads.values(), torch.rand(3), torch.rand(3, device="cuda")]
    return [tensor.detach().clone() for tensor in seen], held


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True)], ids=["fp32", "bf16"])
def test_the_same_bits_with_dropout(precision: PrecisionConfig) -> None:
    wanted, _ = _step("unfused", precision, None)
    for recompute in (Recompute("uniform", 1), Recompute("uniform", 4), Recompute("block", 2)):
        found, _ = _step("unfused", precision, recompute)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), recompute


def test_fused_attention_drops_the_same() -> None:
    """Its backward pass may add in another order from run to run."""
    precision = PrecisionConfig(bf16=True)
    wanted, _ = _step("fused", precision, None)
    found, _ = _step("fused", precision, Recompute("uniform", 1))
    assert [loss.item() for loss in found[:2]] == [loss.item() for loss in wanted[:2]]
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().max()))


def test_memory_between_the_passes_falls() -> None:
    """Of 2 micro-batches; what is kept are the inputs of the groups, and what the loss and the embedding keep."""
    precision = PrecisionConfig(bf16=True)
    hidden = 2 * LENGTH * BATCH * HIDDEN * 2
    plain, each, three = (
        _step("fused", precision, recompute)[1]
        for recompute in (None, Recompute("uniform", 1), Recompute("uniform", 3))
    )
    assert plain - each > 6 * LAYERS * hidden
    assert each - three == pytest.approx((LAYERS - LAYERS // 3) * hidden, rel=0.1)


def test_a_stream_of_its_own_is_replayed() -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        region = TensorParallel(Axis("tp", (0, 1), 0), Stream(5, "cuda"))

        def compute(x: Tensor, region: TensorParallel = region) -> Tensor:
            y = torch.dropout(x.tanh(), 0.5, True)
            with region.local_rng(0.5):
                y = torch.dropout(y.tanh(), 0.5, True)
            return torch.dropout(y.exp(), 0.5, True) * y

        xs = [torch.linspace(n, n + 1, 40, device="cuda", requires_grad=True) for n in range(2)]
        ys = [recomputed(compute, x, region=region) if again else compute(x) for x in xs]
        grads = [torch.autograd.grad(y.sum(), x)[0] for x, y in reversed(list(zip(xs, ys, strict=True)))]
        with region.local_rng(0.5):
            grads.append(torch.rand(3, device="cuda"))
        results.append([*(y.detach() for y in ys), *grads, torch.rand(3, device="cuda")])
    assert all(torch.equal(wanted, found) for wanted, found in zip(*results, strict=True))
