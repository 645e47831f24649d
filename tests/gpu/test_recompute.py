"""Recomputation: its random streams are replayed, and on a GPU the memory between the passes falls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed.context import Axis
from megalith.distributed.rng import Stream
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.recompute import recomputed
from megalith.optim import build_optimizer
from megalith.parallel.tensor import TensorParallel

from .small import bf16_or_skip

LAYERS, BATCH = 6, 4


def _step(
    backend: str, precision: str, recompute: Recompute | None, device: str, size: int = 64
) -> tuple[list[Tensor], int]:
    """The losses and all gradients of two micro-batches with dropout; and the bytes held on a GPU between the passes.

    `size` is that of the hidden states, and the number of tokens.
    """
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=size,
        num_attention_heads=4,
        max_position_embeddings=size,
        attention_backend=backend,
    )
    chosen = PrecisionConfig(bf16=precision == "bf16")
    model = GPT(config, 128, recompute=recompute, dtype=getattr(torch, chosen.params_dtype), device=device)
    initialise(model, 3)
    optimizer = build_optimizer(model, OptimizerConfig(), chosen)
    tokens = torch.randint(0, 128, (BATCH, size + 1), generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(7)
    optimizer.zero_grad()
    before = _allocated(device)
    losses = [model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean() for _ in range(2)]
    held = _allocated(device) - before
    for loss in losses:
        loss.backward()
    optimizer.gradients.finish()
    seen = [*losses, *optimizer.gradients.grads.values(), torch.rand(3), torch.rand(3, device=device)]
    return [tensor.detach().clone() for tensor in seen], held


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_with_dropout(precision: str, device: str) -> None:
    bf16_or_skip(precision, device)
    wanted, _ = _step("unfused", precision, None, device)
    for recompute in (Recompute("uniform", 1), Recompute("uniform", 4), Recompute("block", 2)):
        found, _ = _step("unfused", precision, recompute, device)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), recompute


def test_fused_attention_drops_the_same(device: str) -> None:
    """Its backward pass may add in another order from run to run."""
    precision = "bf16" if device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    wanted, _ = _step("fused", precision, None, device)
    found, _ = _step("fused", precision, Recompute("uniform", 1), device)
    assert [loss.item() for loss in found[:2]] == [loss.item() for loss in wanted[:2]]
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
def test_memory_between_the_passes_falls() -> None:
    """Of 2 micro-batches; what is kept are the inputs of the groups, and what the loss and the embedding keep."""
    bf16_or_skip("bf16", "cuda")
    size = 256
    hidden = 2 * size * BATCH * size * 2
    plain, each, three = (
        _step("fused", "bf16", recompute, "cuda", size)[1]
        for recompute in (None, Recompute("uniform", 1), Recompute("uniform", 3))
    )
    assert plain - each > 6 * LAYERS * hidden
    assert each - three == pytest.approx((LAYERS - LAYERS // 3) * hidden, rel=0.1)


def test_a_stream_of_its_own_is_replayed(device: str) -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        region = TensorParallel(Axis("tp", (0, 1), 0), Stream(5, device))

        def compute(x: Tensor, region: TensorParallel = region) -> Tensor:
            y = torch.dropout(x.tanh(), 0.5, True)
            with region.local_rng(0.5):
                y = torch.dropout(y.tanh(), 0.5, True)
            return torch.dropout(y.exp(), 0.5, True) * y

        xs = [torch.linspace(n, n + 1, 40, device=device, requires_grad=True) for n in range(2)]
        ys = [recomputed(compute, x, region=region) if again else compute(x) for x in xs]
        grads = [torch.autograd.grad(y.sum(), x)[0] for x, y in reversed(list(zip(xs, ys, strict=True)))]
        with region.local_rng(0.5):
            grads.append(torch.rand(3, device=device))
        results.append([*(y.detach() for y in ys), *grads, torch.rand(3, device=device)])
    assert all(torch.equal(wanted, found) for wanted, found in zip(*results, strict=True))
