"""Keys, offsets and common state of Megatron's `torch_dist` checkpoints.

Layers are stacked: parameter `decoder.layers.3.mlp.linear_fc1.weight` of a model of L layers is row 3 of the key
`decoder.layers.mlp.linear_fc1.weight`, whose global shape has a leading axis of L. The layer norms carry the names
of TransformerEngine's fused modules, whichever modules computed them. Optimizer state stands in model space: each
state tensor is keyed and cut like the parameter that it belongs to.

This module touches no file. Source: spec/formats-checkpoint.md sections 4 and 9, verified on checkpoints of
Megatron-LM core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk
from megalith.errors import CheckpointError, LayoutError
from megalith.nn.placement import Placement, dim_of, global_shape, local_pieces

CHECKPOINT_VERSION = 3.0
"""Megatron's `checkpoint_version`: QKV rows packed per query group, sizes under `tensor_model_parallel_size`."""

CONTENT_METADATA: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What Megatron 0.13 and later read to choose the optimizer layout to ask for: the non-distributed model space."""

OPTIMIZER_PREFIX = "optimizer.state."
RNG_KEY = "rng_state"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The key of a tied embedding, wherever it is used."""

Layers = int | Mapping[str, int]
"""Layers of the whole model, or of each of its stacks by name: `encoder`, `decoder`."""

_LAYER_NAME = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_STACK = re.compile(r"(encoder|decoder)\.layers\.")
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_EXTRA_STATE_LINEARS = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EXTRA_STATE_ACROSS = ("cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv")


def layers_of(stack: str, layers: Layers) -> int:
    """Layers of a stack of the whole model."""
    return layers if isinstance(layers, int) else layers[stack]


def canonical_key(name: str) -> tuple[str, int | None]:
    """Map a parameter's module name to its stacked key and layer; the layer is None outside the layers.

    >>> canonical_key("decoder.layers.3.input_layernorm.weight")
    ('decoder.layers.self_attention.linear_qkv.layer_norm_weight', 3)
    """
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return name, None
    stack, layer, rest = match[1], int(match[2]), match[3]
    for module, fused in _FUSED_NORMS.items():
        if rest.startswith(module):
            rest = fused + rest.removeprefix(module)
    return f"{stack}.layers.{rest}", layer


def module_name(key: str, layer: int | None) -> str:
    """The parameter's module name from its stacked key: the inverse of `canonical_key`.

    >>> module_name("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 3)
    'decoder.layers.3.input_layernorm.weight'
    """
    if layer is None:
        return key
    stack = _STACK.match(key)
    assert stack is not None, f"{key} is not a key of the stacked layers"
    rest = key.removeprefix(stack[0])
    for module, fused in _FUSED_NORMS.items():
        if rest.startswith(fused):
            rest = module + rest.removeprefix(fused)
    return f"{stack[0]}{layer}.{rest}"


def is_stacked(key: str) -> bool:
    """Whether the tensor of a weight's key has the layers as its first dimension."""
    return _STACK.match(key) is not None


def module_names(key: str, num_layers: Layers) -> list[str]:
    """The module names of all the parameters that are stored under one key."""
    stack = _STACK.match(key)
    return [key] if stack is None else [module_name(key, layer) for layer in range(layers_of(stack[1], num_layers))]


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
    num_layers: Layers,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """Cut parameters into the chunks that Megatron writes.

    Args:
        named: (module name, local tensor, placement of the parameter); layer numbers are global.
        num_layers: layers of the whole model, or of each stack: the extent of the stacked axis.
        rank: position on the tensor-parallel axis.
        size: extent of the tensor-parallel axis.
        once: leave out what a rank before this one on the axis holds too: over the ranks, each element once.

    Returns:
        Views of the given tensors: one per tensor, and `parts` per tensor that is placed `Fused`.
    """
    whole = [(Whole(name, tensor.detach()), placement) for name, tensor, placement in named]
    placements = {box.name: placement for box, placement in whole}
    return weight_chunks([box for box, _ in whole], placements, num_layers, rank=rank, size=size, once=once)


def weight_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    num_layers: Layers,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """`model_chunks` of parameters of which boxes are here.

    Args:
        boxes: of the parameters, by their names.
        placements: parameter name -> placement.
        num_layers, rank, size, once: as of `model_chunks`.
    """
    return [
        chunk
        for box in boxes
        for chunk in _chunks(box, box.name, "", placements[box.name], num_layers, rank, size, once=once)
    ]


def optimizer_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    num_layers: Layers,
    *,
    rank: int = 0,
    size: int = 1,
    once: bool = False,
) -> list[Chunk]:
    """Cut optimizer state into model-space chunks.

    Args:
        boxes: the state, in whatever boxes the optimizer holds it.
        placements: parameter name -> placement.
        num_layers: layers of the whole model.
        rank: position on the tensor-parallel axis.
        size: extent of the tensor-parallel axis.
        once: leave out what a rank before this one on the axis holds too.
    """
    chunks = []
    for box in boxes:
        state, _, name = box.name.partition(".")
        prefix = f"{OPTIMIZER_PREFIX}{state}."
        chunks += _chunks(box, name, prefix, placements[name], num_layers, rank, size, once=once)
    return chunks


def _chunks(
    box: Box, name: str, prefix: str, placement: Placement, num_layers: Layers, rank: int, size: int, *, once: bool
) -> list[Chunk]:
    """The chunks of a box that belongs to the parameter `name`; `prefix` stands before the key."""
    key, layer = canonical_key(name)
    if layer is None:
        return [Chunk(prefix + key, *part) for part in _parts(box, placement, rank, size, once=once)]
    total = layers_of(name.partition(".")[0], num_layers)
    if layer >= total:
        raise LayoutError(f"{name} is outside a model of {total} layers; pass the whole model's --num-layers")
    return [
        Chunk(prefix + key, part.unsqueeze(0), (layer, *offset), (total, *extent))
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


def extra_state_objects(num_layers: Layers, layers: Collection[int] | None = None) -> dict[str, None]:
    """The empty `_extra_state` entries that Megatron writes and asks for, one per linear and layer.

    Args:
        num_layers: layers of the whole model, a decoder alone, or of each stack.
        layers: those to make entries for; all if None.
    """
    stacks = {"decoder": num_layers} if isinstance(num_layers, int) else num_layers
    return {
        f"{stack}.layers.{linear}._extra_state/shard_{layer}_{total}": None
        for stack, total in stacks.items()
        for layer in range(total)
        for linear in (*_EXTRA_STATE_LINEARS, *(_EXTRA_STATE_ACROSS if len(stacks) > 1 and stack == "decoder" else ()))
        if layers is None or layer in layers
    }


def is_extra_state(key: str) -> bool:
    """Whether a key holds the state of an FP8 linear; readers pass over it."""
    return "._extra_state/shard_" in key


def rng_object_key(tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> str:
    """The key of the random states of one (pipeline, tensor) position; its value is a list over the replicas."""
    return f"{RNG_KEY}/shard_{pp_rank}.{tp_rank}_{pp_size}.{tp_size}"


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
) -> dict[str, Any]:
    """Build `common["optimizer"]` as Megatron's non-distributed optimizers write it.

    Args:
        param_groups: groups under Megatron's keys; `params` and `step` are left out of what is written.
        step: steps applied.
        scaler: {scale, growth_tracker, hysteresis_tracker} of the dynamic loss scaler of fp16, else None.
        precision: dtype of the parameters: float32, float16 or bfloat16.
    """
    groups = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in param_groups]
    inner = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    if precision == "float32":
        return inner
    if scaler is None:
        return {"optimizer": inner}
    scale = torch.tensor([float(scaler["scale"])], dtype=torch.float32)
    trackers = {key: int(scaler[key]) for key in ("growth_tracker", "hysteresis_tracker")}
    return {"optimizer": inner, "grad_scaler": {"scale": scale, **trackers}}


def read_optimizer_common(state: Mapping[Any, Any]) -> OptimizerScalars:
    """Read `common["optimizer"]` in either nesting.

    Raises:
        CheckpointError: the state belongs to several chained optimizers or to a distributed optimizer's bucket space.
    """
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
