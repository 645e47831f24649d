"""What other ranks hold too of a model's parameters, read from its placement table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megalith.distributed.context import Axis, ParallelContext
from megalith.models.language_model import LanguageModel, named_placements
from megalith.nn.moe.experts import experts_within
from megalith.nn.placement import Placement, Replicated, dim_of, global_shape, local_pieces
from megalith.parallel.data import Copies


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
