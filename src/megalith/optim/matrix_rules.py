"""Update rules of whole matrices: Muon, adaptive Muon and SOAP.

Under tensor parallelism each rank holds some rows or columns of a matrix. Muon gathers the momentum alone, or computes
blockwise; other rules run on matrices that `GatheredMatrices` has gathered. Every rank computes the whole update and
keeps its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.config import OptimizerConfig
from megalith.device import is_host
from megalith.distributed.comm import all_gather
from megalith.distributed.context import Axis
from megalith.kernels.torch_private import foreach_lerp_, foreach_mul_
from megalith.nn.placement import GroupedHeads, Placement, Replicated, dim_of, global_shape, local_part, local_pieces
from megalith.optim.rules import Shape, UpdateBatch, UpdateRule, run_update
from megalith.registry import mark

COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (7.2086, -15.5131, 9.0178),
        (3.9623, -2.5813, 0.4542),
        (3.9466, -2.5765, 0.4544),
        (3.8991, -2.5671, 0.4566),
        (3.7186, -2.5308, 0.4653),
        (3.1390, -2.3073, 0.4733),
        (2.1715, -1.5246, 0.3885),
        (1.8648, -1.2224, 0.3577),
    ),
}
"""(a, b, c) of each iteration, by `--muon-coefficient-type`; of Jordan et al., of their speed runs, and of Amsel et al.
2025, arXiv:2505.16932."""

NORM_FLOOR = 1e-7


def newton_schulz(matrix: Tensor, coefficients: Sequence[tuple[float, float, float]], steps: int) -> Tensor:
    """Return nearly the closest matrix with orthonormal rows or columns; `coefficients` repeat when exhausted."""
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NORM_FLOOR)
    for a, b, c in islice(cycle(coefficients), steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def shape_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of a matrix's update by its shape (`--muon-scale-mode`)."""
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    if mode == "unit_rms_norm":
        return float((rows / columns) ** 0.5)
    assert mode == "shape_scaling", mode
    return float(max(1.0, rows / columns) ** 0.5)


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix inside a layer, not an embedding or the output layer."""
    return parameter.dim() == 2 and not name.startswith(("embedding.", "output_layer.", "lm_head.output_layer."))


@mark("optimizer", "dist_muon", unit="matrix", gathers=True, mup="muon")
@mark("optimizer", "muon", unit="matrix", gathers=True, mup="muon")
@dataclass(frozen=True)
class Muon(UpdateRule):
    """Momentum, orthogonalised by Newton-Schulz iterations, for the parameters that `is_layer_matrix`.

    For a matrix with momentum M = U S V^T the update is about U V^T: every direction of the gradient gets the same
    length. The iteration X <- a X + (b A + c A A) X with A = X X^T drives the singular values to one without an SVD.
    Its coefficients, the scale by the shape and the split of the fused query-key-value projection are those of the
    library that Megatron's `--optimizer muon` uses (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982; NVIDIA-NeMo
    Emerging-Optimizers).

    Orthogonalising is equivariant under an exchange of rows or columns, so gathering the parts of all ranks in any
    order, computing and keeping one's own is exact; no matrix inside a layer is padded.
    """

    momentum: float
    nesterov: bool
    # scale_mode, extra_scale: length of the update
    scale_mode: str
    extra_scale: float
    # coefficients, steps: of the iteration
    coefficients: tuple[tuple[float, float, float], ...]
    steps: int
    split_qkv: bool  # orthogonalise the query, key and value parts of their projection separately
    blockwise: bool  # orthogonalise what a tensor-parallel rank holds alone, instead of the whole matrix
    matmul_precision: str
    axis: Axis
    placements: Mapping[str, Placement] = field(hash=False)

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    @classmethod
    def from_config(cls, config: OptimizerConfig, axis: Axis, placements: Mapping[str, Placement]) -> Muon:
        return cls(
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            scale_mode=config.muon_scale_mode,
            extra_scale=config.muon_extra_scale_factor,
            coefficients=COEFFICIENTS[config.muon_coefficient_type],
            steps=config.muon_num_ns_steps,
            split_qkv=config.muon_split_qkv,
            blockwise=config.muon_tp_mode == "blockwise",
            matmul_precision=config.muon_fp32_matmul_prec,
            axis=axis,
            placements=placements,
        )

    def group_settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def update(self, batch: UpdateBatch) -> None:
        buffers = batch.states["momentum_buffer"]
        foreach_mul_(list(batch.params), 1.0 - batch.lr * batch.weight_decay)
        foreach_lerp_(list(buffers), list(batch.grads), 1.0 - self.momentum)
        with _matmul_precision(self.matmul_precision, batch.params[0].device):
            for number, name in enumerate(batch.names):
                grad, buffer = batch.grads[number], buffers[number]
                direction = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
                second = batch.states["moment2_buffer"][number] if "moment2_buffer" in self.state_names else None
                update = self._update(direction, self.placements.get(name, Replicated()), second)
                batch.params[number].add_(update, alpha=-batch.lr)

    def _update(self, matrix: Tensor, placement: Placement, second: Tensor | None) -> Tensor:
        """Return the update of a matrix without the learning rate."""
        return self._orthogonalise_parts(matrix, placement, scaled=True)

    def _orthogonalise_parts(self, matrix: Tensor, placement: Placement, *, scaled: bool) -> Tensor:
        if not (self.split_qkv and isinstance(placement, GroupedHeads)):
            return self._orthogonalise(matrix, placement, scaled)
        rows = [heads * placement.head_size for heads in placement.heads_of_kinds]
        grouped = matrix.view(-1, sum(rows), matrix.shape[1])
        parts = [
            self._orthogonalise(part.reshape(-1, matrix.shape[1]), placement, scaled).view(part.shape)
            for part in grouped.split(rows, dim=1)
        ]
        return torch.cat(parts, dim=1).view(matrix.shape)

    def _orthogonalise(self, matrix: Tensor, placement: Placement, scaled: bool) -> Tensor:
        gathers = self._gathers(placement)
        dim = dim_of(placement) if gathers else 0
        whole = all_gather(matrix.contiguous(), self.axis, dim) if gathers else matrix
        result = newton_schulz(whole, self.coefficients, self.steps)
        if scaled:
            result = result * self._scale(*whole.shape)
        return result.narrow(dim, self.axis.index * matrix.shape[dim], matrix.shape[dim]) if gathers else result

    def _gathers(self, placement: Placement) -> bool:
        return self.axis.size > 1 and not isinstance(placement, Replicated) and not self.blockwise

    def _scale(self, rows: int, columns: int) -> float:
        return shape_scale(rows, columns, self.scale_mode) * self.extra_scale


@mark("optimizer", "adaptive_muon", unit="matrix", gathers=True, mup="muon")
@dataclass(frozen=True)
class AdaptiveMuon(Muon):
    """Muon with a second moment: AdaMuon (Si et al. 2025, arXiv:2507.11005) as Emerging-Optimizers has it.

    Each element of the orthogonalised momentum is divided by the root of the running mean of its square, which has no
    correction of its bias; the scale of the shape, that of the whole matrix, comes after that.
    """

    beta2: float = 0.95
    eps: float = 1e-8

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer", "moment2_buffer")

    def group_settings(self) -> dict[str, Any]:
        return {**super().group_settings(), "beta2": self.beta2, "eps": self.eps}

    def _update(self, matrix: Tensor, placement: Placement, second: Tensor | None) -> Tensor:
        assert second is not None, "as of `state_names`"
        shape = list(matrix.shape)
        if self._gathers(placement):
            shape[dim_of(placement)] *= self.axis.size
        raw = self._orthogonalise_parts(matrix, placement, scaled=False)
        second.lerp_(raw.square(), 1.0 - self.beta2)
        return raw / (second.sqrt() + self.eps) * self._scale(*shape)


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of fp32 matrix products on a GPU."""
    if is_host(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "low" else precision)  # the lowest that torch has
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


TIE_BREAKER = 1e-4
"""Largest element of the diagonal that is added before eigenvectors are computed, as a share of the mean eigenvalue."""


@mark("optimizer", "soap", unit="matrix")
@dataclass(frozen=True)
class Soap(UpdateRule):
    """AdamW in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, arXiv:2409.11321, algorithm 3).

    For the gradient G [O, I] of a matrix in the layers, with running means L of G G^T and R of G^T G and their
    eigenvectors Q_L, Q_R by columns, largest eigenvalue first:

        M <- b1 M + (1 - b1) G                                first moment
        V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2                  second moment, in the eigenbasis
        W <- W - lr Q_L [M' / (sqrt(V') + eps)] Q_R^T         M' = Q_L^T M Q_R, both without their bias

    As in NVIDIA's Emerging-Optimizers, which Megatron's `--optimizer soap` is: the means of G G^T have their bias
    corrected as well, the first eigenvectors are exact, and later ones are updated by one step of orthogonal iteration,
    with V sorted like them. M is kept in the coordinates of the weights, as in the paper: it is the first moment of
    AdamW, and is not rotated when the basis changes. Directions without gradient have arbitrary eigenvectors: a small
    diagonal in ascending steps selects the unit vectors, so that rounding does not. L, R, Q_L and Q_R are whole on each
    rank and do not depend on the layout.
    """

    beta1: float
    beta2: float
    eps: float
    shampoo_beta: float  # decay of L and R
    frequency: int  # steps from one eigenbasis to the next
    tie_breaker: float = TIE_BREAKER

    state_names = ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R")

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Soap:
        return cls(
            config.adam_beta1,
            config.adam_beta2,
            config.adam_eps,
            config.soap_shampoo_beta,
            config.soap_precondition_frequency,
        )

    def group_settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, "shampoo_beta": self.shampoo_beta}

    def replicated_states(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        rows, columns = shape
        return {"L": (rows, rows), "R": (columns, columns), "Q_L": (rows, rows), "Q_R": (columns, columns)}

    def update(self, batch: UpdateBatch) -> None:
        foreach_mul_(list(batch.params), 1.0 - batch.lr * batch.weight_decay)
        for number, (param, grad) in enumerate(zip(batch.params, batch.grads, strict=True)):
            states = {state: batch.states[state][number] for state in self.state_names}
            param.sub_(self._direction(grad, states, batch.steps_done), alpha=batch.lr)

    def _direction(self, grad: Tensor, states: Mapping[str, Tensor], steps_done: int) -> Tensor:
        """Return the update of a parameter without the learning rate; the states are changed in place."""
        mean, squares, factors, bases = states["exp_avg"], states["exp_avg_sq"], _pair(states, ""), _pair(states, "Q_")
        grad = grad.to(mean.dtype)
        mean.lerp_(grad, 1.0 - self.beta1)
        weight = (1.0 - self.shampoo_beta) / (1.0 - self.shampoo_beta ** (steps_done + 1))
        for factor, product in zip(factors, (grad @ grad.t(), grad.t() @ grad), strict=True):
            factor.lerp_(product, weight)
        if steps_done % self.frequency == 0:
            squares.copy_(self._update_bases(factors, bases, squares, first=steps_done == 0))
        left, right = bases
        squares.lerp_((left.t() @ grad @ right).square(), 1.0 - self.beta2)
        rotated = left.t() @ mean @ right / (1.0 - self.beta1 ** (steps_done + 1))
        root = (squares / (1.0 - self.beta2 ** (steps_done + 1))).sqrt_()
        return left @ (rotated / (root + self.eps)) @ right.t()

    def _update_bases(
        self, factors: Sequence[Tensor], bases: Sequence[Tensor], squares: Tensor, *, first: bool
    ) -> Tensor:
        """Update the eigenvectors in place; return the second moment in their new order."""
        for dim, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
            definite = break_ties(factor, self.tie_breaker)
            if first:
                basis.copy_(torch.linalg.eigh(definite).eigenvectors.flip(1))
                continue
            order = (basis * (definite @ basis)).sum(0).argsort(descending=True, stable=True)
            squares = squares.index_select(dim, order)
            basis.copy_(torch.linalg.qr(definite @ basis[:, order]).Q)
        return squares


def break_ties(factor: Tensor, share: float = TIE_BREAKER) -> Tensor:
    """Return L or R [N, N] of SOAP with a diagonal in ascending steps, at most this share of the mean of its own."""
    steps = torch.arange(1, len(factor) + 1, dtype=factor.dtype, device=factor.device) / len(factor)
    return factor + torch.diag(steps.flip(0) * (share * factor.diagonal().mean()))


def _pair(states: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    return states[f"{prefix}L"], states[f"{prefix}R"]


def gather_matrix(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """Return the whole matrix whose shard each tensor-parallel rank passes, with the rows in the order of one rank."""
    size = axis.size
    if size == 1 or isinstance(placement, Replicated):
        return shard
    dim, whole = dim_of(placement), shard.new_empty(global_shape(shard.shape, placement, size))
    for rank, gathered in enumerate(all_gather(shard.contiguous(), axis, dim).chunk(size, dim)):
        for piece in local_pieces(placement, whole.shape[dim], size, rank):
            whole.narrow(dim, piece.whole, piece.length).copy_(gathered.narrow(dim, piece.local, piece.length))
    return whole


@dataclass(frozen=True)
class GatheredMatrices(UpdateRule):
    """Runs a rule without tensor parallelism on whole matrices.

    Parameters, gradients and the states that are sharded like them are gathered over the tensor-parallel ranks, every
    rank computes the whole update, and each keeps its shard.
    """

    rule: UpdateRule
    axis: Axis
    placements: Mapping[str, Placement] = field(hash=False)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.rule.state_names

    def group_settings(self) -> dict[str, Any]:
        return self.rule.group_settings()

    def replicated_states(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        placement = self.placements.get(name, Replicated())
        return self.rule.replicated_states(name, global_shape(shape, placement, self.axis.size))

    def update(self, batch: UpdateBatch) -> None:
        if self.axis.size == 1:
            run_update(self.rule, batch)
            return
        for number, name in enumerate(batch.names):
            self._update(name, replace(batch, **_single(batch, number)))

    def _update(self, name: str, batch: UpdateBatch) -> None:
        """Update one matrix."""
        placement = self.placements.get(name, Replicated())
        replicated = self.replicated_states(name, tuple(batch.params[0].shape))
        shards = {"": batch.params[0], **{s: batch.states[s][0] for s in self.state_names if s not in replicated}}
        whole = {key: gather_matrix(shard, placement, self.axis) for key, shard in shards.items()}
        states = {state: [whole.get(state, batch.states[state][0])] for state in self.state_names}
        grads = [gather_matrix(batch.grads[0], placement, self.axis)]
        run_update(self.rule, replace(batch, params=[whole[""]], grads=grads, states=states))
        for key, shard in shards.items():
            if whole[key] is not shard:
                shard.copy_(local_part(whole[key], placement, self.axis.size, self.axis.index))


def _single(batch: UpdateBatch, number: int) -> dict[str, Any]:
    """Return the fields of a batch for one of its parameters."""
    states = {state: [tensors[number]] for state, tensors in batch.states.items()}
    one = slice(number, number + 1)
    return {"names": batch.names[one], "params": batch.params[one], "grads": batch.grads[one], "states": states}
