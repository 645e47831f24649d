"""Writing a folder of format torch_dist from a source, by one process and without the model in memory.

The chunks are planned on the meta device; each is read when its turn to be written comes. In memory are thus the two
chunks that the two writer threads of a rank hold, and what the source needs to read one. The ranks of the layout are
written one after the other, into the files that they would write themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megalith.checkpoint.adapted import args_of
from megalith.checkpoint.commit import building, check_space, clear_leftovers, naming_full_disk
from megalith.checkpoint.content import CheckpointContent, Chunk, by_key
from megalith.checkpoint.dcp import ChunkSavePlanner, GlobalTensor, RankWriter, merged_metadata
from megalith.checkpoint.fit import Contents, fitted, keys_of, listing
from megalith.checkpoint.folder import EncodedContent, finish_folder
from megalith.checkpoint.formats.torch_dist import (
    OPTIMIZER_PREFIX,
    Whole,
    extra_state_objects,
    is_rng_object,
    optimizer_chunks,
    rng_object_key,
    weight_chunks,
)
from megalith.checkpoint.model_space import ModelSpace, model_space_of, stages_of
from megalith.checkpoint.source import Source
from megalith.errors import CheckpointError
from megalith.layout import Stages

_STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


class ReadingPlanner(ChunkSavePlanner):
    """Plans chunks of the meta device, and reads each from a source when it is to be written."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source, self._one_reads = source, threading.Lock()

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, torch.Tensor):
            return value
        tensor, whole = torch.empty_like(value, device="cpu"), self.state_dict[index.fqn]
        assert isinstance(whole, GlobalTensor) and index.offset is not None
        chunk = Chunk(index.fqn, tensor, tuple(index.offset), tuple(whole.size()))
        with self._one_reads:
            self._source.read(CheckpointContent([chunk]))
        return tensor


def write_torch_dist(
    source: Source,
    final: Path,
    *,
    facts: Mapping[str, Any],
    files: Mapping[str, bytes],
    publish: Callable[[], None],
) -> int:
    """Write all that a source presents as a checkpoint folder that appears whole or not at all.

    The layout, and the model whose tensors these are, stand in the source's args. Random states are written if there
    are some of each place of the layout.

    Args:
        source: what to write.
        final: the folder.
        facts: what the manifest says beside sizes and hashes.
        files: further files to lay into it, name -> bytes.
        publish: called when the folder is in its place; points the tracker to it.

    Returns:
        Bytes of all the files but the manifest.

    Raises:
        CheckpointError: the source lacks tensors of the model or has others, is damaged, or the disk is full.
        LayoutError: the model cannot be divided so.
    """
    common = source.common()
    args, where = args_of(common), str(final)
    space = model_space_of(args, where)
    tp, stages = int(args["tensor_model_parallel_size"]), stages_of(args, space.num_layers, where)
    contents = source.contents()
    per_rank = [_chunks(space, contents, stages, stage, rank, tp) for stage in range(len(stages)) for rank in range(tp)]
    chunks = [chunk for part in per_rank for chunk in part]
    check_nothing_is_lost(contents, chunks)
    fitted("the checkpoint", contents, CheckpointContent(chunks), keys_of(CheckpointContent(chunks)))
    objects = {**extra_state_objects(space.num_layers), **_random_states(source, contents, len(stages), tp)}
    encoded = EncodedContent(CheckpointContent(chunks, objects, common), files)
    planners = [ReadingPlanner(source) for _ in per_rank]
    writers = [
        RankWriter(part, encoded.objects if rank == 0 else {}, rank, planner)
        for rank, (part, planner) in enumerate(zip(per_rank, planners, strict=True))
    ]
    metadata = merged_metadata([writer.plan for writer in writers])
    with naming_full_disk(final.parent, encoded.nbytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(final.parent)
        check_space(final.parent, encoded.nbytes)
        with building(final) as new:
            written = [writer.write(new.path) for writer in writers]
            size = finish_folder(new.path, final.name, encoded, metadata, written, facts)
            new.commit()
            publish()
    return size


def _chunks(space: ModelSpace, contents: Contents, stages: Stages, stage: int, rank: int, tp: int) -> list[Chunk]:
    """What one place of the layout writes, on the meta device: over all places, each element once."""
    names = [name for chunk in range(len(stages[stage])) for name in space.names_of(stage, chunk, stages)]
    own = [name for name in names if name in space.shapes]  # not the second copy of a tied embedding
    shapes = {name: space.local_shape(name, tp, rank) for name in own}

    def boxes(prefix: str) -> list[Whole]:
        return [Whole(prefix + name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]

    common = {"rank": rank, "size": tp, "once": True}
    found = weight_chunks(boxes(""), space.placements, space.num_layers, **common)  # type: ignore[arg-type]
    for state in _STATES:
        prefix = f"{OPTIMIZER_PREFIX}{state}."
        part = optimizer_chunks(boxes(f"{state}."), space.placements, space.num_layers, **common)  # type: ignore[arg-type]
        if any(key.startswith(prefix) for key in contents.tensors):
            found += part
    return [_like(chunk, contents) for chunk in found]


def _like(chunk: Chunk, contents: Contents) -> Chunk:
    """The chunk in the dtype of the stored tensor, where there is one."""
    stored = contents.tensors.get(chunk.key)
    tensor = chunk.tensor if stored is None else chunk.tensor.to(stored.dtype)
    return Chunk(chunk.key, tensor, chunk.offset, chunk.global_shape)


def check_nothing_is_lost(contents: Contents, chunks: list[Chunk]) -> None:
    """Refuse to leave out tensors that are there.

    Raises:
        CheckpointError: some tensors belong to no parameter of the model; lists them.
    """
    asked = by_key(chunks)
    lost = [key for key in contents.tensors if key not in asked]
    if lost:
        raise CheckpointError(
            listing("the checkpoint holds tensors that its args do not speak of, and that would be lost", lost)
        )


def _random_states(source: Source, contents: Contents, pp: int, tp: int) -> dict[str, Any]:
    """Those of all the places of the layout, if there are those of no others."""
    keys = {rng_object_key(rank, tp, stage, pp) for stage in range(pp) for rank in range(tp)}
    if keys != {key for key in contents.objects if is_rng_object(key)}:
        return {}
    return source.read(CheckpointContent(objects=dict.fromkeys(keys)))
