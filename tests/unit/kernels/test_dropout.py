"""Dropout on a CPU beside what it has to be: each element 0 or x / (1 - p), alike in the backward pass."""

from __future__ import annotations

import math

import pytest
import torch

from megalith.kernels.dropout import BITS, Drawing, dropout


@pytest.fixture(autouse=True)
def drawn_from_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of an older version that another test has loaded leaves the process with torch's draws."""
    monkeypatch.setattr(Drawing, "way", BITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5, 0.999])
def test_elements_are_dropped_or_scaled(probability: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(97, 1031).to(dtype).requires_grad_()  # no multiple of the elements that a draw decides
    grad = torch.randn_like(x)
    y = dropout(x, probability)
    (found,) = torch.autograd.grad(y, x, grad)
    kept = y != 0
    dropped = round(probability * 2**16)
    scale = torch.tensor(2**16 / (2**16 - dropped), dtype=dtype)  # one over the exact share that is kept
    nothing = torch.zeros((), dtype=dtype)
    torch.testing.assert_close(y, torch.where(kept, x * scale, nothing), rtol=0, atol=0)
    torch.testing.assert_close(found, torch.where(kept, grad * scale, nothing), rtol=0, atol=0)
    deviation = math.sqrt(probability * (1 - probability) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - dropped / 2**16)) < 5 * deviation


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(2)
    gone = (dropout(torch.ones(2**20), 0.25) == 0).view(-1, 4).double()
    together = gone.T @ gone / len(gone)  # of the four elements that a draw decides
    wanted = torch.full((4, 4), 0.0625, dtype=torch.float64).fill_diagonal_(0.25)
    assert (together - wanted).abs().max() < 5 * math.sqrt(0.25 * 0.75 / len(gone))


def test_without_dropout_nothing_is_drawn() -> None:
    x, state = torch.ones(3), torch.get_rng_state()
    assert torch.equal(dropout(x, 0.0), x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (5, 7)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert dropout(torch.ones(shape), 0.5).shape == shape


def test_same_stream_same_elements() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    first = dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x, 0.5))
