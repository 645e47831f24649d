"""A miniature in the run's own precision: a layout may be as far from one process as rounding has moved that one.

One process in fp64 tells how far rounding moves one process in the run's precision; a layout rounds elsewhere, and so
differs from it by about as much. Independent errors of equal size differ by 1.4 of it, and partial products of divided
weights are rounded once more; a bound of `FACTOR` leaves room for the spread of a few elements, and is about 1/10 of
the value even in bf16. Which elements of an fp32 tensor have no more digits than half precision does not depend on
their size: where few are such in one process and all in a layout, a sum was carried out in the wrong precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX
from megalith.optim.matrix_rules import break_ties
from megalith.prove.compare import ROUNDED, Comparison, Difference, box, compare_numbers, joined_pieces
from megalith.prove.record import SOAP_TIE_BREAKER, Piece, Pieces, Record

FACTOR = 8.0
MOST = 64.0
"""Units of rounding by which the median gradient and the numbers of the first step may be off in one process."""
UNDECIDED = 1 / 16
"""Share of the elements of a weight, at least one, of whose gradients rounding may decide the sign: Adam's step."""
FEW, ALL = 0.5, 0.95
"""Shares of elements that are representable in half precision: of a tensor in fp32, and of a rounded one."""
_HALF = (torch.bfloat16, torch.float16)
_ROUNDED = ("loss", "norm", "perplexity")


def compare_rounded(
    exact: Record, alone: Record, ranks: Sequence[Record], dtype: torch.dtype, *, routed: bool
) -> Comparison:
    """Compare ranks with one process, both in `dtype`, by their distance from one process in fp64.

    Args:
        routed: Tokens choose experts. In half precision rounding decides near ties of theirs: experts are then left
            out, and all else may differ by half of its size.
    """
    found, unit = Comparison(), torch.finfo(dtype).eps / 2
    choosy = routed and dtype in _HALF
    least = 0.5 / FACTOR if choosy else unit
    _compare_numbers(found, exact, alone, ranks, least, choosy)
    for step, (true, one) in enumerate(zip(exact.gradients, alone.gradients, strict=True), start=1):
        _compare_tensors(found, true, one, [rank.gradients[step - 1] for rank in ranks], dtype, least, choosy, step)
    true = exact.state | {name: exact.state[_weight_of(name)] for name in alone.state if name not in exact.state}
    held = [rank.state for rank in ranks]
    _compare_tensors(found, true, alone.state, held, dtype, least, choosy, 0, apart=2.0 * exact.updates)
    return found


def _weight_of(name: str) -> str:
    """Return the key of the weight of which a state is the master copy."""
    return name.removeprefix("optimizer.state.fp32_param.")


def _compare_numbers(
    found: Comparison, exact: Record, alone: Record, ranks: Sequence[Record], least: float, choosy: bool
) -> None:
    rounded, errors = dict[str, str](), dict[str, float]()
    steps = enumerate(zip(exact.gradients, alone.gradients, strict=True), start=1)
    moved = {f"step {step}, grad_norm": _moved(true, one) for step, (true, one) in steps}
    for name, value in exact.numbers.items():
        kind = name.rpartition(", ")[2]
        if any(word in name for word in _ROUNDED) and not name.endswith("loss_scale"):
            rounded[name] = kind
            errors[kind] = max(errors.get(kind, least), abs(alone.numbers[name] - value) / max(abs(value), 1e-300))
    for name, kind in rounded.items():
        values = exact.numbers[name], alone.numbers[name]
        own = abs(values[1] - values[0]) / max(abs(values[0]), 1e-300)
        if name.startswith("step 1,") and not own <= MOST * least:
            found.add(f"{ROUNDED}number", name, _off("number", name, own, values=values), math.inf)
        bound = FACTOR * max(errors[kind], moved.get(name, 0.0))
        compare_numbers(found, {name: alone.numbers[name]}, ranks, bound, f"{ROUNDED}number")
    others = {
        name: value
        for name, value in alone.numbers.items()
        if name not in rounded and "num_zeros" not in name and not (choosy and "expert_load" in name)
    }
    compare_numbers(found, others, ranks, kind=f"{ROUNDED}number")


def _moved(exact: Pieces, alone: Pieces) -> float:
    """Return how far rounding has moved a gradient in one process, over its norm, which can differ by as much."""
    true, one = (torch.cat([joined_pieces(held[name]).flatten() for name in alone]) for held in (exact, alone))
    return float((one - true).norm()) / max(float(true.norm()), 1e-300)


def _compare_tensors(
    found: Comparison,
    exact: Pieces,
    alone: Pieces,
    ranks: Sequence[Pieces],
    dtype: torch.dtype,
    least: float,
    choosy: bool,
    step: int,
    apart: float = 0.0,
) -> None:
    """Compare gradients of a step, or at step 0 the state; `apart` is what Adam's updates of a weight may differ by."""
    names = [name for name in alone if not (choosy and ("experts" in name or "router" in name))]
    true = {name: joined_pieces(_decided(name, exact)) for name in names}
    one = {name: joined_pieces(_decided(name, alone)) for name in names}
    moved = {name: float((one[name] - true[name]).norm()) for name in names}
    sizes = {name: float(tensor.norm()) for name, tensor in true.items()}
    usual = max(least, median([moved[name] / sizes[name] for name in names if sizes[name]] or [0.0]))
    if step == 1 and not usual <= MOST * least:
        found.add(f"{ROUNDED}gradient", "all", _off("gradient", "all, the median", usual, step=1), math.inf)
    largest = max((float(tensor.abs().max()) for tensor in true.values()), default=0.0) if step else 0.0
    for name in names:
        bound = FACTOR * max(moved[name], usual * sizes[name], least * largest * math.sqrt(true[name].numel()))
        held = [
            (rank, piece, decided.tensor)
            for rank, pieces in enumerate(ranks)
            for piece, decided in zip(pieces.get(name, ()), _decided(name, pieces), strict=True)
        ]
        moves = apart if f"{OPTIMIZER_PREFIX}exp_avg_sq.{_weight_of(name)}" in alone else 0.0
        _compare_tensor(found, name, one[name], alone[name], held, bound, dtype, step, moves)


def _decided(name: str, pieces: Pieces) -> Sequence[Piece]:
    """Return what rounding does not decide of a tensor: all of it, but of an eigenbasis of SOAP what it diagonalizes.

    Rounding decides the signs of eigenvectors and, where eigenvalues are close, their order. Not the matrix that has
    these eigenvectors Q, with the diagonal of Q^T L Q for eigenvalues: Q diag(Q^T L Q) Q^T.
    """
    if not name.startswith((f"{OPTIMIZER_PREFIX}Q_L.", f"{OPTIMIZER_PREFIX}Q_R.")):
        return pieces.get(name, ())
    factors = pieces.get(name.replace(f"{OPTIMIZER_PREFIX}Q_", OPTIMIZER_PREFIX, 1), ())
    return [
        piece._replace(tensor=_diagonalized(piece.tensor, factor.tensor))
        for piece, factor in zip(pieces.get(name, ()), factors, strict=True)
    ]


def _diagonalized(bases: Tensor, factors: Tensor) -> Tensor:
    """Return Q diag(Q^T L Q) Q^T for bases Q and factors L, both [..., N, N], L with its ties broken."""
    size = bases.shape[-1]
    flat = zip(bases.double().reshape(-1, size, size), factors.double().reshape(-1, size, size), strict=True)
    products = [(q * (q * (break_ties(factor, SOAP_TIE_BREAKER) @ q)).sum(0)) @ q.t() for q, factor in flat]
    return torch.stack(products).reshape(bases.shape)


def _off(kind: str, name: str, error: float, **where: Any) -> Difference:
    return Difference(f"{ROUNDED}{kind}", name, error, against="one process in fp64", **where)


def _compare_tensor(
    found: Comparison,
    name: str,
    one: Tensor,
    pieces: Sequence[Piece],
    held: Sequence[tuple[int, Piece, Tensor]],
    bound: float,
    dtype: torch.dtype,
    step: int,
    apart: float,
) -> None:
    kind = f"{ROUNDED}{'gradient' if step else 'moment' if name.startswith('optimizer.') else 'weight'}"
    worst, fine = 0.0, dtype in _HALF and _share(pieces, dtype, unknown=1.0) <= FEW
    for rank, piece, decided in held:
        errors = (box(one, piece) - decided.double())[~piece.tensor.isnan()].abs()
        if apart and len(errors):
            most = errors.topk(math.ceil(len(errors) * UNDECIDED)).indices
            errors[most] = (errors[most] - apart).clamp(min=0.0)
        error = float(errors.norm())
        coarse = f"rounded to {dtype} on rank {rank}" if fine and _share([piece], dtype, unknown=0.0) >= ALL else ""
        if coarse or not error <= bound:
            size = error / (float(one.norm()) or 1.0)
            found.add(kind, name, Difference(kind, name, size, None, rank, step, what=coarse), math.inf)
            return
        worst = max(worst, error)
    found.add(kind, name, None, worst / bound if worst else 0.0)


def _share(pieces: Sequence[Piece], dtype: torch.dtype, *, unknown: float) -> float:
    """Return the share of elements of fp32 pieces that `dtype` represents; `unknown` of few and of other dtypes."""
    tensors = [piece.tensor[piece.tensor.isfinite() & (piece.tensor != 0)] for piece in pieces]
    elements = torch.cat(tensors) if tensors else torch.zeros(0)
    if elements.dtype != torch.float32 or len(elements) < 16:
        return unknown
    return float((elements == elements.to(dtype).float()).double().mean())
