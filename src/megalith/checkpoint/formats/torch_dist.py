"""Chunks and common state of Megatron's `torch_dist` checkpoints; the keys of their tensors are `stacking`'s business.

Optimizer state stands in model space: each state tensor is keyed and cut like the parameter that it belongs to.

This module touches no file. Source: docs/reference/checkpoints.md#torch_dist, verified on checkpoints of
Megatron-LM core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk
from megalith.checkpoint.formats.stacking import Stacking
from megalith.errors import CheckpointError
from megalith.nn.placement import Placement, dim_of, global_shape, local_pieces

CHECKPOINT_VERSION = 3.0
"""Megatron's `checkpoint_version`: QKV rows packed per query group, sizes under `tensor_model_parallel_size`."""

CONTENT_METADATA: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What Megatron 0.13 and later read to choose the optimizer layout to ask for: the non-distributed model space."""

OPTIMIZER_PREFIX = "optimizer.state."
RNG_KEY = "rng_state"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The key of a tied embedding, wherever it is used."""


class Box(Protocol):
    """A part of a tensor that this rank holds: a parameter, or the state that an optimizer has of one."""

    @property
    def name(self) -> str:
        """Of the parameter; for a state `<state>.<parameter>`, such as exp_avg, exp_avg_sq and fp32_param."""
        ...

    @property
    def tensor(self) -> Tensor:
        """Its elements, in as many dimensions as the tensor has."""
        ...

    @property
    def offset(self) -> tuple[int, ...]:
        """Where it begins in the tensor that this rank holds."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this rank holds."""
        ...


@dataclass(frozen=True)
class Whole:
    """A tensor that is a box of itself."""

    name: str
    tensor: Tensor

    @property
    def offset(self) -> tuple[int, ...]:
        return (0,) * self.tensor.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def model_chunks(
    named: Iterable[tuple[str, Tensor, Placement]],
    stacking: Stacking,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """Cut parameters into the chunks that Megatron writes.

    Args:
        named: (module name, local tensor, placement of the parameter); layers and experts have the numbers of the
            whole model.
        stacking: of the whole model.
        rank: position on the tensor-parallel axis.
        size: extent of the tensor-parallel axis.
        once: leave out what a rank before this one on the axis holds too: over the ranks, each element once.

    Returns:
        Views of the given tensors: one per tensor, and `parts` per tensor that is placed `Fused`.
    """
    whole = [(Whole(name, tensor.detach()), placement) for name, tensor, placement in named]
    placements = {box.name: placement for box, placement in whole}
    return weight_chunks([box for box, _ in whole], placements, stacking, rank=rank, size=size, once=once)


def weight_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    stacking: Stacking,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """`model_chunks` of parameters of which boxes are here.

    Args:
        boxes: of the parameters, by their names.
        placements: parameter name -> placement.
        stacking, rank, size, once: as of `model_chunks`.
    """
    return [
        chunk
        for box in boxes
        for chunk in _chunks(box, box.name, "", placements[box.name], stacking, rank, size, once=once)
    ]


def optimizer_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    stacking: Stacking,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """Cut optimizer state into model-space chunks.

    Args:
        boxes: the state, in whatever boxes the optimizer holds it.
        placements: parameter name -> placement; of a state also `<state>.<parameter>` -> its own, where it is
            not divided as its parameter is.
        stacking: of the whole model.
        rank: position on the tensor-parallel axis.
        size: extent of the tensor-parallel axis.
        once: leave out what a rank before this one on the axis holds too.
    """
    chunks = []
    for box in boxes:
        state, _, name = box.name.partition(".")
        prefix = f"{OPTIMIZER_PREFIX}{state}."
        placement = placements.get(box.name, placements[name])
        chunks += _chunks(box, name, prefix, placement, stacking, rank, size, once=once)
    return chunks


def _chunks(
    box: Box, name: str, prefix: str, placement: Placement, stacking: Stacking, rank: int, size: int, *, once: bool
) -> list[Chunk]:
    """The chunks of a box that belongs to the parameter `name`; `prefix` stands before the key."""
    slot = stacking.slot(name)
    ones = (1,) * len(slot.index)
    return [
        Chunk(prefix + slot.key, part.view(*ones, *part.shape), (*slot.index, *offset), (*slot.extents, *extent))
        for part, offset, extent in _parts(box, placement, rank, size, once=once)
    ]


def _parts(
    box: Box, placement: Placement, rank: int, size: int, *, once: bool
) -> Iterator[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    """The pieces of a box of a local tensor with their offset in, and the shape of, the tensor over the whole axis."""
    dim, extent = dim_of(placement), global_shape(box.shape, placement, size)
    first, last = box.offset[dim], box.offset[dim] + box.tensor.shape[dim]
    for piece in local_pieces(placement, extent[dim], size, rank):
        start, stop = max(first, piece.local), min(last, piece.local + piece.length)
        if start < stop and (not once or piece.holders[0] == rank):
            place = _with(box.offset, dim, piece.whole + start - piece.local)
            yield box.tensor.narrow(dim, start - first, stop - start), place, extent


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def is_extra_state(key: str) -> bool:
    """Whether a key holds the state of an FP8 linear; readers pass over it."""
    return "._extra_state/shard_" in key


def rng_object_key(
    tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
) -> str:
    """The key of the random states of one (pipeline, tensor, expert) position; its value is a list over the replicas.

    Experts count only where they are divided.
    """
    at, of = [pp_rank, tp_rank], [pp_size, tp_size]
    if ep_size > 1:
        at, of = [*at, ep_rank], [*of, ep_size]
    return f"{RNG_KEY}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"


def is_rng_object(key: str) -> bool:
    """Whether a key holds random states, of whichever position."""
    return key.startswith(f"{RNG_KEY}/")


@dataclass(frozen=True)
class OptimizerScalars:
    """The part of an optimizer's state that is no tensor in model space.

    Attributes:
        param_groups: Megatron's groups without `params` and `step`.
        step: steps applied; the bias corrections depend on it.
        scaler: scale, growth_tracker and hysteresis_tracker of the dynamic loss scaler, or None without one.
    """

    param_groups: list[dict[str, Any]]
    step: int
    scaler: dict[str, Any] | None = None


def optimizer_common(
    param_groups: Sequence[Mapping[str, Any]], step: int, scaler: Mapping[str, Any] | None, precision: str
) -> dict[Any, Any]:
    """Build `common["optimizer"]` as Megatron's non-distributed optimizers write it.

    Under expert parallelism Megatron has an optimizer of its own for experts, and the two stand under 0 and 1.

    Args:
        param_groups: groups under Megatron's keys; `params` and `step` are left out of what is written. Those with
            `is_expert_parallel` are of the second optimizer.
        step: steps applied.
        scaler: {scale, growth_tracker, hysteresis_tracker} of the dynamic loss scaler of fp16, else None.
        precision: dtype of the parameters: float32, float16 or bfloat16.
    """
    groups = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in param_groups]
    parts = by_optimizer(groups)
    if len(parts) > 1:
        return {number: optimizer_common(part, step, scaler, precision) for number, part in enumerate(parts)}
    inner = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    if precision == "float32":
        return inner
    if scaler is None:
        return {"optimizer": inner}
    scale = torch.tensor([float(scaler["scale"])], dtype=torch.float32)
    trackers = {key: int(scaler[key]) for key in ("growth_tracker", "hysteresis_tracker")}
    return {"optimizer": inner, "grad_scaler": {"scale": scale, **trackers}}


def with_expert_groups(groups: Sequence[Mapping[str, Any]], decayed: Collection[bool]) -> list[Mapping[str, Any]]:
    """The groups with those that Megatron has for experts that are spread over ranks, of the same settings.

    Args:
        groups: of an optimizer of all parameters.
        decayed: whether parameters of experts have weight decay, and whether some have none.
    """
    own = [group for group in groups if bool(group.get("wd_mult", group.get("weight_decay", 0.0))) in decayed]
    return [*groups, *({**group, "is_expert_parallel": True} for group in own)]


def by_optimizer(groups: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The groups of each of Megatron's optimizers: of all but experts, and of experts that are spread over ranks."""
    own = [[group for group in groups if bool(group.get("is_expert_parallel")) == expert] for expert in (False, True)]
    return [part for part in own if part]


def read_optimizer_common(state: Mapping[Any, Any]) -> OptimizerScalars:
    """Read `common["optimizer"]` in either nesting; of several optimizers that are chained, the groups of all.

    Raises:
        CheckpointError: the state belongs to a distributed optimizer's bucket space.
    """
    numbered = sorted(key for key in state if isinstance(key, int))
    if numbered:
        parts = [read_optimizer_common(state[number]) for number in numbered]
        return replace(parts[0], param_groups=[group for part in parts for group in part.param_groups])
    if not ("optimizer" in state or "param_groups" in state):
        raise CheckpointError(
            f"the optimizer state in common.pt has the keys {sorted(map(str, state))} instead of param_groups: "
            "it is in a layout of the distributed optimizer that this version does not read; "
            "load with --no-load-optim to continue from the weights alone"
        )
    inner = state.get("optimizer", state)
    groups = [dict(group) for group in inner["param_groups"]]
    steps = [group.pop("step") for group in groups if "step" in group]
    common_step = inner.get("state", {}).get("common_step", steps[0] if steps else 0)
    scaler = state.get("grad_scaler")
    return OptimizerScalars(groups, int(common_step), _read_scaler(scaler) if scaler else None)


def _read_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    scale = scaler["scale"]
    value = float(scale.reshape(-1)[0]) if isinstance(scale, Tensor) else float(scale)
    return {
        "scale": value,
        "growth_tracker": int(scaler["growth_tracker"]),
        "hysteresis_tracker": int(scaler["hysteresis_tracker"]),
    }
