"""The content of a checkpoint: each tensor of a run's state with its key and place in the file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megalith.checkpoint import CheckpointContent, Chunk
from megalith.checkpoint.content import share_of
from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.megatron_optimizer import decays, with_rates
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    CONTENT_METADATA,
    WORD_EMBEDDINGS,
    LocalTensor,
    is_of_experts,
    model_chunks,
    optimizer_chunks,
    optimizer_common,
    rng_object_key,
    stacking_of,
    weight_chunks,
    with_expert_groups,
)
from megalith.config import RunConfig
from megalith.config.saved_args import megatron_args
from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.models.language_model import named_placements
from megalith.models.saved import saved_tensors, whole_names
from megalith.nn.placement import Placement, Replicated
from megalith.optim.build import experts_of
from megalith.optim.optimizer import StateBox
from megalith.train.state import BestEvaluation, TrainState

STEP_CHECK = "megalith_step_check"
"""Key of what `TrainState.check` remembers, in common.pt; Megatron passes over it."""
NOISE = "megalith_gradient_noise"
"""Likewise of `TrainState.noise`."""
BEST = "megalith_best_evaluation"
"""Likewise of `TrainState.best`; absent before an evaluation that counts."""
LR_SCALE = "megalith_lr_scale"
"""Likewise of `TrainState.lr_scale`; absent where no hook has changed it."""
WANDB_RUN = "megalith_wandb_run_id"
"""Likewise of `TrainState.wandb_run_id`; absent without one."""


def content_of(state: TrainState, run: RunConfig) -> CheckpointContent:
    """Return everything of a checkpoint that this rank writes; all ranks call this together."""
    settings, first, stacking = run.checkpoint, _replicas(state).is_first, stacking_of(run.model)
    chunks = chunks_to_save(state, run, with_optimizer=not settings.no_save_optim)
    layers, whole = [layer for model in state.chunks for layer in model.stage.layers], run.model.lora_rank is None
    content = CheckpointContent(
        chunks=chunks,
        written_as=stacking.written_keys(chunk.key for chunk in chunks),
        objects=dict(stacking.extra_state_objects(layers)) if whole and first and state.context.tp.is_first else {},
        common={
            "args": _saved_args(state, run),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": state.iteration,
            "num_floating_point_operations_so_far": state.flops,
            "content_metadata": CONTENT_METADATA,
            STEP_CHECK: state.check.state(),
            NOISE: state.noise.state(),
        },
    )
    if state.best != BestEvaluation():
        content.common[BEST] = state.best.state()
    if state.lr_scale != 1.0:
        content.common[LR_SCALE] = state.lr_scale
    if state.wandb_run_id is not None:
        content.common[WANDB_RUN] = state.wandb_run_id
    if not settings.no_save_optim:
        scalars, scheduler = state.optimizer.scalars(), state.schedule.state_dict(state.lr_schedule_samples)
        groups = with_rates(scalars["param_groups"], scheduler, vars(content.common["args"]))
        content.common["optimizer"] = optimizer_common(
            _groups(groups, state),
            scalars["step"],
            scalars["grad_scaler"] if run.precision.dynamic_loss_scale else None,
            run.precision.params_dtype,
        )
        content.common["opt_param_scheduler"] = scheduler
    if not settings.no_save_rng:
        alike = sharing_a_key(state)
        states = comm.all_gather_objects(state.rng_streams.state(), alike)
        if alike.is_first:
            content.objects[rng_key(state)] = states
    return content


def chunks_to_save(state: TrainState, run: RunConfig, *, with_optimizer: bool) -> list[Chunk]:
    """Return what this rank saves of the model and its optimizer: over all ranks, each element once.

    What LoRA freezes is not saved. Each replica of the model writes a share of the replicated tensors; with full
    sharding nothing is replicated.
    """
    replicated, buffers = _model_chunks(state, run, dedup=True), _buffer_chunks(state, run, dedup=True)
    divided = _optimizer_chunks(state, run, dedup=True) if with_optimizer else []
    if run.fully_sharded:
        replicated, divided = [], replicated + divided
    elif not run.parallel.shards_optimizer_only:
        replicated, divided = replicated + divided, []
    shares = []
    for of_experts, holders in ((False, _replicas(state)), (True, state.context.edp)):
        part = [chunk for chunk in replicated + buffers if is_of_experts(chunk.key) == of_experts]
        shares += share_of(part, holders.index, holders.size)
    return shares + divided


def chunks_to_load(state: TrainState, run: RunConfig, *, with_optimizer: bool) -> list[Chunk]:
    """Return views of everything that this rank saves and replicas of it, to be filled in place."""
    chunks = _model_chunks(state, run, dedup=False) + _buffer_chunks(state, run, dedup=False)
    return chunks + _optimizer_chunks(state, run, dedup=False) if with_optimizer else chunks


def _model_chunks(state: TrainState, run: RunConfig, *, dedup: bool) -> list[Chunk]:
    names = _stored_names(state, dedup=dedup)
    held = [box for box in state.optimizer.weight_boxes() if box.name in names]
    boxes = [(box.name, replace(box, name=names[box.name])) for box in held]
    placements, stacking = _stored_placements(state, names), stacking_of(run.model)
    return [
        chunk
        for axis, part in _by_axis(boxes, state)
        for chunk in weight_chunks(part, placements, stacking, rank=axis.index, size=axis.size, dedup=dedup)
    ]


def _by_axis(boxes: Sequence[tuple[str, StateBox]], state: TrainState) -> Iterator[tuple[Axis, list[StateBox]]]:
    """Yield the tensor-parallel axis with the boxes of dense parameters, then the axis of experts with theirs.

    Each box comes with the name of its parameter in the module of this rank.
    """
    experts = experts_of(state.chunks)
    for of_experts, axis in ((False, state.context.tp), (True, state.context.etp)):
        yield axis, [box for name, box in boxes if (name in experts) == of_experts]


def frozen_chunks(state: TrainState, run: RunConfig) -> list[Chunk]:
    """Return views of everything that this rank holds of the model that LoRA's adapters are beside."""
    copies = {model.copied_weight for model in state.chunks}
    kept = [item for model in state.chunks for item in saved_tensors(model) if not item[1].requires_grad]
    tensors = [
        (WORD_EMBEDDINGS if name in copies else name, tensor.detach(), placement) for name, tensor, placement in kept
    ]
    stacking = stacking_of(run.model)
    return [
        chunk
        for of_experts, axis in ((False, state.context.tp), (True, state.context.etp))
        for chunk in model_chunks(
            [item for item in tensors if parse_name(item[0]).routed == of_experts],
            stacking,
            rank=axis.index,
            size=axis.size,
        )
    ]


def _buffer_chunks(state: TrainState, run: RunConfig, *, dedup: bool) -> list[Chunk]:
    """Return the chunks of router biases and offsets, which no optimizer updates."""
    if run.model.lora_rank is not None:
        return []
    tp, kept = state.context.tp, [item for model in state.chunks for item in saved_tensors(model)]
    buffers = {name: (tensor, placement) for name, tensor, placement in kept if not isinstance(tensor, Parameter)}
    boxes = [LocalTensor(name, tensor) for name, (tensor, _) in buffers.items()]
    placements = {name: placement for name, (_, placement) in buffers.items()}
    return weight_chunks(boxes, placements, stacking_of(run.model), rank=tp.index, size=tp.size, dedup=dedup)


def _optimizer_chunks(state: TrainState, run: RunConfig, *, dedup: bool) -> list[Chunk]:
    names = _stored_names(state, dedup=dedup)
    boxes = []
    for box in state.optimizer.state_boxes():
        kind, _, name = box.name.partition(".")
        if name in names:
            boxes.append((name, replace(box, name=f"{kind}.{names[name]}")))
    placements, stacking = _stored_placements(state, names), stacking_of(run.model)
    placements |= {box.name: Replicated() for _, box in boxes if box.replicated}
    return [
        chunk
        for axis, part in _by_axis(boxes, state)
        for chunk in optimizer_chunks(part, placements, stacking, rank=axis.index, size=axis.size, dedup=dedup)
    ]


def _stored_placements(state: TrainState, names: Mapping[str, str]) -> dict[str, Placement]:
    return {names[name]: placement for name, _, placement in _parameters(state) if name in names}


def _parameters(state: TrainState) -> Iterator[tuple[str, Tensor, Placement]]:
    for model in state.chunks:
        yield from named_placements(model)


def _stored_names(state: TrainState, *, dedup: bool) -> dict[str, str]:
    """Return parameter name -> the name that it is stored under.

    The second copy of a tied embedding is loaded from the first, and is left out where each element counts once.
    """
    copies = {model.copied_weight for model in state.chunks}
    names = [name for name, _, _ in _parameters(state) if not (dedup and name in copies)]
    whole = {name: stored for model in state.chunks for name, stored in whole_names(model).items()}
    return {name: WORD_EMBEDDINGS if name in copies else whole[name] for name in names}


def _replicas(state: TrainState) -> Axis:
    """Return the axis of the ranks that hold the same shard of the model."""
    return state.context.flatten_axes("cp", "dp")


def _groups(groups: Sequence[Mapping[str, Any]], state: TrainState) -> list[Mapping[str, Any]]:
    """Return the optimizer's parameter groups, with those that Megatron adds for expert-parallel experts."""
    if not state.context.has_expert_axes:
        return list(groups)
    experts = experts_of(state.chunks)
    kinds = {decays(name, tensor.shape) for name, tensor, _ in _parameters(state) if name in experts}
    return with_expert_groups(groups, kinds)


def _by_experts(state: TrainState) -> bool:
    """Return whether random states have a key per expert-parallel rank: only if experts have the same TP size."""
    return state.context.layout.expert_tp == state.context.layout.tp


def sharing_a_key(state: TrainState) -> Axis:
    """Return the axis of the ranks whose random states share one key."""
    return state.context.edp if _by_experts(state) else _replicas(state)


def rng_key(state: TrainState) -> str:
    tp, pp = state.context.tp, state.context.pp
    ep = (state.context.ep.index, state.context.ep.size) if _by_experts(state) else (0, 1)
    return rng_object_key(tp.index, tp.size, pp.index, pp.size, *ep)


def _saved_args(state: TrainState, run: RunConfig) -> Namespace:
    return Namespace(
        **megatron_args(run),
        padded_vocab_size=state.model.vocab_size,
        consumed_train_samples=state.consumed_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=state.skipped_samples,
    )
