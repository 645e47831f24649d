"""Muon: momentum, orthogonalised by Newton-Schulz iterations, for the matrices inside the layers.

For a matrix with momentum M = U S V^T the update is about U V^T: every direction of the gradient gets the same
length. The iteration X <- a X + (b A + c A A) X with A = X X^T drives the singular values to one without an SVD. Its
coefficients, the scale by the shape and the split of the fused query-key-value projection are those of the library that
Megatron's `--optimizer muon` uses (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982; NVIDIA-NeMo
Emerging-Optimizers).

Under tensor parallelism each rank holds some rows or columns of a matrix. Orthogonalising is equivariant under an
exchange of rows or columns, so gathering the parts of all ranks in any order, computing and keeping one's own is exact;
the padding that a layout may have plays no part, since no matrix inside a layer is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.distributed.comm import all_gather
from megalith.distributed.context import Axis
from megalith.nn.placement import GroupedHeads, Placement, Replicated, dim_of
from megalith.optim.rules import Work

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


def orthogonalised(matrix: Tensor, coefficients: Sequence[tuple[float, float, float]], steps: int) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, about: its singular values are near one.

    Args:
        matrix: [O, I].
        coefficients: of the iterations, from the first again when they run out.
        steps: iterations.
    """
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NORM_FLOOR)
    for a, b, c in islice(cycle(coefficients), steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def shape_scale(rows: int, columns: int, mode: str) -> float:
    """The factor that makes updates of matrices of different shapes alike, by `--muon-scale-mode`."""
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    if mode == "unit_rms_norm":
        return float((rows / columns) ** 0.5)
    assert mode == "shape_scaling", mode
    return float(max(1.0, rows / columns) ** 0.5)


def is_of_layers(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix inside a layer; embeddings and the output layer are tables, not maps."""
    return parameter.dim() == 2 and not name.startswith(("embedding.", "output_layer.", "lm_head.output_layer."))


@dataclass(frozen=True)
class Muon:
    """The rule for the parameters that `is_of_layers`.

    Attributes:
        momentum, nesterov: of the momentum that is orthogonalised.
        scale_mode, extra_scale: length of the update.
        coefficients, steps: of the iteration.
        split_qkv: orthogonalise the query, key and value parts of their projection each by itself.
        blockwise: orthogonalise what a tensor-parallel rank holds alone, instead of the whole matrix.
        matmul_precision: of fp32 products on a GPU.
        placements: of the parameters.
        axis: over which they are divided.
    """

    momentum: float
    nesterov: bool
    scale_mode: str
    extra_scale: float
    coefficients: tuple[tuple[float, float, float], ...]
    steps: int
    split_qkv: bool
    blockwise: bool
    matmul_precision: str
    axis: Axis
    placements: Mapping[str, Placement] = field(hash=False)

    kinds: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def update(self, work: Work) -> None:
        buffers = work.states["momentum_buffer"]
        torch._foreach_mul_(list(work.params), 1.0 - work.lr * work.weight_decay)
        torch._foreach_lerp_(list(buffers), list(work.grads), 1.0 - self.momentum)
        with _matmul_precision(self.matmul_precision, work.params[0].device):
            for number, name in enumerate(work.names):
                grad, buffer = work.grads[number], buffers[number]
                direction = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
                second = work.states["moment2_buffer"][number] if "moment2_buffer" in self.kinds else None
                update = self._update(direction, self.placements.get(name, Replicated()), second)
                work.params[number].add_(update, alpha=-work.lr)

    def _update(self, matrix: Tensor, placement: Placement, second: Tensor | None) -> Tensor:
        """What is to be subtracted from a parameter, but for the rate.

        Args:
            matrix: the direction of its momentum.
            placement: how the parameter is divided.
            second: its second moment, for rules that have one.
        """
        return self._by_parts(matrix, placement, scaled=True)

    def _by_parts(self, matrix: Tensor, placement: Placement, *, scaled: bool) -> Tensor:
        if not (self.split_qkv and isinstance(placement, GroupedHeads)):
            return self._orthogonalised(matrix, placement, scaled)
        rows = [heads * placement.head_size for heads in placement.heads_of_kinds]
        grouped = matrix.view(-1, sum(rows), matrix.shape[1])
        parts = [
            self._orthogonalised(part.reshape(-1, matrix.shape[1]), placement, scaled).view(part.shape)
            for part in grouped.split(rows, dim=1)
        ]
        return torch.cat(parts, dim=1).view(matrix.shape)

    def _orthogonalised(self, matrix: Tensor, placement: Placement, scaled: bool) -> Tensor:
        divided = self._divided(placement)
        dim = dim_of(placement) if divided else 0
        whole = all_gather(matrix.contiguous(), self.axis, dim) if divided else matrix
        result = orthogonalised(whole, self.coefficients, self.steps)
        if scaled:
            result = result * self._scale(*whole.shape)
        return result.narrow(dim, self.axis.index * matrix.shape[dim], matrix.shape[dim]) if divided else result

    def _divided(self, placement: Placement) -> bool:
        return self.axis.size > 1 and not isinstance(placement, Replicated) and not self.blockwise

    def _scale(self, rows: int, columns: int) -> float:
        return shape_scale(rows, columns, self.scale_mode) * self.extra_scale


@dataclass(frozen=True)
class AdaptiveMuon(Muon):
    """Muon with a second moment: AdaMuon (Si et al. 2025, arXiv:2507.11005) as Emerging-Optimizers has it.

    Each element of the orthogonalised momentum is divided by the root of the running mean of its square, which has no
    correction of its bias; the scale of the shape, that of the whole matrix, comes after that.

    Attributes:
        beta2: of the running mean.
        eps: added to its root.
    """

    beta2: float = 0.95
    eps: float = 1e-8

    kinds: ClassVar[tuple[str, ...]] = ("momentum_buffer", "moment2_buffer")

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "beta2": self.beta2, "eps": self.eps}

    def _update(self, matrix: Tensor, placement: Placement, second: Tensor | None) -> Tensor:
        assert second is not None, "as of `kinds`"
        shape = list(matrix.shape)
        if self._divided(placement):
            shape[dim_of(placement)] *= self.axis.size
        raw = self._by_parts(matrix, placement, scaled=False)
        second.lerp_(raw.square(), 1.0 - self.beta2)
        return raw / (second.sqrt() + self.eps) * self._scale(*shape)


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """fp32 products on a GPU in this precision; on a CPU there is one."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "low" else precision)  # torch knows nothing lower
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
