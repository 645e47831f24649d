"""Compiled layers draw their dropout where those that are not compiled do."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from .test_recompute import TP2, TP2_SP, _run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"),
]


def _streams(flags: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The weights after two steps, and what torch's stream and that of this rank alone give then."""
    torch._dynamo.reset()
    seen, _ = _run(f"{flags} --compile", 2)
    *rest, shared, own = seen
    return [weight for weight in rest[4:] if weight.dim() == 1], shared, own


@pytest.mark.parametrize("layout", [TP2, TP2_SP])
def test_ranks_agree_in_what_they_hold_alike(ranks: Any, layout: str) -> None:
    """The weights of norms, which both ranks have, would go apart with masks that differ."""
    (weights, shared, own), (others, as_shared, not_own) = ranks.run(2, _streams, layout, seconds=600.0)
    norms = [number for number, weight in enumerate(weights) if weight.shape == (16,)]
    assert len(norms) >= 16
    assert all(torch.equal(weights[number], others[number]) for number in norms)
    assert torch.equal(shared, as_shared)
    assert not torch.equal(own, not_own)
