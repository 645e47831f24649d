"""Optimizer state of a torch_dist folder in the buffers of Megatron's distributed optimizer.

    [chained_<n>.]optimizer.distributed.dp_group_idx_<i>
        .gbuf_idx_<b>.dtype_<...>.bucket_idx_<k>.<kind>     one-dimensional buffers of a rank, by virtual chunk
        .per_bucket_numel_unpadded                          their numbers of elements
        .param_state                                        or all of them, gathered into one object
        .optimizer, .grad_scaler                            groups and step, scale of the loss

Without expert parallelism ranks are numbered by tensor (fastest) and pipeline rank. With it the experts have a second
optimizer, `chained_1`, whose ranks are numbered by expert-tensor, expert and pipeline rank; before core 0.10, which had
no expert-tensor parallelism, by tensor, pipeline and expert rank. A chunk without experts has no buffer there. The
layout of a buffer: `formats.megatron_optimizer.buffer_ranges`.
Source: docs/reference/checkpoints.md#optimizer-in-torch_dist, and megatron-core 0.9.0 to 0.16.1, whose checkpoints
`tests/parity/test_megatron_core_written.py` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, check_filled, fill, overlapping_views
from megalith.checkpoint.files.dcp import read_sharded
from megalith.checkpoint.formats.megatron_names import has_latent_norm_within, linear_behind, parse_name
from megalith.checkpoint.formats.megatron_optimizer import (
    BUFFERS,
    BufferRange,
    UnreadableState,
    bucket_limits,
    buffer_ranges,
    coalesced_ranges,
)
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, LocalTensor, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters, parallel_layout
from megalith.checkpoint.sources.source import Contents, StoredTensor
from megalith.errors import CheckpointError

_PREFIX = r"(?P<prefix>(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<index>\d+))"
_BUCKET = re.compile(_PREFIX + r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_\(.*?\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)")
_GATHERED = re.compile(_PREFIX + r"\.param_state/shard_0_1")
_WITHOUT = "load with --no-load-optim to continue from the weights alone"


def is_bucket(key: str) -> bool:
    """Return whether a key in a file is that of a bucket of a buffer."""
    return _BUCKET.fullmatch(key) is not None


def in_bucket_space(stored: Contents) -> bool:
    """Return whether the optimizer's state in the files is in buffers."""
    return any(map(_BUCKET.fullmatch, stored.tensors)) or any(map(_GATHERED.fullmatch, stored.objects))


@dataclass(frozen=True)
class _OptimizerShard:
    """Optimizer of one model-parallel rank."""

    prefix: str  # of its keys
    stage: int  # its pipeline stage
    # its place on the axis over which its tensors are divided
    rank: int
    size: int
    buffers: list[list[str]]  # names of the parameters by buffer, in Megatron's order


@dataclass(frozen=True)
class _ParameterRange:
    """Parameter on one rank: its chunks in model space lie over a flat range of a bucket."""

    name: str
    owner: _OptimizerShard
    buffer: int
    place: BufferRange


class BucketSpace:
    """Buffers of a folder in model space; an UnreadableState if unknown. `stored` has their own keys."""

    def __init__(self, path: Path, metadata: Metadata, stored: Contents, args: Mapping[str, Any]) -> None:
        self._path, self._metadata, self._stored, self._args = path, metadata, stored, args
        where = str(path)
        self._params = GlobalParameters.from_args(args, where)
        self._layout = parallel_layout(args, self._params.num_layers, where)
        self._tp, self._ep = self._layout.tp, self._layout.ep
        self._etp = int(args.get("expert_tensor_parallel_size") or self._tp)
        self._check_experts()
        self._keys: dict[tuple[str, int, int, str], str] = {}
        self._gathered = set[str]()
        self._last: tuple[str, list[dict[str, Any]]] | None = None
        found: dict[tuple[int | None, int], str] = {}
        for key in stored.tensors:
            if match := _BUCKET.fullmatch(key):
                place = (match["prefix"], int(match["buffer"]), int(match["bucket"]), match["kind"])
                if place in self._keys:
                    raise self._unreadable("has buffers of several dtypes")
                self._keys[place] = key
                found[_number(match["chained"]), int(match["index"])] = match["prefix"]
        for key in stored.objects:
            if match := _GATHERED.fullmatch(key):
                found[_number(match["chained"]), int(match["index"])] = match["prefix"]
                self._gathered.add(match["prefix"])
        if {chained for chained, _ in found} != ({0, 1} if self._ep > 1 else {None}):
            raise self._unreadable("has other parts than one, and under expert parallelism one for experts")
        self._owners = [
            self._owner(chained, index, prefix)
            for (chained, index), prefix in sorted(found.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
        ]
        self._parts = [part for owner in self._owners for part in self._lay_out(owner)]

    def _unreadable(self, why: str) -> UnreadableState:
        return UnreadableState(
            f"{self._path}: its distributed optimizer {why}, which this version does not read; {_WITHOUT}"
        )

    def _check_experts(self) -> None:
        """Refuse where the order of the parameters or their places is not known."""
        model, args = self._params.model, self._args
        if not model.mixture:
            return
        legacy = not self._params.stacking.fused or args.get("moe_use_legacy_grouped_gemm")
        if args.get("moe_grouped_gemm") and legacy:
            raise self._unreadable("is of --moe-use-legacy-grouped-gemm, all experts of a layer in one parameter")
        if self._ep == 1 and self._etp != self._tp:
            raise self._unreadable(
                f"is of --expert-tensor-parallel-size {self._etp} beside --tensor-model-parallel-size {self._tp} "
                "without expert parallelism"
            )

    def _owner(self, chained: int | None, index: int, prefix: str) -> _OptimizerShard:
        """Return the optimizer shard of an index in the files."""
        if chained != 1:
            stage, rank = divmod(index, self._tp)
            own = self._names(stage, 0)
            if chained == 0:
                own = [[name for name in names if not parse_name(name).routed] for names in own]
            return _OptimizerShard(prefix, stage, rank, self._tp, own)
        if "expert_tensor_parallel_size" in self._args:
            rest, rank = divmod(index, self._etp)
            stage, ep_rank = divmod(rest, self._ep)
        else:
            rest, rank = divmod(index, self._tp)
            ep_rank, stage = divmod(rest, self._layout.pp)
        own = self._names(stage, ep_rank)
        experts = [[name for name in names if parse_name(name).routed] for names in own]
        return _OptimizerShard(prefix, stage, rank, self._etp, [names for names in experts if names])

    def _names(self, stage: int, ep_rank: int) -> list[list[str]]:
        """List the parameters of each virtual chunk that have state, in the order in which they were registered."""
        if stage >= self._layout.pp:
            raise self._unreadable(f"has buffers of stage {stage} where the args say {self._layout.pp} stages")
        params, grouped = self._params, bool(self._args.get("moe_grouped_gemm"))
        parts = params.names_of(self._layout, stage, ep_rank)
        moved = [[name for name in names if name not in params.buffers] for names in parts]
        keys = self._stored.tensors
        return [registration_order(names, fused=params.stacking.fused, grouped=grouped, keys=keys) for names in moved]

    def _lay_out(self, owner: _OptimizerShard) -> list[_ParameterRange]:
        """List the parameter ranges of an optimizer shard that no shard before it has too."""
        sizes = self._sizes(owner)
        if len(sizes) != len(owner.buffers):
            raise self._unreadable(
                f"has {len(sizes)} buffers where the saved args say {len(owner.buffers)} virtual stages"
            )
        found = []
        for buffer, names in enumerate(owner.buffers):
            for name, place in self._places(owner, buffer, names, sizes[buffer]).items():
                part = _ParameterRange(name, owner, buffer, place)
                if not self._params.is_embedding_copy(name, owner.stage) and self._like(part):
                    found.append(part)
        return found

    def _places(
        self, owner: _OptimizerShard, buffer: int, names: Sequence[str], sizes: Sequence[int]
    ) -> dict[str, BufferRange]:
        params, stages, where = self._params, self._layout.stages, str(self._path)
        shapes = {name: params.local_shape(name, owner.size, owner.rank) for name in names}
        try:
            if owner.prefix not in self._gathered:
                return buffer_ranges(shapes, sizes, where)
            alone = [name for name in names if params.is_shared(name, stages, owner.stage, buffer)]
            return coalesced_ranges(shapes, sizes[0], bucket_limits(self._args), alone, where)
        except CheckpointError as error:
            raise UnreadableState(f"{error}; {_WITHOUT}") from error

    def _state_of(self, owner: _OptimizerShard) -> list[dict[str, Any]]:
        """Return what replica 0 gathered of a shard, by buffer: kind -> flat tensor."""
        if self._last is None or self._last[0] != owner.prefix:
            state = self._object(owner, "param_state")
            buffers = [state[number] for number in sorted(key for key in state if isinstance(key, int))]
            if not state.get("buckets_coalesced") or any(len(by_dtype) != 1 for by_dtype in buffers):
                raise self._unreadable("has buckets in another form than one buffer of one dtype")
            self._last = (owner.prefix, [next(iter(by_dtype.values())) for by_dtype in buffers])
        return self._last[1]

    def _sizes(self, owner: _OptimizerShard) -> list[list[int]]:
        """Return the elements of each bucket of each buffer, without the padding at the bucket's end."""
        if owner.prefix in self._gathered:
            return [[int(found["numel_unpadded"])] for found in self._state_of(owner)]
        sizes = self._object(owner, "per_bucket_numel_unpadded")
        if sizes is None:
            raise self._unreadable(f"lacks {owner.prefix}.per_bucket_numel_unpadded, which records the layout")
        return [[int(size) for found in by_dtype.values() for size in found] for by_dtype in sizes]

    def _object(self, owner: _OptimizerShard, name: str) -> Any:
        """Read an object of an optimizer shard; None if it has none of that name."""
        key = f"{owner.prefix}.{name}/shard_0_1"
        if key not in self._stored.objects:
            return None
        return read_sharded(self._path, self._metadata, CheckpointContent(objects={key: None}))[key]

    @cached_property
    def _by_key(self) -> dict[str, list[tuple[_ParameterRange, list[Chunk]]]]:
        """Key of a weight -> the parts of it, each with its chunks on the meta device; an owner's parts together."""
        found: dict[str, list[tuple[_ParameterRange, list[Chunk]]]] = {}
        for part in self._parts:
            like = self._like(part)
            found.setdefault(like[0].key, []).append((part, like))
        return found

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            f"{OPTIMIZER_PREFIX}{kind}.{key}": StoredTensor(
                parts[0][1][0].global_shape, torch.float32, sum(len(like) for _, like in parts)
            )
            for key, parts in self._by_key.items()
            for kind in BUFFERS.values()
        }

    def _like(self, part: _ParameterRange) -> list[Chunk]:
        return self._chunks(part, torch.empty(part.place.shape, device="meta"))

    def _chunks(self, part: _ParameterRange, tensor: torch.Tensor) -> list[Chunk]:
        """Return a range's local tensor in model space, under the keys of weights; not what a rank before has too."""
        params, owner = self._params, part.owner
        box = LocalTensor(part.name, tensor)
        return weight_chunks([box], params.placements, params.stacking, rank=owner.rank, size=owner.size, dedup=True)

    def scalars(self) -> dict[Any, Any]:
        """Build the common state of the optimizers (`optimizer_common`) from the objects of the first shard of each."""
        first: dict[str, _OptimizerShard] = {}
        for owner in self._owners:
            first.setdefault(owner.prefix.split(".")[0], owner)
        parts = [self._scalars(owner) for owner in first.values()]
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    def _scalars(self, owner: _OptimizerShard) -> dict[Any, Any]:
        found = self._object(owner, "optimizer")
        if not isinstance(found, Mapping):
            return {}
        scaler = self._object(owner, "grad_scaler")
        state = dict(found) if "optimizer" in found else {"optimizer": found}
        return {**state, "grad_scaler": scaler} if scaler else state

    def read(self, wanted: Sequence[Chunk]) -> None:
        """Fill chunks of the state; an owner's parts one after another."""
        targets = by_key(wanted)
        near = [
            (part, kind, targets[f"{OPTIMIZER_PREFIX}{label}.{key}"])
            for kind, label in BUFFERS.items()
            for key, parts in self._by_key.items()
            if f"{OPTIMIZER_PREFIX}{label}.{key}" in targets
            for part, like in parts
            if any(
                overlapping_views(target, own) for target in targets[f"{OPTIMIZER_PREFIX}{label}.{key}"] for own in like
            )
        ]
        order = {owner.prefix: number for number, owner in enumerate(self._owners)}
        filled = dict.fromkeys(map(id, wanted), 0)
        for part, kind, found in sorted(near, key=lambda item: order[item[0].owner.prefix]):
            sources = self._chunks(part, self._load(part, kind))
            for target in found:
                filled[id(target)] += fill(target, sources)
        for chunk in wanted:
            check_filled(str(self._path), chunk, filled[id(chunk)])

    def _load(self, part: _ParameterRange, kind: str) -> torch.Tensor:
        place = part.place
        if part.owner.prefix in self._gathered:
            whole: torch.Tensor = self._state_of(part.owner)[part.buffer][kind]
            return whole[place.start : place.stop].view(place.shape)
        key = self._keys[part.owner.prefix, part.buffer, place.bucket, kind]
        flat = torch.empty(place.stop - place.start)
        content = CheckpointContent([Chunk(key, flat, (place.start,), self._stored.tensors[key].shape)])
        read_sharded(self._path, self._metadata, content)
        return flat.view(place.shape)


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def registration_order(names: Sequence[str], *, fused: bool, grouped: bool, keys: Iterable[str]) -> list[str]:
    """Return parameters in the order in which the modules that wrote a checkpoint registered them: that of its buffers.

    `names` are ours, in the order of Megatron's own modules. With `fused`, those of TransformerEngine, another order
    applies within a layer:
    - a norm that is fused with the following linear layer (`LayerNormLinear`) has its weight and bias before those of
      the linear layer; Megatron has them first in the layer, or after all linear layers of latent attention, whose
      norms are fused or not according to the `keys` of the weights;
    - with `grouped` (`--moe-grouped-gemm`) the first linear layers of all experts come before the second ones
      (`GroupedLinear`: weight and bias of an expert, then those of the next), where Megatron has expert after expert.

    >>> layer = [f"decoder.layers.0.{name}.weight" for name in ("input_layernorm", "self_attention.linear_proj",
    ...          "self_attention.linear_qkv")]
    >>> [name.split(".")[-2] for name in registration_order(layer, fused=True, grouped=False, keys=())]
    ['linear_proj', 'input_layernorm', 'linear_qkv']
    """
    if not fused:
        return list(names)
    latent = any(map(has_latent_norm_within, keys))
    place = {name: number for number, name in enumerate(names)}
    first_expert: dict[str, int] = {}

    def rank(name: str) -> tuple[int, int, int, int]:
        at, found = place[name], parse_name(name)
        if grouped and found.expert is not None:
            return first_expert.setdefault(found.prefix, at), int(found.module == "linear_fc2"), found.expert, at
        linear = place.get(linear_behind(found, latent=latent) or "")
        return (at, 0, 0, at) if linear is None else (linear, -1, 0, at)

    return sorted(names, key={name: rank(name) for name in names}.__getitem__)
