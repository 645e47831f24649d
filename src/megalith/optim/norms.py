"""Norms that count every element of the model once, though several ranks hold some of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.distributed.comm import all_reduce
from megalith.distributed.context import Axis
from megalith.flat import subtract_ranges
from megalith.kernels.torch_private import foreach_norm
from megalith.nn.precision import at_least_fp32
from megalith.parallel.data import ReplicatedRows

CHUNK_ELEMENTS = 1 << 18  # 1 MiB in fp32


class Gradients(Protocol):
    """The gradients of named parameters in the course of a step."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def owned_range(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of a flattened parameter that this rank updates."""
        ...


class GlobalNorms:
    """Norms and zero counts over all ranks of tensors shaped like this rank's shards.

    Of replicated elements only the first replica counts. Every rank calls the same methods and gets the same bits.

    Args:
        axis: the ranks that the sums are over.
        not_counted: names of the parameters that another replica counts.
    """

    def __init__(
        self,
        gradients: Gradients,
        replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]],
        axis: Axis,
        not_counted: Collection[str] = (),
    ) -> None:
        self._axis, self._device = axis, gradients.device
        self._dtype = at_least_fp32(gradients.dtype)
        self._counted_ranges: dict[str, list[tuple[int, int]]] = {}  # of the parameters that are not counted whole
        for name, shape in gradients.shapes.items():
            width = prod(shape[1:])
            later_replicas = [held for held in replicated_rows.get(name, ()) if not held.is_first_replica]
            if name in not_counted:
                self._counted_ranges[name] = []
            elif later_replicas:
                start, stop = gradients.owned_range(name)
                rows = [held.rows or (0, shape[0]) for held in later_replicas]
                rest = subtract_ranges((start, stop), [(first * width, last * width) for first, last in rows])
                self._counted_ranges[name] = [(first - start, last - start) for first, last in rest]

    def squared_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the square of the L2 norm, a scalar on the device.

        Of each tensor in at least fp32, then of the stack of these, squared; the sum over ranks. The root is taken in
        double precision (docs/reference/training.md#optimizers).
        """
        return all_reduce(_squared_norm(self._counted(tensors), self._dtype, self._device), self._axis)

    def zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the number of exact zeros, a scalar on the device."""
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        for tensor in self._counted(tensors):
            count += tensor.numel() - torch.count_nonzero(tensor)
        return all_reduce(count, self._axis)

    def _counted(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        counted: list[Tensor] = []
        for name, tensor in tensors.items():
            parts = self._counted_ranges.get(name)
            counted += [tensor] if parts is None else [tensor.view(-1)[start:stop] for start, stop in parts]
        return counted


def _squared_norm(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    wide = at_least_fp32(tensors[0].dtype)
    chunks = is_host(device) and wide != tensors[0].dtype
    norms = _norms_by_chunks(tensors) if chunks else foreach_norm(list(tensors), 2, wide)
    total = torch.linalg.vector_norm(torch.stack(norms))
    return total * total


def _norms_by_chunks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norms of half-precision tensors on a CPU in fp32.

    There torch reduces bf16 at a tenth of the speed of a widened copy that stays in the cache, and that copy is made
    in one room for all, since fresh memory for each takes several times as long (measured on 2.13).
    """
    size = max(1, min(CHUNK_ELEMENTS, max(tensor.numel() for tensor in tensors)))
    buffer = torch.empty(size, dtype=at_least_fp32(tensors[0].dtype))

    def norm(tensor: Tensor) -> Tensor:
        parts = tensor.reshape(-1).split(size)
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(buffer[: part.numel()].copy_(part)) for part in parts])
        )

    return [norm(tensor) for tensor in tensors]
