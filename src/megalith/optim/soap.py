"""SOAP: AdamW in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, arXiv:2409.11321, algorithm 3).

For the gradient G [O, I] of a matrix in the layers, with running means L of G G^T and R of G^T G and their eigenvectors
Q_L, Q_R by columns, largest eigenvalue first:

    M <- b1 M + (1 - b1) G                                first moment
    V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2                  second moment, in the eigenbasis
    W <- W - lr Q_L [M' / (sqrt(V') + eps)] Q_R^T         M' = Q_L^T M Q_R, both without their bias

As in NVIDIA's Emerging-Optimizers, which Megatron's `--optimizer soap` is: the means of G G^T have their bias corrected
as well, the first eigenvectors are exact, and later ones are brought up to date by one step of orthogonal iteration,
with V sorted as they are. M stands in the coordinates of the weights, as in the paper, so that it has the meaning of
AdamW's and needs no rotation when the basis changes. Directions in which there was no gradient have no eigenvectors of
their own: a small diagonal in ascending steps gives them those of the coordinates, so that rounding does not choose.

Every tensor-parallel rank gathers the gradient and both moments in the order of the whole matrix, computes all and
keeps its part. L, R, Q_L and Q_R are whole on each of them, and do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.distributed.comm import all_gather
from megalith.distributed.context import Axis
from megalith.nn.placement import Placement, Replicated, dim_of, global_shape, local_part, local_pieces
from megalith.optim.rules import Work

TIE_BREAKER = 1e-4
"""Of the mean eigenvalue, the largest element of the diagonal that is added before eigenvectors are computed."""


@dataclass(frozen=True)
class Soap:
    """The rule for the matrices inside the layers.

    Attributes:
        beta1, beta2, eps: of AdamW.
        shampoo_beta: decay of L and R.
        frequency: steps from one eigenbasis to the next.
        axis: over which matrices are divided.
        placements: of the parameters.
        tie_breaker: as `TIE_BREAKER`.
    """

    beta1: float
    beta2: float
    eps: float
    shampoo_beta: float
    frequency: int
    axis: Axis
    placements: Mapping[str, Placement] = field(hash=False)
    tie_breaker: float = TIE_BREAKER

    kinds: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R")

    def settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, "shampoo_beta": self.shampoo_beta}

    def square(self, kind: str, name: str, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of a state that is whole on every rank, None of one that is shaped and divided as the parameter.

        Args:
            kind: of the state.
            name, shape: of the parameter, of what is here of it.
        """
        if kind in ("exp_avg", "exp_avg_sq"):
            return None
        rows, columns = global_shape(shape, self._placement(name), self.axis.size)
        return (rows, rows) if kind.endswith("L") else (columns, columns)

    def update(self, work: Work) -> None:
        torch._foreach_mul_(list(work.params), 1.0 - work.lr * work.weight_decay)
        for number, name in enumerate(work.names):
            states = {kind: work.states[kind][number] for kind in self.kinds}
            step = self._step(name, work.grads[number], states, work.step)
            work.params[number].sub_(step, alpha=work.lr)

    def _step(self, name: str, grad: Tensor, states: Mapping[str, Tensor], before: int) -> Tensor:
        """What is to be subtracted from a parameter, but for the rate; `before` is the number of steps until now."""
        placement = self._placement(name)
        mean, squares, factors, bases = states["exp_avg"], states["exp_avg_sq"], _pair(states, ""), _pair(states, "Q_")
        mean.lerp_(grad.to(mean.dtype), 1.0 - self.beta1)
        whole = self._whole(grad.to(mean.dtype), placement)
        weight = (1.0 - self.shampoo_beta) / (1.0 - self.shampoo_beta ** (before + 1))
        for factor, product in zip(factors, (whole @ whole.t(), whole.t() @ whole), strict=True):
            factor.lerp_(product, weight)
        all_squares = self._whole(squares, placement)
        if before % self.frequency == 0:
            all_squares = self._renewed(factors, bases, all_squares, first=before == 0)
        left, right = bases
        all_squares = all_squares.lerp((left.t() @ whole @ right).square(), 1.0 - self.beta2)
        squares.copy_(self._part(all_squares, placement))
        turned = left.t() @ self._whole(mean, placement) @ right / (1.0 - self.beta1 ** (before + 1))
        root = (all_squares / (1.0 - self.beta2 ** (before + 1))).sqrt_()
        return self._part(left @ (turned / (root + self.eps)) @ right.t(), placement)

    def _renewed(self, factors: Sequence[Tensor], bases: Sequence[Tensor], squares: Tensor, *, first: bool) -> Tensor:
        """Bring the eigenvectors up to date in place; returns the second moment in the order of the new ones."""
        for dim, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
            steps = torch.arange(1, len(factor) + 1, dtype=factor.dtype, device=factor.device) / len(factor)
            definite = factor + torch.diag(steps.flip(0) * (self.tie_breaker * factor.diagonal().mean()))
            if first:
                basis.copy_(torch.linalg.eigh(definite).eigenvectors.flip(1))
                continue
            order = (basis * (definite @ basis)).sum(0).argsort(descending=True, stable=True)
            squares = squares.index_select(dim, order)
            basis.copy_(torch.linalg.qr(definite @ basis[:, order]).Q)
        return squares

    def _placement(self, name: str) -> Placement:
        return self.placements.get(name, Replicated())

    def _whole(self, part: Tensor, placement: Placement) -> Tensor:
        """The matrix of which every rank has a part, in the order that the model has it in on one rank."""
        size = self.axis.size
        if size == 1 or isinstance(placement, Replicated):
            return part
        dim, whole = dim_of(placement), part.new_empty(global_shape(part.shape, placement, size))
        for rank, held in enumerate(all_gather(part.contiguous(), self.axis, dim).chunk(size, dim)):
            for piece in local_pieces(placement, whole.shape[dim], size, rank):
                whole.narrow(dim, piece.whole, piece.length).copy_(held.narrow(dim, piece.local, piece.length))
        return whole

    def _part(self, whole: Tensor, placement: Placement) -> Tensor:
        """What of a whole matrix is here."""
        return local_part(whole, placement, self.axis.size, self.axis.index)


def _pair(states: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    return states[f"{prefix}L"], states[f"{prefix}R"]
