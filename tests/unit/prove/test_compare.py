"""What counts as a difference between a layout and one process."""

from __future__ import annotations

import pytest
import torch

from megalith.optim.matrix_rules import break_ties
from megalith.prove.compare import compare
from megalith.prove.record import SOAP_TIE_BREAKER, Piece, Pieces, Record
from megalith.prove.rounding import compare_rounded


def _pieces(**values: float) -> Pieces:
    return {name: [Piece((0,), (1,), torch.tensor([value], dtype=torch.float64))] for name, value in values.items()}


@pytest.mark.parametrize(
    ("amplified", "moment", "found", "names"),
    [
        (3e3, 1e-34, 2e-12, []),
        (1.0, 1e-34, 2e-12, ["bias"]),
        (3e3, 1e-4, 2e-12, ["bias"]),
        (3e3, None, 2e-12, ["bias"]),
        (3e3, 1e-34, 1e-3, ["bias"]),
    ],
    ids=["rounding through Adam", "a small rate", "a gradient", "another optimizer", "fault"],
)
def test_weights_whose_gradient_is_zero_may_differ_by_what_adam_makes_of_rounding(
    amplified: float, moment: float | None, found: float, names: list[str]
) -> None:
    gradients = [_pieces(weight=0.1, bias=1e-17)]
    moments = {} if moment is None else _pieces(**{"optimizer.state.exp_avg_sq.bias": moment})
    whole = Record(gradients=gradients, state=_pieces(weight=1.0, bias=-2e-12) | moments, amplified=amplified)
    rank = Record(gradients=gradients, state=_pieces(weight=1.0, bias=found) | moments)
    compared = compare(whole, [rank])
    assert [one.name for one in compared.differences] == names
    assert compared.counts["weight"] == 2


@pytest.mark.parametrize(("zeros", "names"), [(0, ["gradient"]), (4, [])], ids=["enough", "few"])
def test_a_gradient_is_rounded_on_a_rank_where_enough_elements_of_one_process_are_not(
    zeros: int, names: list[str]
) -> None:
    fine = torch.linspace(1.0, 2.0, 19)[1:17]  # none of which bf16 represents
    fine[:zeros] = 0.0

    def of(tensor: torch.Tensor) -> Record:
        return Record(gradients=[{"gradient": [Piece((0,), (16,), tensor)]}])

    compared = compare_rounded(of(fine.double()), of(fine), [of(fine.bfloat16().float())], torch.bfloat16, routed=False)
    assert [one.name for one in compared.differences] == names


@pytest.mark.parametrize(
    ("name", "off", "adam", "names"),
    [
        ("weight", {3: 1.5e-3}, True, []),
        ("weight", {3: 1.5e-3}, False, ["weight"]),
        ("weight", {3: 2.5e-3}, True, ["weight"]),
        ("weight", {3: 1.5e-3, 4: 1.5e-3}, True, ["weight"]),
        ("weight", {3: torch.inf}, True, ["weight"]),
        ("optimizer.state.exp_avg.weight", {3: 1.5e-3}, True, ["optimizer.state.exp_avg.weight"]),
        ("optimizer.state.fp32_param.weight", {3: 1.5e-3}, True, []),
    ],
    ids=["a step back", "without Adam", "more than a step", "two of 16", "an overflow", "a moment", "a master weight"],
)
def test_rounding_may_turn_an_adam_step_of_few_elements_of_a_weight(
    name: str, off: dict[int, float], adam: bool, names: list[str]
) -> None:
    whole = torch.linspace(1e-3, 2e-3, 16)
    here = whole.clone()
    for element, error in off.items():
        here[element] += error

    def of(tensor: torch.Tensor) -> Record:
        held = {one: [Piece((0,), (16,), tensor)] for one in {name, name.removeprefix("optimizer.state.fp32_param.")}}
        moment = _pieces(**{"optimizer.state.exp_avg_sq.weight": 1.0}) if adam else {}
        return Record(state=held | moment, updates=1e-3)

    compared = compare_rounded(of(whole.double()), of(whole), [of(here)], torch.float32, routed=False)
    assert sorted({one.name for one in compared.differences} - ({"weight"} - {name})) == names


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("sign", []),
        ("order", []),
        ("stale", ["optimizer.state.Q_L.weight"]),
        ("skewed", ["optimizer.state.Q_L.weight"]),
        ("rounded", ["optimizer.state.Q_L.weight"]),
    ],
)
def test_rounding_decides_the_signs_and_the_order_of_eigenvectors_but_not_what_they_diagonalize(
    change: str, names: list[str]
) -> None:
    gradient = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    factor, older = gradient @ gradient.T, gradient[:, :6] @ gradient[:, :6].T
    basis = torch.linalg.eigh(break_ties(factor, SOAP_TIE_BREAKER)).eigenvectors
    here = {
        "sign": basis * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8),
        "order": basis.flip(1),
        "stale": torch.linalg.eigh(break_ties(older, SOAP_TIE_BREAKER)).eigenvectors,
        "skewed": basis + 0.05 * torch.eye(16, dtype=torch.float64),
        "rounded": basis.bfloat16(),
    }[change]

    def of(eigenvectors: torch.Tensor, dtype: torch.dtype) -> Record:
        tensors = {"optimizer.state.L.weight": factor, "optimizer.state.Q_L.weight": eigenvectors}
        return Record(state={name: [Piece((0, 0), (16, 16), one.to(dtype))] for name, one in tensors.items()})

    exact, alone = of(basis, torch.float64), of(basis, torch.float32)
    compared = compare_rounded(exact, alone, [of(here, torch.float32)], torch.bfloat16, routed=False)
    assert [one.name for one in compared.differences] == names


@pytest.mark.parametrize(("norm", "names"), [(1.4, []), (2.4, ["step 2, grad_norm"])], ids=["moved", "fault"])
def test_a_gradient_norm_may_be_off_by_as_much_as_rounding_moves_the_gradient(norm: float, names: list[str]) -> None:
    def of(value: float, **gradient: float) -> Record:
        steps = [_pieces(a=1.0, b=1.0), _pieces(**gradient)]
        return Record(numbers={"step 1, grad_norm": 2**0.5, "step 2, grad_norm": value}, gradients=steps)

    exact, alone = of(1.0, a=1.0, b=0.0), of(1.0, a=0.995, b=0.1)  # of which the norm is the same, by chance
    compared = compare_rounded(exact, alone, [of(norm, a=0.995, b=0.1)], torch.bfloat16, routed=False)
    assert [one.name for one in compared.differences] == names
