"""Writers of a checkpoint folder from a source, by one process and without the model in memory.

Of format torch_dist the chunks are planned on the meta device, and each is read when its turn to be written comes. In
memory are thus the two chunks that the two writer threads of a rank hold, and what the source needs to read one. The
ranks of the layout are written one after the other, into the files that they would write themselves. Of format torch
the files are laid out first and filled tensor by tensor (`formats.per_rank`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key
from megalith.checkpoint.files.commit import temp_folder
from megalith.checkpoint.files.folder import TorchDistWriter, finish_folder
from megalith.checkpoint.files.hashing import hash_files
from megalith.checkpoint.formats.megatron_names import CORE, parse_name
from megalith.checkpoint.formats.megatron_optimizer import MAIN
from megalith.checkpoint.formats.torch_dist import (
    OPTIMIZER_PREFIX,
    LocalTensor,
    is_rng_object,
    optimizer_chunks,
    rng_object_key,
    weight_chunks,
)
from megalith.checkpoint.global_parameters import GlobalParameters, ParallelLayout, RankCoordinates, parallel_layout
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.per_rank import PerRankSource
from megalith.checkpoint.sources.source import Contents, Source, fitted, keys_of, listing
from megalith.checkpoint.writers.per_rank import write_per_rank
from megalith.errors import CheckpointError
from megalith.layout import Layout
from megalith.nn.placement import Replicated
from megalith.registry import EMPTY, Registry

_SHARE_OF_COPIES = 8  # bytes that are in several files: norms, the second copy of a tied embedding; and headers
_FIXED_OVERHEAD = 2**22
_UNKNOWN = "the checkpoint holds tensors that its args do not describe, and that would be lost"
_NO_PLACE = "the groups of the optimizer do not name all parameters; convert with --no-optim; no place for"
_OF_ADAM = frozenset({MAIN, "exp_avg", "exp_avg_sq"})
_SQUARES = {"L": 0, "Q_L": 0, "R": 1, "Q_R": 1}
"""States of SOAP -> the dimension of the parameter that both of theirs are as long as."""


def _reader(source: Source, key_of: Mapping[str, str]) -> Callable[[Chunk], Tensor]:
    """Return what reads a chunk of the meta device from a source, for one thread at a time; `key_of`: its key there."""
    one_reads = threading.Lock()

    def read(chunk: Chunk) -> Tensor:
        tensor = torch.empty_like(chunk.tensor, device="cpu")
        with one_reads:
            source.read(CheckpointContent([replace(chunk, key=key_of.get(chunk.key, chunk.key), tensor=tensor)]))
        return tensor

    return read


def no_check(_: Path) -> None:
    """Accept the folder as it was written: the default of `check`."""


def write_torch_dist(
    source: Source,
    final: Path,
    *,
    manifest_fields: Mapping[str, Any],
    files: Mapping[str, bytes],
    update_tracker: Callable[[], None],
    check: Callable[[Path], None] = no_check,
    registry: Registry = EMPTY,
) -> int:
    """Write the content of a source as a checkpoint folder, which is committed by a rename; return its bytes.

    The source's args determine layout and model. Random states are written if there are some for each rank of the
    layout. Raises LayoutError if the model does not divide over it.

    Args:
        manifest_fields: entries of the manifest besides sizes and hashes.
        files: contents of additional files, by name.
        update_tracker: called after the rename; points the tracker to the folder.
        check: called with the finished folder before the rename; an exception leaves everything unchanged.
        registry: what users have registered, of which the model may be made.
    """
    common = source.common()
    args, where = args_of(common), str(final)
    params = GlobalParameters.from_args(args, where, registry)
    layout = parallel_layout(args, params.num_layers, where)
    contents = source.contents()
    per_rank = [
        _chunks(params, contents, layout, RankCoordinates(tp, pp, ep))
        for pp, ep, tp in product(range(layout.pp), range(layout.ep), range(layout.tp))
    ]
    chunks = [chunk for part in per_rank for chunk in part]
    _refuse_lost(contents, by_key(chunks), _UNKNOWN)
    fitted("the checkpoint", contents, CheckpointContent(chunks), keys_of(CheckpointContent(chunks)))
    objects = {
        **params.stacking.extra_state_objects(),
        **_random_states(source, contents, Layout(tp=layout.tp, dp=layout.ep, pp=layout.pp, ep=layout.ep)),
    }
    written_as = params.stacking.written_keys(chunk.key for chunk in chunks)
    read = _reader(source, {stored: key for key, stored in written_as.items()})
    writers = [
        TorchDistWriter(CheckpointContent(part, {} if rank else objects, common, written_as), files, rank, read)
        for rank, part in enumerate(per_rank)
    ]
    writers[0].merge([writer.plan for writer in writers])

    with temp_folder(final, sum(writer.nbytes for writer in writers)) as new:
        results = [writer.write(new.path) for writer in writers]
        size = writers[0].finish(new.path, final.name, results, manifest_fields)
        check(new.path)
        new.commit()
        update_tracker()
    return size


def write_torch(
    source: Source,
    final: Path,
    *,
    manifest_fields: Mapping[str, Any],
    files: Mapping[str, bytes],
    update_tracker: Callable[[], None],
    check: Callable[[Path], None] = no_check,
    names: str = CORE,
) -> int:
    """Write as `write_torch_dist` in format torch, with weights named by `CORE` or a generation of `LEGACY`."""
    contents = source.contents()
    args = args_of(source.common())
    params = GlobalParameters.from_args(args, str(final))
    undivided = replace(parallel_layout(args, params.num_layers, str(final)), tp=1, ep=1)
    whole = [chunk for coords in undivided.ranks for chunk in _chunks(params, contents, undivided, coords)]
    _refuse_lost(contents, by_key(whole), _UNKNOWN)

    tensors = sum(stored.numel * stored.dtype.itemsize for stored in contents.tensors.values())
    with temp_folder(final, tensors + tensors // _SHARE_OF_COPIES + _FIXED_OVERHEAD) as new:
        made = write_per_rank(source, new.path, names)
        _refuse_lost(contents, PerRankSource(new.path).contents().tensors, _NO_PLACE)
        records = hash_files([new.path / name for name in made], below=new.path)
        size = finish_folder(new.path, records, files, manifest_fields)
        check(new.path)
        new.commit()
        update_tracker()
    return size


def _chunks(
    params: GlobalParameters, contents: Contents, layout: ParallelLayout, coords: RankCoordinates
) -> list[Chunk]:
    """Return what one rank of the layout writes, on the meta device: over all ranks, each element once."""
    names = [name for part in params.names_of(layout, coords.pp, coords.ep) for name in part]
    held = [name for name in names if not params.is_embedding_copy(name, coords.pp)]
    own = [name for name in held if coords.ep == 0 or parse_name(name).routed]
    shapes = {name: params.local_shape(name, layout.tp, coords.tp) for name in own}

    def boxes(prefix: str) -> list[LocalTensor]:
        moved = [name for name in shapes if not (prefix and name in params.buffers)]
        return [LocalTensor(prefix + name, torch.empty(shapes[name], device="meta")) for name in moved]

    common = {"rank": coords.tp, "size": layout.tp, "dedup": True}
    found = weight_chunks(boxes(""), params.placements, params.stacking, **common)  # type: ignore[arg-type]
    states = [key.removeprefix(OPTIMIZER_PREFIX) for key in contents.tensors if key.startswith(OPTIMIZER_PREFIX)]
    kinds = dict.fromkeys(state.partition(".")[0] for state in states)
    # Optimizers of matrices have their own states for matrices, and AdamW's for the rest.
    two_rules = "exp_avg" in kinds and not kinds.keys() - _SQUARES.keys() <= _OF_ADAM
    for state in sorted(kinds.keys() - _SQUARES.keys(), key=lambda state: (state != MAIN, state)):
        part = optimizer_chunks(boxes(f"{state}."), params.placements, params.stacking, **common)  # type: ignore[arg-type]
        found += [chunk for chunk in part if chunk.key in contents.tensors or not two_rules]
    for state, dim in _SQUARES.items():
        sides = {name: params.shapes[name][dim] for name in own if state in kinds and len(params.shapes[name]) == 2}
        squares = [
            LocalTensor(f"{state}.{name}", torch.empty(side, side, device="meta"))  # of every rank, whatever it has
            for name, side in sides.items()
        ]
        whole = {**params.placements, **{box.name: Replicated() for box in squares}}
        part = optimizer_chunks(squares, whole, params.stacking, **common)  # type: ignore[arg-type]
        found += [chunk for chunk in part if chunk.key in contents.tensors]
    dtypes = {key: stored.dtype for key, stored in contents.tensors.items()}
    return [replace(chunk, tensor=chunk.tensor.to(dtypes.get(chunk.key, chunk.tensor.dtype))) for chunk in found]


def _refuse_lost(contents: Contents, kept: Collection[str], why: str) -> None:
    """Refuse to write a checkpoint without some tensors of the source."""
    lost = [key for key in contents.tensors if key not in kept]
    if lost:
        raise CheckpointError(listing(why, lost))


def rng_keys(layout: Layout) -> set[str]:
    """Return the keys of the random states of all ranks of a layout."""
    return {
        rng_object_key(rank, layout.tp, stage, layout.pp, expert, layout.ep)
        for stage, rank, expert in product(range(layout.pp), range(layout.tp), range(layout.ep))
    }


def _random_states(source: Source, contents: Contents, layout: Layout) -> dict[str, Any]:
    """Read the random states of all ranks of the layout; none if the source has those of another layout."""
    keys = rng_keys(layout)
    if keys != {key for key in contents.objects if is_rng_object(key)}:
        return {}
    return source.read(CheckpointContent(objects=dict.fromkeys(keys)))
