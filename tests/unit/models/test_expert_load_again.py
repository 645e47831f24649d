"""What is counted of experts is counted once, however often a forward pass is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.moe.router import Router
from megalith.nn.recompute import Recompute

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "ffn_hidden_size": 12,
    "num_experts": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.5,),
}


def _step(recompute: Recompute | None) -> tuple[list[Tensor], dict[int, float], Tensor]:
    """Two forward passes before their backward passes, as in a pipeline: loads, losses of balance, a gradient."""
    model = GPT(ModelConfig(**SETTINGS), 20, recompute=recompute, dtype=torch.float64)
    initialise(model, 1)
    model.train()
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 20, (1, 9), generator=generator)
        losses.append(model(ids[:, :-1], labels_BS=ids[:, 1:]).mean())
    for loss in losses:
        loss.backward()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    recorded = {layer: float(value) for layer, value in model.auxiliary.recorded["global_load_balancing_loss"].items()}
    gradient = routers[0].weight.grad
    assert gradient is not None
    return [router.load_E.clone() for router in routers], recorded, gradient


@pytest.mark.parametrize("recompute", [Recompute("uniform", 2), Recompute(parts=frozenset({"moe"}))], ids=str)
def test_a_repetition_changes_neither_loads_nor_losses(recompute: Recompute) -> None:
    loads, losses, gradient = _step(None)
    again = _step(recompute)
    assert float(loads[0].sum()) == 2 * 2 * 8  # two of four experts for each of the tokens of two passes
    assert all(torch.equal(one, other) for one, other in zip(loads, again[0], strict=True))
    assert again[1] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(again[2], gradient, rtol=1e-10, atol=1e-14)
