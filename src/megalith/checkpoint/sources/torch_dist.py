"""Reader of folders of format torch_dist, in all the layouts of the optimizer that Megatron wrote in it.

    model space         optimizer.state.<fp32_param | exp_avg | exp_avg_sq>.<key>      shaped like the parameter
    fully reshardable   the same, with `param` for `fp32_param`
    flattened ranges    the same keys; a tensor cut into a grid of boxes, each flattened (core 0.8 to 0.12)
    bucket space        optimizer.distributed.dp_group_idx_<i>...bucket_idx_<k>.<kind>  one-dimensional buffers
    gathered            optimizer.distributed.dp_group_idx_<i>.param_state              the same, whole, in an object

The common state is `common.pt`, or the object `common_state` of later versions.
Source: docs/reference/checkpoints.md#torch_dist.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megalith.checkpoint.content import CheckpointContent, Chunk, fill, volume
from megalith.checkpoint.files.dcp import SAVE_ID_PREFIX, open_metadata, read_sharded
from megalith.checkpoint.files.hashing import HashingReader, require_file
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data
from megalith.checkpoint.formats.megatron_names import model_space_key, with_family
from megalith.checkpoint.formats.megatron_optimizer import UnreadableState
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, weight_of
from megalith.checkpoint.sources.bucket_space import BucketSpace, in_bucket_space, is_bucket
from megalith.checkpoint.sources.source import MAIN_PREFIX, Contents, StoredTensor
from megalith.errors import CheckpointError

COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"

_COMMON_OBJECT = "common_state/shard_0_1"
_CHAINED = re.compile(r"^chained_\d+\.")
"""One prefix for each optimizer, before core 0.13."""
_RESHARDABLE_MAIN = f"{OPTIMIZER_PREFIX}param."


class TorchDistSource:
    """A folder that holds `.metadata`."""

    format = "torch_dist"

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _metadata(self) -> Metadata:
        return open_metadata(self.path)

    @cached_property
    def _stored(self) -> Contents:
        """Table of contents of the files, under their own keys."""
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
        return {_in_model_space(key): key for key in self._stored.tensors if not is_bucket(key)}

    @cached_property
    def _buckets(self) -> BucketSpace | UnreadableState | None:
        """Optimizer state in buffers, or why it cannot be read; None where it is elsewhere."""
        if not in_bucket_space(self._stored):
            return None
        try:
            return BucketSpace(self.path, self._metadata, self._stored, self.args)
        except UnreadableState as error:
            return error

    def contents(self) -> Contents:
        tensors = {}
        for key, stored in self._key_of.items():
            held = self._stored.tensors[stored]
            weight = self._key_of.get(weight_of(key))
            model = None if weight is None else self._stored.tensors[weight]
            if model is not None and (key != stored or len(held.shape) == len(model.shape) + 1):  # flattened ranges
                held = replace(held, shape=model.shape)
            tensors[key] = held
        if isinstance(self._buckets, BucketSpace):
            tensors |= self._buckets.tensors()
        unreadable = (str(self._buckets),) if isinstance(self._buckets, UnreadableState) else ()
        return Contents(tensors, self._stored.objects - {_COMMON_OBJECT}, unreadable)

    def common(self) -> dict[str, Any]:
        """Return the common state; of an optimizer in bucket space with the scalars in its objects."""
        common = self._common_file()
        if self.args:
            common["args"] = Namespace(**self.args)
        if "optimizer" in common and isinstance(self._buckets, BucketSpace):
            common["optimizer"] = {**common["optimizer"], **self._buckets.scalars()}
        return common

    def _common_file(self) -> dict[str, Any]:
        """Read the common state as it was saved; a CheckpointError if it is not a dict."""
        if not (self.path / COMMON_FILE).exists() and _COMMON_OBJECT in self._stored.objects:
            content = CheckpointContent(objects={_COMMON_OBJECT: None})
            common = read_sharded(self.path, self._metadata, content)[_COMMON_OBJECT]
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

    def read(self, content: CheckpointContent, through: HashingReader | None = None) -> dict[str, Any]:
        """Fill the chunks and return the objects; `through` hashes the files while they are read."""
        plain, buckets, ranges = [], [], []
        for chunk in content.chunks:
            stored = self._key_of.get(chunk.key)
            if stored is None:
                buckets.append(chunk)
            elif len(self._stored.tensors[stored].shape) != len(chunk.global_shape):
                ranges.append(replace(chunk, key=stored))
            else:
                plain.append(replace(chunk, key=stored))
        objects = read_sharded(self.path, self._metadata, CheckpointContent(plain, content.objects), through)
        for chunk in ranges:
            self._read_ranges(chunk)
        if buckets:
            assert isinstance(self._buckets, BucketSpace), f"{buckets[0].key} is not in the checkpoint"
            self._buckets.read(buckets)
        return objects

    def _read_ranges(self, chunk: Chunk) -> None:
        """Fill a chunk from a tensor [*grid, elements]: a grid of boxes of one size, each flattened."""
        *grid, elements = self._stored.tensors[chunk.key].shape
        box = tuple(extent // parts for extent, parts in zip(chunk.global_shape, grid, strict=True))
        if (
            any(extent % parts for extent, parts in zip(chunk.global_shape, grid, strict=True))
            or volume(box) != elements
        ):
            raise CheckpointError(
                f"{self.path}: {chunk.key} has shape {[*grid, elements]}, which is not a grid of flattened boxes of "
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
        return []  # the format has no checksums

    def problems(self) -> list[str]:
        metadata = self._metadata
        self.common()
        try:
            require_file(self.path / FORMAT_FILE)
            json.loads((self.path / FORMAT_FILE).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return [f"{self.path / FORMAT_FILE} is missing or damaged: {error}"]
        ours = metadata.storage_meta is not None and str(metadata.storage_meta.save_id).startswith(SAVE_ID_PREFIX)
        return [f"{self.path / 'manifest.json'} is missing"] if ours else []


def _in_model_space(key: str) -> str:
    """Return the key in model space of a key in the files."""
    key = _CHAINED.sub("", key)
    if key.startswith(_RESHARDABLE_MAIN):
        key = MAIN_PREFIX + key.removeprefix(_RESHARDABLE_MAIN)
    weight = weight_of(key)
    return key.removesuffix(weight) + model_space_key(weight)
