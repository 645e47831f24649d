"""Which parameters several ranks hold, and norms in which every element of the model counts once all the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megalith.distributed.comm import all_reduce
from megalith.distributed.context import Axis, ParallelContext
from megalith.kernels.torch_private import foreach_norm
from megalith.models.language_model import LanguageModel, named_placements
from megalith.nn.moe.experts import experts_within
from megalith.nn.placement import Placement, Replicated, dim_of, global_shape, local_pieces
from megalith.nn.precision import at_least_fp32
from megalith.optim.flat import without
from megalith.optim.holding import Gradients
from megalith.parallel.data import Copies

PIECE_ELEMENTS = 1 << 18  # 1 MiB in fp32


class CountedOnce:
    """Sums over ranks of tensors shaped like the parts of the parameters that each rank owns.

    Of what several ranks hold alike only the first counts it. Every rank calls the same methods and gets the same bits.

    Args:
        holders: the ranks that the sums are over.
        elsewhere: names of the parameters that are another replica's to count.
    """

    def __init__(
        self,
        gradients: Gradients,
        copies: Mapping[str, tuple[Copies, ...]],
        holders: Axis,
        elsewhere: Collection[str] = (),
    ) -> None:
        self._holders, self._device = holders, gradients.device
        self._dtype = at_least_fp32(gradients.dtype)
        self._parts: dict[str, list[tuple[int, int]]] = {}  # of the parameters that are not counted whole
        for name, shape in gradients.shapes.items():
            width = prod(shape[1:])
            others = [entry.rows or (0, shape[0]) for entry in copies.get(name, ()) if not entry.first]
            if name in elsewhere:
                self._parts[name] = []
            elif others:
                start, stop = gradients.owned(name)
                rest = without((start, stop), [(first * width, last * width) for first, last in others])
                self._parts[name] = [(first - start, last - start) for first, last in rest]

    def norm(self, tensors: Mapping[str, Tensor]) -> float:
        """The L2 norm.

        Of each tensor in at least fp32, then of the stack of these, squared; the sum over ranks; the root in double
        precision (docs/reference/training.md#optimizers).
        """
        squared = _squared_norm(self._counted(tensors), self._dtype, self._device)
        return math.sqrt(float(all_reduce(squared, self._holders)))

    def zeros(self, tensors: Mapping[str, Tensor]) -> float:
        """The number of exact zeros."""
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        for tensor in self._counted(tensors):
            count += tensor.numel() - torch.count_nonzero(tensor)
        return float(all_reduce(count, self._holders))

    def _counted(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        counted: list[Tensor] = []
        for name, tensor in tensors.items():
            parts = self._parts.get(name)
            counted += [tensor] if parts is None else [tensor.view(-1)[start:stop] for start, stop in parts]
        return counted


def _squared_norm(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    rounded = at_least_fp32(tensors[0].dtype) != tensors[0].dtype
    norms = _norms_by_pieces(tensors) if rounded else foreach_norm(list(tensors))
    total = torch.linalg.vector_norm(torch.stack(norms))
    return total * total


def _norms_by_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norms of half-precision tensors in fp32.

    On a CPU torch reduces bf16 at a tenth of the speed of a widened copy that stays in the cache, and that copy is made
    in one room for all, since fresh memory for each takes several times as long (measured on 2.13).
    """
    longest, device = max(tensor.numel() for tensor in tensors), tensors[0].device
    size = max(1, min(PIECE_ELEMENTS, longest) if device.type == "cpu" else longest)
    room = torch.empty(size, dtype=at_least_fp32(tensors[0].dtype), device=device)

    def norm(tensor: Tensor) -> Tensor:
        parts = tensor.reshape(-1).split(size)
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(room[: part.numel()].copy_(part)) for part in parts])
        )

    return [norm(tensor) for tensor in tensors]


def copies_of(chunks: Iterable[LanguageModel], ctx: ParallelContext) -> dict[str, tuple[Copies, ...]]:
    """What other ranks hold too of the parameters of these parts of a model, by name.

    - Over the tensor-parallel axis, or for experts theirs: replicated parameters, with partial gradients where the
      layers see a part of the sequence, and where each rank applies them to its own heads; key and value heads that
      several ranks share, with partial gradients always.
    - Over the ends of the pipeline: the two copies of a tied embedding.
    """
    table: dict[str, tuple[Copies, ...]] = {}
    for chunk in chunks:
        experts = experts_of([chunk])
        for name, parameter, placement in named_placements(chunk):
            axis = ctx.etp if name in experts and ctx.layout.expert_tp != ctx.layout.tp else ctx.tp
            table[name] = _over_tensor_parallel(placement, parameter.shape, axis, chunk.region.partial_gradients)
        if chunk.shared_weight is not None and ctx.ends is not None:
            copied = chunk.shared_weight == chunk.copied_weight
            table[chunk.shared_weight] += (Copies(ctx.ends, first=not copied, partial=True),)
    return {name: copies for name, copies in table.items() if copies}


def experts_of(chunks: Iterable[LanguageModel]) -> frozenset[str]:
    """The names of the parameters of experts, of which expert-parallel ranks have different ones."""
    return frozenset(
        prefix + name
        for chunk in chunks
        for prefix, experts in experts_within(chunk)
        for name, _ in experts.named_parameters()
    )


def _over_tensor_parallel(placement: Placement, shape: Sequence[int], axis: Axis, partial: bool) -> tuple[Copies, ...]:
    if axis.size == 1:
        return ()
    if isinstance(placement, Replicated):
        return (Copies(axis, first=axis.is_first, partial=partial or placement.partial),)
    whole = global_shape(shape, placement, axis.size)[dim_of(placement)]
    shared = [p for p in local_pieces(placement, whole, axis.size, axis.index) if len(p.holders) > 1]
    assert not shared or dim_of(placement) == 0, "rows that several ranks hold are counted along dimension 0"
    return tuple(
        Copies(
            axis,
            rows=(piece.local, piece.local + piece.length),
            part=piece.holders.start // len(piece.holders),
            parts=axis.size // len(piece.holders),
            first=piece.holders[0] == axis.index,
            partial=True,
        )
        for piece in shared
    )
