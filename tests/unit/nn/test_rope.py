"""The frequencies of rotary positions, stretched for long contexts as Llama 3.1 does."""

from __future__ import annotations

import math

import pytest
import torch

from megalith.nn import rope
from megalith.nn.rope import LongContext, RotationTable, rotation

SCALING = LongContext(factor=8.0)


def _of_wave(length: float) -> torch.Tensor:
    return torch.tensor([2 * math.pi / length], dtype=torch.float64)


@pytest.mark.parametrize(
    ("wave", "stretched"),
    [
        (10.0, 1.0),  # fast: as it was
        (2047.9, 1.0),
        (8192.1, 8.0),  # slow: the whole factor
        (1e6, 8.0),
    ],
)
def test_fast_frequencies_stay_and_slow_ones_are_stretched(wave: float, stretched: float) -> None:
    assert float(SCALING.scaled(_of_wave(wave))) == pytest.approx(float(_of_wave(wave * stretched)), rel=1e-12)


def test_between_them_it_goes_over_smoothly() -> None:
    for edge in (2048.0, 8192.0):
        below, above = (float(SCALING.scaled(_of_wave(edge * (1 + sign * 1e-9)))) for sign in (-1, 1))
        assert above == pytest.approx(below, rel=1e-6)
    middle = 8192 / 2.5  # half way between 8192 / 4 and 8192 / 1, in frequency
    wanted = 0.5 * float(_of_wave(middle)) + 0.5 * float(_of_wave(middle)) / 8
    assert float(SCALING.scaled(_of_wave(middle))) == pytest.approx(wanted, rel=1e-12)


def test_a_factor_of_one_changes_nothing() -> None:
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(LongContext(1.0).scaled(frequencies), frequencies, rtol=1e-12, atol=0)


def test_positions_turn_by_the_scaled_angle() -> None:
    positions, options = torch.tensor([0, 1000]), {"interleaved": False, "dtype": torch.float64}
    plain = rotation(positions, 4, 500000.0, **options)
    scaled = rotation(positions, 4, 500000.0, scaling=SCALING, **options)
    assert torch.equal(plain[0][:, 0, 0, 0], scaled[0][:, 0, 0, 0])  # the fastest channel
    slow = math.acos(float(scaled[0][1, 0, 0, 1]))
    torch.testing.assert_close(slow, SCALING.scaled(torch.tensor([500000.0**-0.5]).double()).item() * 1000)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_gives_what_is_computed_for_each_position(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"interleaved": interleaved, "dtype": torch.float32, "scaling": SCALING}
    built: list[int] = []

    def counted(positions_S: torch.Tensor, *args: object, **others: object) -> object:
        built.append(len(positions_S))
        return rotation(positions_S, *args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(rope, "rotation", counted)
    table = RotationTable(6, 10000.0, **options)
    for positions, length in (([0], 1), ([4, 0, 3], 5), ([7, 7], 8), ([2, 300], 301), (range(512), 512)):
        positions_S = torch.tensor(positions)
        with torch.inference_mode(length < 10):
            found = table(positions_S, length)
        assert all(map(torch.equal, found, rotation(positions_S, 6, 10000.0, **options)))
    assert built == [1, 8, 512]
    weight = torch.ones(6, requires_grad=True)
    (table(torch.tensor([1, 2]), 3)[0] * weight).sum().backward()  # the table that was built may be trained with
    assert weight.grad is not None
