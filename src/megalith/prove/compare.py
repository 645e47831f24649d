"""Comparison of the ranks of a miniature with one process, in the order in which a run computes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX
from megalith.prove.miniature import SAVED
from megalith.prove.record import Piece, Pieces, Record

TOLERANCE = 1e-10
"""Largest relative difference: rounding makes about 1e-14 of it in fp64, and a fault of a layout 1e-3 or more."""
ROUNDED = "rounded "
"""First word of a kind of what is compared in the run's own precision; its errors are shares of their bounds."""
ROUNDING = 1e-13
"""Largest element, relative to the largest gradient, of a gradient that is zero except for rounding."""


@dataclass(frozen=True)
class Difference:
    """Something that is not as in one process.

    Attributes:
        kind: "output" of a layer, "number", "gradient", "weight", "moment", the last four also behind `ROUNDED`;
            "tensor" or "logit" of an export.
        name: Of the tensor or number.
        error: Relative to the largest element.
        ratio: By which all its elements are multiplied; None if they differ otherwise.
        rank: That holds it; None for numbers, which are equal on all of them, or if no rank does.
        step: After which it stands; 0 for the end of the run.
        values: Of a number: in one process, and here.
        what: In words, in place of all these.
        against: What it is compared with.
    """

    kind: str
    name: str
    error: float
    ratio: float | None = None
    rank: int | None = None
    step: int = 0
    values: tuple[float, float] | None = None
    what: str = ""
    against: str = "one process"

    def __str__(self) -> str:
        if self.what:
            return f"{self.kind} {self.name}: {self.what}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        if self.values:
            return f"{self.name}: {self.values[1]:.12g}{where}, in {self.against} {self.values[0]:.12g}"
        how = (
            f"{self.ratio:.6g} times that of {self.against}"
            if self.ratio
            else f"off by {self.error:.2g} of its largest"
        )
        return f"{self.kind} of {self.name}{f' in step {self.step}' if self.step else ''}: {how}{where}"


@dataclass
class Comparison:
    """What was compared, and what differs.

    Attributes:
        worst: Kind -> largest relative difference that is within bounds, and of what.
        counts: Kind -> how many were compared.
        differences: In the order of computation: the first is the nearest to the cause.
    """

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def add(self, kind: str, name: str, difference: Difference | None, error: float) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if difference is not None:
            self.differences.append(difference)
        elif error >= self.worst.get(kind, (0.0, ""))[0]:
            self.worst[kind] = (error, name)

    def largest(self, *, rounded: bool) -> float:
        """Return the largest difference within bounds: relative, or in the run's own precision of its bound."""
        return max((error for kind, (error, _) in self.worst.items() if kind.startswith(ROUNDED) == rounded), default=0)

    def merge(self, other: Comparison) -> None:
        """Add another comparison."""
        for kind, (error, name) in other.worst.items():
            if error >= self.worst.get(kind, (0.0, ""))[0]:
                self.worst[kind] = (error, name)
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        self.differences += other.differences


def compare(wanted: Record, ranks: Sequence[Record], *, resumed: bool = False) -> Comparison:
    """Compare ranks with one process: outputs, then numbers and gradients step by step, then weights and moments.

    Args:
        resumed: The ranks have started after step `SAVED`: what they have loaded is compared, and what follows.
    """
    found = Comparison()
    if resumed:
        compare_state(found, wanted, wanted.saved, [rank.saved for rank in ranks])
    _compare_outputs(found, {} if resumed else wanted.outputs, ranks)
    step = 0
    for moment in dict.fromkeys(name.partition(",")[0] for name in wanted.numbers):
        numbers = {name: value for name, value in wanted.numbers.items() if name.partition(",")[0] == moment}
        zeros = numbers.pop(f"{moment}, num_zeros", None)
        step += moment.startswith("step ")
        if resumed and step <= SAVED:
            continue
        losses = {name: value for name, value in numbers.items() if "loss" in name}
        compare_numbers(found, losses, ranks)
        if moment.startswith("step "):
            held = [rank.gradients[step - 1 - SAVED * resumed] for rank in ranks]
            compare_gradients(found, wanted.gradients[step - 1], held, step)
            if zeros is not None:  # rounding may make a zero of one layout none in another
                compare_numbers(found, {f"{moment}, num_zeros": _zeros(held)}, ranks)
        compare_numbers(found, {name: value for name, value in numbers.items() if name not in losses}, ranks)
    compare_state(found, wanted, wanted.state, [rank.state for rank in ranks])
    return found


def unequal(whole: Sequence[Record], resumed: Sequence[Record]) -> Difference | None:
    """Return the first difference of ranks that have started after step `SAVED` from the same ones uninterrupted."""
    for rank, (one, here) in enumerate(zip(whole, resumed, strict=True)):
        for name, value in here.numbers.items():
            if value != one.numbers[name]:
                return _number(name, one.numbers[name], value, math.inf, rank)
        for kind, states in (("moment", (one.saved, here.saved)), ("weight", (one.state, here.state))):
            for name, pieces in states[0].items():
                for first, second in zip(pieces, states[1][name], strict=True):
                    if not torch.equal(first.tensor, second.tensor):
                        return Difference(kind, name, math.inf, rank=rank)
    return None


def compare_numbers(
    found: Comparison,
    numbers: Mapping[str, float],
    ranks: Iterable[Record],
    tolerance: float = TOLERANCE,
    kind: str = "number",
) -> None:
    """Compare printed numbers, none of which a rank may lack; `kind` is that under which they are counted."""
    for name, value in numbers.items():
        for rank, record in enumerate(ranks):
            here = record.numbers.get(name, math.nan)
            error = abs(here - value) / max(abs(value), 1e-300) if here != value else 0.0
            different = not error <= tolerance
            wrong = replace(_number(name, value, here, error, rank), kind=kind) if different else None
            found.add(kind, name, wrong, error / tolerance if kind.startswith(ROUNDED) else error)
            if different:
                break


def _number(name: str, value: float, here: float, error: float, rank: int) -> Difference:
    step = re.search(r"step (\d+)", name)
    ratio = here / value if value else None
    return Difference("number", name, error, ratio, rank, int(step[1]) if step else 0, (value, here))


def _compare_outputs(found: Comparison, wanted: Mapping[str, NDArray[np.float64]], ranks: Sequence[Record]) -> None:
    """Compare the sorted norms of output vectors, which do not depend on which rank has which positions."""
    for name in sorted(wanted, key=depth):
        here = np.sort(np.concatenate([rank.outputs[name] for rank in ranks if name in rank.outputs] or [np.zeros(0)]))
        norms = wanted[name]
        copies, rest = divmod(len(here), len(norms))
        if rest or not copies:
            found.add("output", name, Difference("output", name, math.inf, step=1), math.inf)
            continue
        error = float(np.abs(here - np.repeat(norms, copies)).max() / norms.max())
        found.add("output", name, Difference("output", name, error, step=1) if not error <= TOLERANCE else None, error)


def depth(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts names in the order of the forward pass: embedding, encoder, layers, MTP, output."""
    layer = re.search(r"layers\.(\d+)", name)
    number = int(layer[1]) if layer else -1 if "embedding" in name else 10_000
    return ("mtp" in name or "decoder" in name, number, name)


def compare_gradients(
    found: Comparison, wanted: Pieces, ranks: Sequence[Pieces], step: int, floor: float | None = None
) -> None:
    """Compare gradients in the order in which the backward pass computes them.

    Args:
        floor: Difference that is rounding, whatever the size of a gradient; by default relative to the largest one.
    """
    full = {name: joined_pieces(pieces) for name, pieces in wanted.items()}
    if floor is None:
        floor = ROUNDING * max((float(tensor.abs().max()) for tensor in full.values()), default=0.0)
    for name in sorted(full, key=depth, reverse=True):
        held = [(rank, piece) for rank, pieces in enumerate(ranks) for piece in pieces.get(name, ())]
        compare_tensor(found, "gradient", name, full[name], held, floor, step)
    for name in sorted({name for pieces in ranks for name in pieces} - set(full)):
        found.add("gradient", name, Difference("gradient", name, math.inf, step=step), math.inf)


def compare_state(found: Comparison, whole: Record, wanted: Pieces, ranks: Sequence[Pieces]) -> None:
    """Compare weights and optimizer states, which are those of `whole` after one of its steps.

    Elements of weights whose second moment is that of rounding may differ by what Adam makes an update of.
    """
    steps = (piece.tensor for step in whole.gradients for pieces in step.values() for piece in pieces)
    floor = ROUNDING * max((float(gradient.abs().max()) for gradient in steps), default=0.0)
    for name in sorted(wanted, key=depth):
        held = [(rank, piece) for rank, pieces in enumerate(ranks) for piece in pieces.get(name, ())]
        kind, least = "moment" if name.startswith("optimizer.") else "weight", torch.tensor(floor, dtype=torch.float64)
        if second := wanted.get(f"{OPTIMIZER_PREFIX}exp_avg_sq.{name}"):
            least = torch.where(joined_pieces(second) <= floor**2, floor * whole.amplified, least)
        compare_tensor(found, kind, name, joined_pieces(wanted[name]), held, least, 0)


def compare_tensor(
    found: Comparison,
    kind: str,
    name: str,
    wanted: Tensor,
    held: Iterable[tuple[int, Piece]],
    floor: float | Tensor,
    step: int,
) -> None:
    """Compare a tensor with its pieces on all ranks: each element is held somewhere, and rightly wherever it is.

    Args:
        floor: Difference that is rounding, whatever the size of the tensor; of all elements, or of each.
    """
    largest, worst = float(wanted.abs().max()) if wanted.numel() else 0.0, 0.0
    bound = (TOLERANCE * largest + torch.as_tensor(floor, dtype=torch.float64)).expand(wanted.shape)
    covered = torch.zeros(wanted.shape, dtype=torch.bool)
    for rank, piece in held:
        if piece.shape != tuple(wanted.shape):
            found.add(kind, name, Difference(kind, name, math.inf, rank=rank, step=step), math.inf)
            return
        there, owned = box(wanted, piece), ~piece.tensor.isnan()
        errors, allowed = (there - piece.tensor)[owned].abs(), box(bound, piece)[owned]
        if not bool((errors <= allowed).all()):
            error = float(errors.max())
            ratio = _ratio(there[owned], piece.tensor[owned], largest)
            found.add(kind, name, Difference(kind, name, error / (largest or 1.0), ratio, rank, step), math.inf)
            return
        if float(errors.sum()):
            worst = max(worst, TOLERANCE * float((errors / allowed).nan_to_num().max()))  # 0 of 0 allowed is none
        box(covered, piece).logical_or_(owned)
    if not bool(covered.all()):
        found.add(kind, f"{name}: some elements are held by no rank", Difference(kind, name, math.inf, step=step), 0.0)
        return
    found.add(kind, name, None, worst)


def box(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the part of a global tensor that a piece holds."""
    for dim, (start, size) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _ratio(wanted: Tensor, here: Tensor, largest: float) -> float | None:
    """Return the factor between two tensors; None if it is not the same for all elements above rounding."""
    known = wanted.abs() > 1e-6 * largest
    ratios = here[known] / wanted[known]
    if not len(ratios) or not bool(ratios.isfinite().all()):
        return None
    factor = float(ratios.median())
    return factor if float((ratios - factor).abs().max()) <= 1e-6 * abs(factor) else None


def joined_pieces(pieces: Iterable[Piece]) -> Tensor:
    """Return the tensor that pieces make up; a later one counts where two hold an element."""
    pieces = list(pieces)
    whole = torch.full(pieces[0].shape, torch.nan, dtype=torch.float64)
    for piece in pieces:
        view = box(whole, piece)
        view.copy_(torch.where(piece.tensor.isnan(), view, piece.tensor))
    return whole


def _zeros(ranks: Iterable[Pieces]) -> float:
    """Return how many elements of the gradients that all ranks hold are zero, each counted once."""
    pieces: Pieces = {}
    for held in ranks:
        for name, parts in held.items():
            pieces.setdefault(name, []).extend(parts)
    return float(sum(int((joined_pieces(parts) == 0).sum()) for parts in pieces.values()))
