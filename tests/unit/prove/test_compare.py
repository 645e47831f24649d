"""What counts as a difference between a layout and one process."""

from __future__ import annotations

import pytest
import torch

from megalith.prove.compare import compare
from megalith.prove.record import Piece, Pieces, Record


def _pieces(**values: float) -> Pieces:
    return {name: [Piece((0,), (1,), torch.tensor([value], dtype=torch.float64))] for name, value in values.items()}


@pytest.mark.parametrize(
    ("amplified", "found", "names"),
    [(3e3, 2e-12, []), (1.0, 2e-12, ["bias"]), (3e3, 1e-3, ["bias"])],
    ids=["rounding through Adam", "rounding of SGD", "fault"],
)
def test_weights_whose_gradient_is_zero_may_differ_by_what_the_update_makes_of_rounding(
    amplified: float, found: float, names: list[str]
) -> None:
    gradients = [_pieces(weight=0.1, bias=1e-17)]
    whole = Record(gradients=gradients, state=_pieces(weight=1.0, bias=-2e-12), amplified=amplified)
    rank = Record(gradients=gradients, state=_pieces(weight=1.0, bias=found), amplified=amplified)
    compared = compare(whole, [rank])
    assert [one.name for one in compared.differences] == names
    assert compared.counts["weight"] == 2
