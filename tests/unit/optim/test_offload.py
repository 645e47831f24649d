"""Updates on the host give the numbers of those on the device; which parameters go there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.optim import build_optimizer
from megalith.optim import optimizer as module
from megalith.optim.optimizer import choose_offloaded


def test_the_first_parameters_up_to_the_part() -> None:
    sizes = {"a": 4, "b": 4, "c": 2}
    assert choose_offloaded(sizes, 0.0) == frozenset()
    assert choose_offloaded(sizes, 0.5) == {"a"}
    assert choose_offloaded(sizes, 0.8) == {"a", "b"}
    assert choose_offloaded(sizes, 1.0) == {"a", "b", "c"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str) -> None:
    """With copies in place of those to another memory, of which there is none here."""
    monkeypatch.setattr(module, "to_host", lambda tensor: tensor.clone())
    weights = []
    for offload in (0.0, 0.6):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 3, dtype=dtype))
        precision = PrecisionConfig(bf16=dtype == torch.bfloat16)
        optimizer = build_optimizer(model, OptimizerConfig(optimizer=name), precision, offload=offload)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 6), 0.5 + step, dtype=dtype)).float().square().sum().backward()
            assert optimizer.step(0.05, 0.1).applied
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert optimizer.params_norm() > 0
    assert all(torch.equal(plain, hosted) for plain, hosted in zip(*weights, strict=True))
