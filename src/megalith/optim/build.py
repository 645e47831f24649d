"""Composes an optimizer from the modules of a model, the configuration and the layout of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megalith.config import OptimizerConfig, PrecisionConfig, check_groups
from megalith.distributed.context import Axis, ParallelContext
from megalith.models.language_model import LanguageModel, named_placements
from megalith.nn.moe.experts import experts_within
from megalith.nn.placement import Placement, Replicated, dim_of, global_shape, local_pieces
from megalith.nn.precision import at_least_fp32
from megalith.optim.groups import WidthScaling, make_groups
from megalith.optim.optimizer import Optimizer
from megalith.optim.shards import flat_shards, fsdp_shards
from megalith.parallel.data import ReplicatedRows

if TYPE_CHECKING:
    from megalith.parallel.fsdp import FullyShard


def build_optimizer(
    modules: nn.Module | Sequence[nn.Module],
    config: OptimizerConfig,
    precision: PrecisionConfig,
    *,
    count_zeros: bool = False,
    context: ParallelContext | None = None,
    zero1: bool = False,
    replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]] | None = None,
    bucket_size: int | None = None,
    overlap_gather: bool = False,
    sharded: Sequence[FullyShard] = (),
    offload: float = 0.0,
) -> Optimizer:
    """Build the optimizer of a model; its master weights start as the model's weights.

    Args:
        modules: The model, or its pipeline chunks on this rank; their parameters have different names, and get
            preallocated gradients, their layers a sink that writes to them.
        count_zeros: Count the exact zeros among the gradients of each step.
        zero1: Shard the master weights and optimizer states over the data-parallel ranks.
        replicated_rows: Rows of parameters that other ranks hold too, beside data parallelism, by name; read from the
            placements of the models by default, which every module has that shares its layers with other ranks.
        bucket_size: Elements that are reduced at once; Megatron's rule by default.
        overlap_gather: Under ZeRO-1 let `step` return before updated weights are gathered. Forward passes wait for
            them; call `finish_param_sync` before any other access to weights. Not for compiled modules, where a wait
            would be a graph break.
        sharded: The modules, where these are cut over the data-parallel ranks (ZeRO-2 and ZeRO-3). Their weight
            gradients are autograd's then.
        offload: Fraction of the parameters, by elements, whose states and updates are on the host.

    Raises:
        ConfigError: The configuration breaks a rule, or a registered optimizer cannot be used as it asks.
    """
    check_groups(config, precision)
    modules = [modules] if isinstance(modules, nn.Module) else modules
    context = context or ParallelContext.solo()
    parameters = _named(modules)
    models = [module for module in modules if isinstance(module, LanguageModel)]
    placements = {name: placement for model in models for name, _, placement in named_placements(model)}
    groups = make_groups(parameters, config, context.tp, placements, _width_scaling(models))
    replicated_rows = replicated_rows_of(models, context) if replicated_rows is None else replicated_rows
    if sharded:
        shards = fsdp_shards(sharded, context, replicated_rows=replicated_rows)
    else:
        dtype = _one_dtype(parameters)
        work = at_least_fp32(dtype)
        shards = flat_shards(
            modules,
            parameters,
            context,
            work=torch.float16 if config.main_params_dtype == "fp16" else work,
            grads=work if precision.grads_in_fp32 else dtype,
            replicated_rows=replicated_rows,
            experts=experts_of(models) if context.has_expert_axes else (),
            zero1=zero1,
            bucket_size=bucket_size,
            overlap_gather=overlap_gather,
        )
    optimizer = Optimizer(groups, shards, config, precision, count_zeros=count_zeros, offload=offload)
    optimizer.track_state_dict_loads(modules)
    return optimizer


def _named(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    named: dict[str, nn.Parameter] = {}
    for module in modules:
        own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        assert named.keys().isdisjoint(own), f"in two modules: {sorted(named.keys() & own.keys())}"
        named |= own
    return named


def _one_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in parameters.values()}
    assert len(dtypes) == 1, f"parameters of {sorted(map(str, dtypes))} in one flat memory"
    return dtypes.pop()


def _width_scaling(models: Sequence[LanguageModel]) -> WidthScaling:
    """Return the muP scaling of the pipeline chunks of a model, which have one architecture."""
    tied = [model.copied_weight for model in models if model.copied_weight is not None]
    widths = {model.config.width_multiplier for model in models}
    return WidthScaling(widths.pop(), tied) if len(widths) == 1 else WidthScaling()


def replicated_rows_of(chunks: Iterable[LanguageModel], ctx: ParallelContext) -> dict[str, tuple[ReplicatedRows, ...]]:
    """Return which rows of parameters of these pipeline chunks other ranks hold too, by name.

    - Over the tensor-parallel axis, or for experts theirs: replicated parameters, with partial gradients where the
      layers see a part of the sequence, and where each rank applies them to its own heads; key and value heads that
      several ranks share, with partial gradients always.
    - Over the ends of the pipeline: the two copies of a tied embedding.
    """
    table: dict[str, tuple[ReplicatedRows, ...]] = {}
    for chunk in chunks:
        experts = experts_of([chunk])
        for name, parameter, placement in named_placements(chunk):
            axis = ctx.etp if name in experts and ctx.layout.expert_tp != ctx.layout.tp else ctx.tp
            table[name] = _over_tensor_parallel(placement, parameter.shape, axis, chunk.region.needs_grad_reduce)
        if chunk.shared_weight is not None and ctx.ends is not None:
            copied = chunk.shared_weight == chunk.copied_weight
            table[chunk.shared_weight] += (ReplicatedRows(ctx.ends, is_first_replica=not copied, partial=True),)
    return {name: rows for name, rows in table.items() if rows}


def experts_of(chunks: Iterable[LanguageModel]) -> frozenset[str]:
    """Return the names of the parameters of experts, which differ between expert-parallel ranks."""
    return frozenset(
        prefix + name
        for chunk in chunks
        for prefix, experts in experts_within(chunk)
        for name, _ in experts.named_parameters()
    )


def _over_tensor_parallel(
    placement: Placement, shape: Sequence[int], axis: Axis, partial: bool
) -> tuple[ReplicatedRows, ...]:
    if axis.size == 1:
        return ()
    if isinstance(placement, Replicated):
        return (ReplicatedRows(axis, is_first_replica=axis.is_first, partial=partial or placement.partial),)
    whole = global_shape(shape, placement, axis.size)[dim_of(placement)]
    shared = [p for p in local_pieces(placement, whole, axis.size, axis.index) if len(p.holders) > 1]
    assert not shared or dim_of(placement) == 0, "rows that several ranks hold are counted along dimension 0"
    return tuple(
        ReplicatedRows(
            axis,
            rows=(piece.local, piece.local + piece.length),
            shard_index=piece.holders.start // len(piece.holders),
            num_shards=axis.size // len(piece.holders),
            is_first_replica=piece.holders[0] == axis.index,
            partial=True,
        )
        for piece in shared
    )
