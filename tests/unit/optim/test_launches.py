"""On an accelerator a step of the optimizer is a number of launches that does not grow with the parameters.

Counted on a CPU whose tensors are said to be elsewhere: a list operator is one call there, too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config import OptimizerConfig, PrecisionConfig
from megalith.optim import Optimizer, build_optimizer, elementwise, norms, rules
from megalith.optim.elementwise import AdamW

NO_LAUNCH = ("view", "slice", "split", "unbind", "detach", "alias", "select", "expand", "unsqueeze", "empty")
BF16 = PrecisionConfig(bf16=True)
ROUNDED: dict[str, Any] = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "main_grads_dtype": "bf16"}
KINDS: dict[str, tuple[dict[str, Any], PrecisionConfig]] = {
    "adam": ({"optimizer": "adam"}, BF16),
    "sgd": ({"optimizer": "sgd"}, BF16),
    "lion": ({"optimizer": "lion"}, BF16),
    "fp16": ({"optimizer": "adam"}, PrecisionConfig(fp16=True, initial_loss_scale=8.0)),
    "rounded": (ROUNDED, PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)),
}


class _Launches(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.name().removeprefix("aten::").startswith(NO_LAUNCH):
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (elementwise, norms, rules):
        monkeypatch.setattr(module, "is_host", lambda device: False)


def _built(kind: str, layers: int) -> tuple[nn.Sequential, Optimizer]:
    (changes, precision), half = KINDS[kind], torch.float16 if kind == "fp16" else torch.bfloat16
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))).to(half)
    return model, build_optimizer(model, OptimizerConfig(clip_grad=1e-3, **changes), precision)


def _step(model: nn.Module, optimizer: Optimizer) -> Counter[str]:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    (model(torch.linspace(-1, 2, 24).view(4, 6).to(dtype)).float().square().sum() * optimizer.loss_scale).backward()
    with _Launches() as launches:
        assert optimizer.step(0.01, 0.1).applied
    return launches.found


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", KINDS)
def test_launches_do_not_grow_with_the_parameters(kind: str) -> None:
    few, many = (_step(*_built(kind, layers)) for layers in (2, 12))
    assert few == many
    assert sum(many.values()) < 50


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_clipping_is_no_launch_of_its_own(kind: str) -> None:
    launches = _step(*_built(kind, 2))
    assert not any("mul" in name for name in launches if "foreach" in name), launches


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_that_of_a_cpu(kind: str, request: pytest.FixtureRequest) -> None:
    here, there = (_built(kind, 3) for _ in range(2))
    for _ in range(3):
        _step(*here)
    request.getfixturevalue("elsewhere")
    for _ in range(3):
        _step(*there)
    for (name, own), (_, other) in zip(here[1]._states().items(), there[1]._states().items(), strict=True):
        for parameter, tensor in own.items():
            (
                torch.testing.assert_close(
                    other[parameter], tensor, rtol=2e-2 if kind == "rounded" else 1e-5, atol=1e-7
                ),
                name,
            )


@pytest.mark.usefixtures("elsewhere")
def test_a_registered_update_gets_clipped_gradients() -> None:
    """A subclass of AdamW with an update of its own, to which the division by the kernel would be unknown."""
    norms_seen: list[float] = []

    class Watching(AdamW):
        def update(self, batch: rules.UpdateBatch) -> None:
            norms_seen.append(float(torch.stack([grad.norm() for grad in batch.grads]).norm()))
            super().update(batch)

    model, optimizer = _built("adam", 2)
    for group in optimizer.groups:
        object.__setattr__(group, "rule", Watching(0.9, 0.999, 1e-8))
    _step(model, optimizer)
    assert 0.0 < sum(norm**2 for norm in norms_seen) ** 0.5 <= 1e-3 * 1.001


def test_pieces_of_many_parameters_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "is_host", lambda device: False)
    monkeypatch.setattr(rules, "PIECE_ELEMENTS", 10)
    params = [torch.empty(size) for size in (4, 5, 23, 1)]
    pieces = [[(number, part.start, part.stop) for number, part in batch] for batch in rules._pieces(params)]
    assert pieces == [[(0, 0, 4), (1, 0, 5)], [(2, 0, 10)], [(2, 10, 20)], [(2, 20, 23), (3, 0, 1)]]
