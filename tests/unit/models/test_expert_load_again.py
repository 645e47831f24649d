"""What is counted of experts is counted once, however often a forward pass is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.moe.router import Router

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


def _after(recompute: Recompute | None, **changes: Any) -> GPT:
    """A model after two forward passes before their backward passes, as in a pipeline."""
    model = GPT(ModelConfig(**{**SETTINGS, **changes}), 20, recompute=recompute, dtype=torch.float64)
    initialise(model, 1)
    model.train()
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 20, (1, 9), generator=generator)
        losses.append(model(ids[:, :-1], labels_BS=ids[:, 1:]).mean())
    for loss in losses:
        loss.backward()
    return model


def _step(recompute: Recompute | None) -> tuple[list[Tensor], dict[int, float], Tensor]:
    """Loads, losses of balance, a gradient."""
    model = _after(recompute)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    recorded = {layer: float(value) for layer, value in model.auxiliary.recorded["global_load_balancing_loss"].items()}
    gradient = routers[0].weight.grad
    assert gradient is not None
    return [router.load_E.clone() for router in routers], recorded, gradient


AGAIN = [Recompute("uniform", 2), Recompute(parts=frozenset({"moe"}))]


@pytest.mark.parametrize("recompute", AGAIN, ids=str)
def test_a_repetition_changes_neither_loads_nor_losses(recompute: Recompute) -> None:
    loads, losses, gradient = _step(None)
    again = _step(recompute)
    assert float(loads[0].sum()) == 2 * 2 * 8  # two of four experts for each of the tokens of two passes
    assert all(torch.equal(one, other) for one, other in zip(loads, again[0], strict=True))
    assert again[1] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(again[2], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("recompute", AGAIN, ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"moe_router_force_load_balancing": True}, {"moe_input_jitter_eps": 0.2}], ids=str
)
def test_a_repetition_draws_the_same_choices_and_counts_offsets_once(
    recompute: Recompute, changes: dict[str, Any]
) -> None:
    kind = {
        "moe_router_load_balancing_type": ("quantile_balancing",),
        "moe_aux_loss_coeff": (0.0,),
        "moe_latent_size": 6,
    }
    once, again = _after(None, **kind, **changes), _after(recompute, **kind, **changes)
    for name, parameter in once.named_parameters():
        torch.testing.assert_close(again.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-14)
    for one, other in zip(once.modules(), again.modules(), strict=True):
        if isinstance(one, Router):
            assert isinstance(other, Router) and one.offset_batches == other.offset_batches == 2
            assert torch.equal(one.offsets_E, other.offsets_E) and bool(one.offsets_E.any())
