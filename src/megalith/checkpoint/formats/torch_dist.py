"""Keys, chunks and common state of Megatron's `torch_dist` checkpoints.

Layers are stacked: `decoder.layers.3.mlp.linear_fc1.weight` of a model of L layers is row 3 of the key
`decoder.layers.mlp.linear_fc1.weight`, whose global shape has a leading axis of L. The experts of a layer are stacked
too: `decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight` is element [3, 5] of
`decoder.layers.mlp.experts.experts.linear_fc1.weight`, [L, E, ...]. If `--moe-layer-freq` makes some layers dense, each
layer has its own keys, which contain its number, and only the experts are stacked; likewise the layers of multi-token
prediction. T5 has two stacks of layers, `encoder` and `decoder`. Layers and experts are numbered over the whole model.
Layer norms have the names of TransformerEngine's fused modules, whichever modules computed them.

Optimizer state is in model space: each state tensor is keyed and cut like its parameter.

This module touches no file. Source: docs/reference/checkpoints.md#torch_dist, verified on checkpoints of
Megatron-LM core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk
from megalith.checkpoint.formats.megatron_names import PREDICTION, file_key, model_space_key, parse_name
from megalith.config import ModelConfig
from megalith.config.values import read_pattern
from megalith.errors import CheckpointError, LayoutError
from megalith.nn.placement import Placement, dim_of, global_shape, local_pieces

_EXTRA_STATE = re.compile(r".+\._extra_state/shard_[\d.]+_[\d.]+")
_ACROSS = ("cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv")
_OF_FEED_FORWARD = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Slot:
    """Stacked tensor and index in it of a parameter."""

    key: str  # of the stacked tensor
    index: tuple[int, ...] = ()  # on its leading axes, which the parameter itself does not have
    leading_dims: tuple[int, ...] = ()  # sizes of those axes: layers, experts


@dataclass(frozen=True)
class Stacking:
    """Numbers of layers and experts along which parameters are stacked, and the modules of a layer."""

    stacks: Mapping[str, tuple[int, ...]]  # name -> number of experts of each layer, 0 in a dense one
    non_homogeneous: bool = False  # each layer has its own keys
    shared: bool = False  # whether MoE layers have shared experts
    predictions: tuple[int, ...] = ()  # number of experts of each layer of multi-token prediction
    attention: tuple[str, ...] = ("linear_proj", "linear_qkv")  # the linear modules of self-attention
    latent: bool = False  # whether it is multi-latent attention
    fused: bool = False  # whether files have the keys of TransformerEngine's modules, not of Megatron's local ones
    projected: bool = False  # whether MoE layers project tokens into a latent space (`--moe-latent-size`)

    def slot(self, name: str) -> Slot:
        """Return the stacked tensor and the index of a parameter. Raises LayoutError if the model lacks its layer.

        >>> dense(4).slot("decoder.layers.3.input_layernorm.weight").key
        'decoder.layers.self_attention.linear_qkv.layer_norm_weight'
        >>> Stacking({"decoder": (4, 4)}).slot("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight").index
        (1, 2)
        """
        found = parse_name(name)
        if found.stack is None or found.layer is None:
            return Slot(name)
        ahead, experts = found.stack == PREDICTION, self._experts_of(found.stack)
        if found.layer >= len(experts):
            flag = "--mtp-num-layers" if ahead else "--num-layers"
            raise LayoutError(f"{name} is outside a model of {len(experts)} layers; pass the whole model's {flag}")
        prefix, index, leading_dims = (found.prefix, (), ()) if ahead else self._of_layer(found.stack, found.layer)
        if found.expert is None or not experts[found.layer]:  # a registered dense layer may have modules of that name
            return Slot(model_space_key(prefix + name.removeprefix(found.prefix)), index, leading_dims)
        key = f"{prefix}mlp.experts.experts.{found.path}"
        return Slot(key, (*index, found.expert), (*leading_dims, experts[found.layer]))

    def _experts_of(self, stack: str) -> tuple[int, ...]:
        """Return the number of experts of each layer of a stack, 0 in a dense one; empty for an unknown stack."""
        return self.predictions if stack == PREDICTION else self.stacks.get(stack, ())

    def _of_layer(self, stack: str, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the prefix of a layer's keys, its index along the axis of layers, and the size of that axis."""
        if self.non_homogeneous:
            return f"{stack}.layers.{layer}.", (), ()
        return f"{stack}.layers.", (layer,), (len(self.stacks[stack]),)

    def written_keys(self, keys: Iterable[str]) -> dict[str, str]:
        """Map keys in model space, also of optimizer state, to those in a torch_dist file, where they differ.

        They differ for norms. In model space the norms before attention and before the feed-forward layer are parts of
        the linear layer that follows them, as in TransformerEngine's fused modules. In files, norms before latent
        projections and before routers are modules of their own; with Megatron's local modules, those of latent
        attention are.

        >>> dense(2).written_keys(["decoder.layers.mlp.linear_fc1.layer_norm_weight"])
        {}
        >>> mixture = Stacking({"decoder": (4, 4)}, fused=True)
        >>> mixture.written_keys(["decoder.layers.mlp.linear_fc1.layer_norm_weight"]).values()
        dict_values(['decoder.layers.pre_mlp_layernorm.weight'])
        """
        return {key: written for key in keys if (written := self._written_key(key)) != key}

    def _written_key(self, key: str) -> str:
        weight = weight_of(key)
        written = file_key(weight, latent=self.latent, fused=self.fused, has_experts=self._has_experts(weight))
        return key.removesuffix(weight) + written

    def _has_experts(self, key: str) -> bool:
        """Return whether a weight's key belongs to layers with experts."""
        found = parse_name(key)
        experts = () if found.stack is None else self._experts_of(found.stack)
        return any(experts) if found.layer is None else bool(experts[found.layer])

    def extra_state_objects(self, layers: Collection[int] | None = None) -> dict[str, None]:
        """Return the keys of the empty `_extra_state` objects that Megatron's loader requires, one per linear."""
        keys = [
            key
            for stack, experts in self.stacks.items()
            for layer, number in enumerate(experts)
            if layers is None or layer in layers
            for key in self._extra_states(*self._of_layer(stack, layer), number, across=stack == "decoder")
        ]
        last = max(map(len, self.stacks.values())) - 1  # prediction layers are on the stage of the last layer
        for layer, number in enumerate(self.predictions if layers is None or last in layers else ()):
            keys.append(_object_key(f"{PREDICTION}.layers.{layer}.eh_proj", (), ()))
            keys += self._extra_states(f"{PREDICTION}.layers.{layer}.transformer_layer.", (), (), number)
        return dict.fromkeys(keys)

    def _extra_states(
        self, prefix: str, index: tuple[int, ...], leading_dims: tuple[int, ...], experts: int, *, across: bool = False
    ) -> Iterator[str]:
        own = (f"self_attention.{linear}" for linear in self.attention)
        for linear in (*own, *(_ACROSS if across and len(self.stacks) > 1 else ())):
            yield _object_key(prefix + linear, index, leading_dims)
        for linear in _OF_FEED_FORWARD:
            if not experts:
                yield _object_key(f"{prefix}mlp.{linear}", index, leading_dims)
            for expert in range(experts):
                name = f"{prefix}mlp.experts.experts.{linear}"
                yield _object_key(name, (*index, expert), (*leading_dims, experts))
            if experts and self.projected:
                yield _object_key(f"{prefix}mlp.{linear.removeprefix('linear_')}_latent_proj", index, leading_dims)
            if experts and self.shared:
                yield _object_key(f"{prefix}mlp.shared_experts.{linear}", index, leading_dims)


def _object_key(module: str, index: tuple[int, ...], leading_dims: tuple[int, ...]) -> str:
    # Megatron calls an object that is not stacked shard 0 of 1.
    at, of = (".".join(map(str, values)) for values in (index or (0,), leading_dims or (1,)))
    return f"{module}._extra_state/shard_{at}_{of}"


def is_of_experts(key: str) -> bool:
    """Return whether a key, also of optimizer state, belongs to routed experts."""
    return parse_name(weight_of(key)).routed


def is_always_fp32(key: str) -> bool:
    """Return whether a weight is fp32 in a model of any dtype: the expert biases of a router."""
    name = parse_name(key)
    return name.stack is not None and name.path in ("mlp.router.expert_bias", "mlp.router.qb_beta")


def dense(num_layers: int) -> Stacking:
    """Return the stacking of a decoder without experts."""
    return Stacking({"decoder": (0,) * num_layers})


def stacking_of(model: ModelConfig) -> Stacking:
    """Return the stacking of an architecture. As in Megatron the text of `--moe-layer-freq` decides, not its value."""
    apart = model.mixture and read_pattern(model.moe_layer_freq) != 1
    stacks = {name: model.experts_of(layers) for name, layers in model.stacks.items()}
    predictions = (model.experts[-1],) * model.predictions
    return Stacking(
        stacks,
        apart,
        model.moe_shared_expert_intermediate_size is not None,
        predictions,
        _linears_of_attention(model),
        model.multi_latent_attention,
        model.transformer_impl != "local",
        model.moe_latent_size is not None,
    )


def _linears_of_attention(model: ModelConfig) -> tuple[str, ...]:
    if not model.multi_latent_attention:
        return "linear_proj", "linear_qkv"
    queries = ("linear_q_proj",) if model.q_lora_rank is None else ("linear_q_down_proj", "linear_q_up_proj")
    return "linear_proj", *queries, "linear_kv_down_proj", "linear_kv_up_proj"


CHECKPOINT_VERSION = 3.0
"""Megatron's `checkpoint_version`: QKV rows packed per query group, sizes under `tensor_model_parallel_size`."""

CONTENT_METADATA: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Metadata by which Megatron 0.13 and later choose the optimizer layout: the non-distributed model space."""

OPTIMIZER_PREFIX = "optimizer.state."
RNG_KEY = "rng_state"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The key of a tied embedding, wherever it is used."""


class Box(Protocol):
    """A rectangular part of this rank's local tensor of a parameter or an optimizer state.

    `name` is that of the parameter, or `<state>.<parameter>` with a state such as exp_avg, exp_avg_sq and fp32_param.
    `tensor` begins at `offset` in the local tensor, which has `shape`, and has as many dimensions.
    """

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class LocalTensor:
    """Whole local tensor of a rank as a `Box`."""

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
) -> list[Chunk]:
    """Cut parameters into the chunks that Megatron writes: views, several of a tensor that is placed `Fused`.

    `named` has module name, local tensor and placement; layers and experts have the numbers of the whole model. `rank`
    and `size` are those of the tensor-parallel axis.
    """
    whole = [(LocalTensor(name, tensor.detach()), placement) for name, tensor, placement in named]
    placements = {box.name: placement for box, placement in whole}
    return weight_chunks([box for box, _ in whole], placements, stacking, rank=rank, size=size)


def weight_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    stacking: Stacking,
    *,
    rank: int = 0,
    size: int = 1,
    dedup: bool = False,
) -> list[Chunk]:
    """Cut boxes of parameters as `model_chunks` does; `dedup` leaves out rows that an earlier rank also holds."""
    return [
        chunk
        for box in boxes
        for chunk in _chunks(box, box.name, "", placements[box.name], stacking, rank, size, dedup=dedup)
    ]


def optimizer_chunks(
    boxes: Iterable[Box],
    placements: Mapping[str, Placement],
    stacking: Stacking,
    *,
    rank: int = 0,
    size: int = 1,
    dedup: bool = False,
) -> list[Chunk]:
    """Cut boxes of optimizer state; `placements` has `<state>.<parameter>` where that differs from the parameter's."""
    chunks: list[Chunk] = []
    for box in boxes:
        state, _, name = box.name.partition(".")
        prefix = f"{OPTIMIZER_PREFIX}{state}."
        placement = placements.get(box.name, placements[name])
        chunks += _chunks(box, name, prefix, placement, stacking, rank, size, dedup=dedup)
    return chunks


def _chunks(
    box: Box, name: str, prefix: str, placement: Placement, stacking: Stacking, rank: int, size: int, *, dedup: bool
) -> Iterator[Chunk]:
    """Yield the chunks of a box of the parameter `name`; `prefix` precedes the key."""
    slot, dim, extent = stacking.slot(name), dim_of(placement), global_shape(box.shape, placement, size)
    first, last = box.offset[dim], box.offset[dim] + box.tensor.shape[dim]
    for piece in local_pieces(placement, extent[dim], size, rank):
        start, stop = max(first, piece.local), min(last, piece.local + piece.length)
        # The first of the ranks that hold a replicated part writes it.
        if start < stop and (not dedup or piece.holders[0] == rank):
            part = box.tensor.narrow(dim, start - first, stop - start)
            part = part.view(*(1 for _ in slot.index), *part.shape)
            offset = (*box.offset[:dim], piece.whole + start - piece.local, *box.offset[dim + 1 :])
            yield Chunk(prefix + slot.key, part, (*slot.index, *offset), (*slot.leading_dims, *extent))


def weight_of(key: str) -> str:
    """Return the key of the weight that a tensor is, or whose optimizer state it is."""
    return key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] if key.startswith(OPTIMIZER_PREFIX) else key


def is_extra_state(key: str) -> bool:
    """Return whether a key holds the state of an FP8 linear; readers pass over it."""
    return _EXTRA_STATE.fullmatch(key) is not None


def rng_object_key(
    tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
) -> str:
    """Return the key of a rank's random states, a list over the replicas; with `ep_size` above 1 per expert rank."""
    at, of = [pp_rank, tp_rank], [pp_size, tp_size]
    if ep_size > 1:
        at, of = [*at, ep_rank], [*of, ep_size]
    return f"{RNG_KEY}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"


def is_rng_object(key: str) -> bool:
    """Return whether a key holds random states, of any rank."""
    return key.startswith(f"{RNG_KEY}/")


@dataclass(frozen=True)
class OptimizerScalars:
    """Parameter groups, step and loss scaler: optimizer state other than tensors."""

    param_groups: list[dict[str, Any]]  # Megatron's groups without `params` and `step`
    step: int  # steps applied; the bias corrections depend on it
    # scale, growth_tracker and hysteresis_tracker of the dynamic loss scaler, or None without one
    scaler: dict[str, Any] | None = None


def optimizer_common(
    param_groups: Sequence[Mapping[str, Any]], step: int, scaler: Mapping[str, Any] | None, precision: str
) -> dict[Any, Any]:
    """Build `common["optimizer"]` as Megatron's non-distributed optimizers write it, for parameters of a `precision`.

    Under expert parallelism Megatron has a second optimizer for experts (groups with `is_expert_parallel`), and the two
    are stored under the keys 0 and 1. `scaler` has scale, growth_tracker and hysteresis_tracker of fp16's loss scaler.
    """
    groups = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in param_groups]
    apart = [[group for group in groups if bool(group.get("is_expert_parallel")) == expert] for expert in (False, True)]
    if all(apart):
        return {number: optimizer_common(part, step, scaler, precision) for number, part in enumerate(apart)}
    inner = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    if precision == "float32":
        return inner
    if scaler is None:
        return {"optimizer": inner}
    scale = torch.tensor([float(scaler["scale"])], dtype=torch.float32)
    trackers = {key: int(scaler[key]) for key in ("growth_tracker", "hysteresis_tracker")}
    return {"optimizer": inner, "grad_scaler": {"scale": scale, **trackers}}


def with_expert_groups(groups: Sequence[Mapping[str, Any]], decayed: Collection[bool]) -> list[Mapping[str, Any]]:
    """Add to the groups copies for experts over ranks; `decayed`: which of True and False their weight decay is."""
    own = [group for group in groups if bool(group.get("wd_mult", group.get("weight_decay", 0.0))) in decayed]
    return [*groups, *({**group, "is_expert_parallel": True} for group in own)]


def read_optimizer_common(state: Mapping[Any, Any]) -> OptimizerScalars:
    """Read `common["optimizer"]` in either nesting; the groups of chained optimizers are concatenated."""
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
    # Distributed optimizers write the step into each group, others beside them (`common_step`).
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
