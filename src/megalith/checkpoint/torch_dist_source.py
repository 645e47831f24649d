"""Reading folders of format torch_dist, in all the layouts of the optimizer that Megatron wrote in it.

    model space         optimizer.state.<fp32_param | exp_avg | exp_avg_sq>.<key>      shaped like the parameter
    fully reshardable   the same, with `param` for `fp32_param`
    flattened ranges    the same keys; a tensor cut into a grid of boxes, each flattened (core 0.8 to 0.12)
    bucket space        optimizer.distributed.dp_group_idx_<i>...bucket_idx_<k>.<kind>  one-dimensional buffers
    gathered            optimizer.distributed.dp_group_idx_<i>.param_state              the same, whole, in an object

The common state is `common.pt`, or the object `common_state` of later versions.
Source: spec/formats-checkpoint.md sections 4 and 9.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megalith.checkpoint.boxes import fill, rounds
from megalith.checkpoint.content import CheckpointContent, Chunk, volume
from megalith.checkpoint.dcp import SAVE_ID_PREFIX, open_metadata, read_sharded
from megalith.checkpoint.fit import Contents, StoredTensor
from megalith.checkpoint.formats.buffers import Place, bucket_limits, coalesced_places, places
from megalith.checkpoint.formats.family_by_names import with_family
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, WORD_EMBEDDINGS, weight_chunks
from megalith.checkpoint.formats.torch_dist import Whole as WholeBox
from megalith.checkpoint.hashed_reading import ReadThrough
from megalith.checkpoint.model_space import OUTPUT_LAYER, model_space_of, stages_of
from megalith.checkpoint.safe_loading import load_tensors_and_plain_data
from megalith.errors import CheckpointError

COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"

_COMMON_OBJECT = "common_state/shard_0_1"
_BUCKET = re.compile(
    r"(?P<prefix>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+))"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>\(.*?\))\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
_GATHERED = re.compile(
    r"(?P<prefix>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+))\.param_state/shard_0_1"
)
_KINDS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_RENAMED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^chained_\d+\.", ""),  # one prefix for each optimizer, before core 0.13
        (r"^optimizer\.state\.param\.", f"{OPTIMIZER_PREFIX}fp32_param."),
        # Norms that some of Megatron's modules keep apart, or within another, and model space does not (`stacking`).
        (r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1"),
        (r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1"),
        (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_", r".self_attention.\1_layernorm."),
    )
]
"""How keys of the files become those of model space."""


class TorchDistSource:
    """A folder that holds `.metadata`.

    Args:
        path: the folder.
    """

    format = "torch_dist"

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _metadata(self) -> Metadata:
        return open_metadata(self.path)

    @cached_property
    def _stored(self) -> Contents:
        """What the files hold, under their own keys."""
        tensors, objects = {}, []
        for key, stored in self._metadata.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                objects.append(key)
            else:
                tensors[key] = StoredTensor(tuple(stored.size), stored.properties.dtype, len(stored.chunks))
        return Contents(tensors, frozenset(objects))

    @cached_property
    def _key_of(self) -> dict[str, str]:
        """Key in model space -> key in the files, where the one names a tensor of the other."""
        return {_in_model_space(key): key for key in self._stored.tensors if not _BUCKET.fullmatch(key)}

    @cached_property
    def _left_out(self) -> tuple[str, ...]:
        """Why the optimizer's state is not read, where that is so."""
        spread = [key for key in (*self._stored.tensors, *self._stored.objects) if ".distributed.dp_group_idx_" in key]
        if not spread or not (self.path / COMMON_FILE).exists():
            return ()
        args = self.args
        if int(args.get("expert_model_parallel_size") or 1) == 1:
            return ()
        return (
            f"{self.path}: the distributed optimizer of a run with --expert-model-parallel-size "
            f"{args['expert_model_parallel_size']} keeps buckets of experts in a form that this version does not read; "
            "save it with --dist-ckpt-optim-fully-reshardable, or load with --no-load-optim",
        )

    @cached_property
    def _buckets(self) -> _Buckets | None:
        if (
            self._left_out
            or not any(map(_BUCKET.fullmatch, self._stored.tensors))
            and not any(map(_GATHERED.fullmatch, self._stored.objects))
        ):
            return None
        return _Buckets(self)

    def contents(self) -> Contents:
        tensors = {}
        for key, stored in self._key_of.items():
            held = self._stored.tensors[stored]
            weight = self._key_of.get(_without_prefix(key))
            model = None if weight is None else self._stored.tensors[weight]
            tensors[key] = replace(held, shape=model.shape) if model is not None and key != stored else held
            if model is not None and len(held.shape) == len(model.shape) + 1:  # flattened ranges
                tensors[key] = replace(held, shape=model.shape)
        if self._buckets is not None:
            tensors |= self._buckets.tensors()
        return Contents(tensors, self._stored.objects - {_COMMON_OBJECT}, self._left_out)

    def common(self) -> dict[str, Any]:
        """As the port says; of an optimizer in bucket space with what stands in its objects.

        Raises:
            CheckpointError: it is missing, damaged or of a refused type.
        """
        common = self._common_file()
        if self.args:
            common["args"] = Namespace(**self.args)
        if self._buckets is not None and "optimizer" in common:
            common["optimizer"] = {**common["optimizer"], **self._buckets.scalars()}
        return common

    def _common_file(self) -> dict[str, Any]:
        """As it was saved."""
        if not (self.path / COMMON_FILE).exists() and _COMMON_OBJECT in self._stored.objects:
            common = self.objects([_COMMON_OBJECT])[_COMMON_OBJECT]
        else:
            common = load_tensors_and_plain_data(self.path / COMMON_FILE)
        if not isinstance(common, dict):
            raise CheckpointError(f"{self.path / COMMON_FILE} is damaged: it holds a {type(common).__name__}")
        return common

    @cached_property
    def args(self) -> dict[str, Any]:
        """Megatron's arguments of the run that wrote it, with the family of the model; empty where there are none."""
        found = self._common_file().get("args", Namespace())
        return with_family(vars(found), self._stored.tensors) if isinstance(found, Namespace) else {}

    def objects(self, keys: Sequence[str]) -> dict[str, Any]:
        """Objects of the files by their keys."""
        return read_sharded(self.path, self._metadata, CheckpointContent(objects=dict.fromkeys(keys)))

    def read(self, content: CheckpointContent, through: ReadThrough | None = None) -> dict[str, Any]:
        """As the port says.

        Args:
            content: what to read.
            through: the files to hash in passing.
        """
        plain, buckets, ranges = [], [], []
        for chunk in content.chunks:
            stored = self._key_of.get(chunk.key)
            if stored is None:
                buckets.append(chunk)
            elif len(self._stored.tensors[stored].shape) != len(chunk.global_shape):
                ranges.append(replace(chunk, key=stored))
            else:
                plain.append(replace(chunk, key=stored))
        objects: dict[str, Any] = dict(content.objects)
        for number, part in enumerate(rounds(plain)):
            found = read_sharded(self.path, self._metadata, CheckpointContent(part, {} if number else objects), through)
            objects |= found
        if not plain and objects:
            objects = self.objects(list(objects))
        for chunk in ranges:
            self._read_ranges(chunk)
        if buckets:
            assert self._buckets is not None, f"{buckets[0].key} is not in the checkpoint"
            self._buckets.read(buckets)
        return objects

    def _read_ranges(self, chunk: Chunk) -> None:
        """Fill a chunk from a tensor [*grid, elements] of flattened boxes, those of one size that the grid is made of.

        Raises:
            CheckpointError: it is no such tensor.
        """
        *grid, elements = self._stored.tensors[chunk.key].shape
        box = tuple(extent // parts for extent, parts in zip(chunk.global_shape, grid, strict=True))
        if (
            any(extent % parts for extent, parts in zip(chunk.global_shape, grid, strict=True))
            or volume(box) != elements
        ):
            raise CheckpointError(
                f"{self.path}: {chunk.key} has shape {[*grid, elements]}, which is no grid of flattened boxes of "
                f"{list(chunk.global_shape)}"
            )
        touched = [
            range(start // size, -(-(start + length) // size))
            for start, length, size in zip(chunk.offset, chunk.tensor.shape, box, strict=True)
        ]
        dtype = self._stored.tensors[chunk.key].dtype
        for place in product(*touched):
            flat = torch.empty((1,) * len(grid) + (elements,), dtype=dtype)
            part = Chunk(chunk.key, flat, (*place, 0), (*grid, elements))
            read_sharded(self.path, self._metadata, CheckpointContent([part]))
            offset = tuple(index * size for index, size in zip(place, box, strict=True))
            fill(chunk, [Chunk(chunk.key, flat.view(box), offset, chunk.global_shape)])

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        return []  # the format has no checksums of its own

    def problems(self) -> list[str]:
        metadata = self._metadata
        self.common()
        try:
            json.loads((self.path / FORMAT_FILE).read_text("utf-8"))
        except (OSError, ValueError) as error:
            return [f"{self.path / FORMAT_FILE} is missing or damaged: {error}"]
        ours = metadata.storage_meta is not None and str(metadata.storage_meta.save_id).startswith(SAVE_ID_PREFIX)
        return [f"{self.path / 'manifest.json'} is missing"] if ours else []


def _in_model_space(key: str) -> str:
    for pattern, replacement in _RENAMED:
        key = pattern.sub(replacement, key)
    return key


def _without_prefix(key: str) -> str:
    """The key of the parameter that a state belongs to."""
    return key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] if key.startswith(OPTIMIZER_PREFIX) else key


@dataclass(frozen=True)
class _Part:
    """A parameter as one place of the layout holds it: its chunks in model space lie over a flat range of a bucket."""

    name: str
    group: int
    buffer: int
    rank: int
    place: Place


class _Buckets:
    """The optimizer's state in the bucket space of each (tensor, pipeline) place.

    Args:
        source: whose tensors they are.
    """

    def __init__(self, source: TorchDistSource) -> None:
        self._source = source
        where = str(source.path)
        args = source.args
        self._space = model_space_of(args, where)
        self._tp = int(args.get("tensor_model_parallel_size") or 1)
        self._args = args
        self._keys: dict[tuple[int, int, int, str], str] = {}
        self._gathered = set[int]()
        self._last: tuple[int, list[dict[str, Any]]] | None = None
        prefixes: dict[int, str] = {}
        for key in source._stored.tensors:
            if match := _BUCKET.fullmatch(key):
                place = (int(match["group"]), int(match["buffer"]), int(match["bucket"]), match["kind"])
                if place in self._keys:
                    raise CheckpointError(
                        f"{where}: its distributed optimizer has buffers of several dtypes, which this version does "
                        "not read; load with --no-load-optim to continue from the weights alone"
                    )
                self._keys[place] = key
                prefixes[place[0]] = match["prefix"]
        for key in source._stored.objects:
            if match := _GATHERED.fullmatch(key):
                prefixes[int(match["group"])] = match["prefix"]
                self._gathered.add(int(match["group"]))
        self._prefixes = prefixes
        stages = stages_of(args, self._space.num_layers, where)
        self._parts: dict[str, list[_Part]] = {}
        for group in sorted(prefixes):
            stage, rank = divmod(group, self._tp)
            sizes = self._sizes(group)
            if len(sizes) != len(stages[stage]):
                raise CheckpointError(
                    f"{where}: its distributed optimizer has {len(sizes)} buffers where the saved args say "
                    f"{len(stages[stage])} virtual stages; load with --no-load-optim to continue from the weights alone"
                )
            for buffer, buckets in enumerate(sizes):
                self._lay_out(group, buffer, rank, self._space.moved_names_of(stage, buffer, stages), buckets)

    def _lay_out(self, group: int, buffer: int, rank: int, names: Sequence[str], buckets: Sequence[int]) -> None:
        space, where = self._space, str(self._source.path)
        shapes = {name: space.local_shape(_stored_name(name, tied=space.tied), self._tp, rank) for name in names}
        if group in self._gathered:
            # The embedding of a first stage that is not the last, or the copy of it in the last, is shared.
            shared, predicts = space.tied or space.model.predictions > 0, "decoder.final_layernorm.weight" in shapes
            first = WORD_EMBEDDINGS in shapes and shared and not predicts
            copied = OUTPUT_LAYER if space.tied and not space.model.predictions else WORD_EMBEDDINGS
            alone = [WORD_EMBEDDINGS] if first else [copied] if shared and group // self._tp else []
            found = coalesced_places(shapes, buckets[0], bucket_limits(self._args), alone, where)
        else:
            found = places(shapes, buckets, where)
        for name, place in found.items():
            if not space.is_copy(name, group // self._tp):
                part = _Part(name, group, buffer, rank, place)
                if self._chunks(part, torch.empty(place.shape, device="meta")):
                    self._parts.setdefault(name, []).append(part)

    def _state_of(self, group: int) -> list[dict[str, Any]]:
        """What replica 0 had gathered of a place: kind -> flat tensor, by buffer.

        Raises:
            CheckpointError: it is in a form that this version does not read.
        """
        key = f"{self._prefixes[group]}.param_state/shard_0_1"
        if self._last is None or self._last[0] != group:
            state: Any = self._source.objects([key])[key]
            buffers = [state[number] for number in sorted(key for key in state if isinstance(key, int))]
            if not state.get("buckets_coalesced") or any(len(by_dtype) != 1 for by_dtype in buffers):
                raise CheckpointError(
                    f"{self._source.path}: {key} has buckets in a form that this version does not read; load with "
                    "--no-load-optim to continue from the weights alone"
                )
            self._last = (group, [next(iter(by_dtype.values())) for by_dtype in buffers])
        return self._last[1]

    def _sizes(self, group: int) -> list[list[int]]:
        """Elements of each bucket of each buffer, without the padding at the bucket's end."""
        if group in self._gathered:
            return [[int(found["numel_unpadded"])] for found in self._state_of(group)]
        key = f"{self._prefixes[group]}.per_bucket_numel_unpadded/shard_0_1"
        if key not in self._source._stored.objects:
            raise CheckpointError(
                f"{self._source.path}: {key} is missing, without which the state of the distributed optimizer cannot "
                "be placed; load with --no-load-optim to continue from the weights alone"
            )
        sizes = self._source.objects([key])[key]
        return [[int(size) for found in by_dtype.values() for size in found] for by_dtype in sizes]

    def tensors(self) -> dict[str, StoredTensor]:
        """The state's tensors in model space."""
        found: dict[str, StoredTensor] = {}
        for parts in self._parts.values():
            chunks = [
                chunk for part in parts for chunk in self._chunks(part, torch.empty(part.place.shape, device="meta"))
            ]
            for kind in _KINDS.values():
                key = f"{OPTIMIZER_PREFIX}{kind}.{chunks[0].key}"
                held = found[key].chunks if key in found else 0
                found[key] = StoredTensor(chunks[0].global_shape, torch.float32, held + len(chunks))
        return found

    def _chunks(self, part: _Part, tensor: torch.Tensor) -> list[Chunk]:
        """A part's local tensor in model space, under the keys of the weights; not what a rank before it has too."""
        return weight_chunks(
            [WholeBox(part.name, tensor)],
            self._space.placements,
            self._space.stacking,
            rank=part.rank,
            size=self._tp,
            once=True,
        )

    def scalars(self) -> dict[str, Any]:
        """What `optimizer_common` makes, out of the object of the first place."""
        key = f"{self._prefixes[min(self._prefixes)]}.optimizer/shard_0_1"
        found: Any = self._source.objects([key])[key]
        if not isinstance(found, Mapping):
            return {}
        return dict(found) if "optimizer" in found else {"optimizer": found}

    def read(self, wanted: Sequence[Chunk]) -> None:
        """Fill chunks of the state; each part is read once, whole."""
        by_key: dict[str, list[Chunk]] = {}
        filled = dict.fromkeys(map(id, wanted), 0)
        for chunk in wanted:
            by_key.setdefault(chunk.key, []).append(chunk)
        every = sorted((part for parts in self._parts.values() for part in parts), key=lambda part: part.group)
        for part in every:
            like = self._chunks(part, torch.empty(part.place.shape, device="meta"))
            for stored_kind, kind in _KINDS.items():
                targets = by_key.get(f"{OPTIMIZER_PREFIX}{kind}.{like[0].key}", ())
                if any(_meet(target, own) for target in targets for own in like):
                    sources = self._chunks(part, self._load(part, stored_kind))
                    for target in targets:
                        filled[id(target)] += fill(target, sources)
        for chunk in wanted:
            if filled[id(chunk)] != volume(chunk.tensor.shape):
                raise CheckpointError(
                    f"{self._source.path}: {chunk.key} holds {filled[id(chunk)]} of the "
                    f"{volume(chunk.tensor.shape)} elements asked for"
                )

    def _load(self, part: _Part, kind: str) -> torch.Tensor:
        if part.group in self._gathered:
            flat = self._state_of(part.group)[part.buffer][kind][part.place.start : part.place.stop]
            return flat.view(part.place.shape)
        key = self._keys[part.group, part.buffer, part.place.bucket, kind]
        flat = torch.empty(part.place.stop - part.place.start)
        content = CheckpointContent([Chunk(key, flat, (part.place.start,), self._source._stored.tensors[key].shape)])
        read_sharded(self._source.path, self._source._metadata, content)
        return flat.view(part.place.shape)


def _stored_name(name: str, *, tied: bool) -> str:
    return WORD_EMBEDDINGS if tied and name == OUTPUT_LAYER else name


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(
            one.offset, one.tensor.shape, other.offset, other.tensor.shape, strict=True
        )
    )
