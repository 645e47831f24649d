"""Writers of folders of Megatron's format `torch`.

    write_per_rank(source, folder)      one process writes a whole checkpoint, of any source
    PerRankWriter                       some processes together: each file is laid out by one of them, then all write
                                        what they hold, then each file is sealed

The layout (tensor-parallel size, pipeline stages, virtual stages, distributed optimizer or not) is what the args in the
common state say, so a conversion gives a source whose args are those of its target. The caller makes the folder durable
and gives it its place (`commit`), and adds its manifest.

Memory: one tensor of the source at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint.content import CheckpointContent, Chunk, overlapping_views, volume
from megalith.checkpoint.files.commit import sync_folder
from megalith.checkpoint.files.dcp import RankWriteResult
from megalith.checkpoint.files.folder import check_further_files, finish_folder
from megalith.checkpoint.files.hashing import WritingCancelled, hash_files
from megalith.checkpoint.files.safe_loading import map_tensors
from megalith.checkpoint.files.torch_archive import preallocate, tensor_offsets, tensors_in, write_at, write_checksums
from megalith.checkpoint.formats.megatron_names import CORE
from megalith.checkpoint.formats.per_rank_layout import (
    FileTensor,
    LayerIndex,
    RankFiles,
    Target,
    layer_index_of,
    target_of,
)
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, WORD_EMBEDDINGS, is_rng_object
from megalith.checkpoint.global_parameters import RankCoordinates
from megalith.checkpoint.sources.source import Contents, Source, fitted
from megalith.errors import CheckpointError
from megalith.layout import Layout
from megalith.progress import advance


def _preallocate(target: Target, folder: Path, coords: RankCoordinates) -> None:
    """Make the files of a rank, with space for their tensors and everything else in them."""
    made = RankFiles(target, *coords)
    (folder / made.folder).mkdir()
    for name, body in made.bodies.items():
        preallocate(folder / made.folder / name, body)
        map_tensors(folder / made.folder / name)
    sync_folder(folder / made.folder)


class _OpenFiles:
    """Open files of those ranks that chunks of the given keys and layers go to."""

    def __init__(self, target: Target, folder: Path, chunks: Sequence[Chunk]) -> None:
        self._stack = ExitStack()
        self._places: dict[LayerIndex, list[tuple[int, int, Chunk]]] = {}
        self._files: list[int] = []
        rows = {_file_index(chunk) for chunk in chunks}
        for coords in target.ranks_holding(chunks):
            made = RankFiles(target, *coords)
            touched = [held for held in made.tensors if any(_file_index(chunk) in rows for chunk in held.chunks)]
            for name, body in made.bodies.items():
                numbers = {id(tensor): number for number, tensor in enumerate(tensors_in(body))}
                inside = [held for held in touched if id(held.tensor) in numbers]
                if inside:
                    self._open(folder / made.folder / name, inside, numbers)

    def _open(self, path: Path, tensors: Iterable[FileTensor], numbers: Mapping[int, int]) -> None:
        starts = tensor_offsets(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._stack.callback(os.close, fd)
        self._files.append(fd)
        for held in tensors:
            for chunk in held.chunks:
                entry = (fd, starts[numbers[id(held.tensor)]], chunk)
                self._places.setdefault(_file_index(chunk), []).append(entry)

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stack:
            if kind is None:
                for fd in self._files:
                    os.fsync(fd)

    def write(self, chunk: Chunk) -> None:
        """Write a chunk to every file that holds elements of it."""
        for fd, start, held in self._places.get(_file_index(chunk), ()):
            views = overlapping_views(held, chunk)
            if views is not None:
                write_at(fd, start, *views)
        advance("bytes written", chunk.nbytes)


def _file_index(chunk: Chunk) -> LayerIndex:
    return chunk.key, layer_index_of(chunk)[1]


def write_per_rank(source: Source, folder: Path, names: str = CORE) -> list[str]:
    """Write what a source of any format holds into an empty folder; returns the names of the files, which are durable.

    The layout to write is that of the args in the common state (tensor_model_parallel_size,
    pipeline_model_parallel_size, virtual_pipeline_model_parallel_size and the like, use_distributed_optimizer). The
    optimizer is written if the common state and the contents have one, random states where they are those of a place of
    this layout.
    """
    contents, common = source.contents(), dict(source.common())
    if WORD_EMBEDDINGS not in contents.tensors:
        raise CheckpointError(f"the checkpoint to convert has no {WORD_EMBEDDINGS}")
    if f"{OPTIMIZER_PREFIX}exp_avg.{WORD_EMBEDDINGS}" not in contents.tensors:
        common.pop("optimizer", None)
    keys = [key for key in contents.objects if is_rng_object(key)]
    objects = source.read(CheckpointContent(objects=dict.fromkeys(keys)))
    target = target_of(common, objects, contents.tensors[WORD_EMBEDDINGS].dtype, str(folder), names)
    for coords in target.ranks:
        _preallocate(target, folder, coords)
    wanted = _wanted(target)
    with _OpenFiles(target, folder, wanted) as files:
        for chunk in wanted:
            files.write(_read(source, contents, chunk))
    made = [name for coords in target.ranks for name in RankFiles(target, *coords).names]
    for name in made:
        write_checksums(folder / name)
    return made


def _wanted(target: Target) -> list[Chunk]:
    """Return chunks of all that the files hold, one layer and expert of a tensor each, on the meta device."""
    found: dict[LayerIndex, Chunk] = {}
    for chunk in target.chunks():
        _, index = layer_index_of(chunk)
        shape = (*(1 for _ in index), *chunk.global_shape[len(index) :])
        whole = torch.empty(shape, dtype=chunk.tensor.dtype, device="meta")
        offset = index + (0,) * (len(shape) - len(index))
        found[_file_index(chunk)] = Chunk(chunk.key, whole, offset, chunk.global_shape)
    return list(found.values())


def _read(source: Source, contents: Contents, chunk: Chunk) -> Chunk:
    live = Chunk(chunk.key, torch.empty_like(chunk.tensor, device="cpu"), chunk.offset, chunk.global_shape)
    source.read(fitted("the checkpoint to convert", contents, CheckpointContent([live]), ()))
    return live


class PerRankWriter:
    """One rank's part in writing a folder of format torch, with the methods of `folder.TorchDistWriter` and two more.

    The first of the replicas of each (tensor, pipeline, expert) place lays out its files. All ranks lay out before any
    writes, as they write into the files together, and all have written before any seals, which hashes the files.
    """

    def __init__(self, content: CheckpointContent, files: Mapping[str, bytes], rank: int, layout: Layout) -> None:
        check_further_files(files)
        axes = layout.coordinates(rank)
        dtype = getattr(torch, str(vars(content.common["args"])["params_dtype"]).removeprefix("torch."))
        weights = (chunk.tensor for chunk in content.chunks if not chunk.key.startswith(OPTIMIZER_PREFIX))
        if any(weight.dtype == torch.float64 for weight in weights):  # of `megalith prove`: no setting asks for it
            dtype = torch.float64
        self._target = target_of(content.common, content.objects, dtype, "the checkpoint to save")
        alike = next(ranks for ranks in layout.groups("cp", "dp") if rank in ranks)
        copy = alike.index(rank)  # the first ones of these have all the experts, in order
        self._coords = RankCoordinates(axes["tp"], axes["pp"], copy) if copy < layout.ep else None
        self._chunks, self._files = content.chunks, dict(files) if rank == 0 else {}
        self._cancelled = threading.Event()
        self._seconds = 0.0
        self.plan = dict[str, int]()  # key -> elements that this rank holds of it
        for chunk in self._chunks:
            self.plan[chunk.key] = self.plan.get(chunk.key, 0) + chunk.tensor.numel()
        own = RankFiles(self._target, *self._coords).nbytes if self._coords is not None else 0
        self.nbytes = own + sum(map(len, self._files.values()))

    def merge(self, plans: Sequence[Any]) -> None:
        for key, shape in {chunk.key: chunk.global_shape for chunk in self._target.chunks()}.items():
            held, wanted = sum(plan.get(key, 0) for plan in plans), volume(shape)
            if held != wanted:
                raise CheckpointError(f"{key}: the chunks to save hold {held} of {wanted} elements")

    def preallocate(self, path: Path) -> None:
        """Make those files of the folder that this rank makes for others too."""
        if self._coords is not None:
            _preallocate(self._target, path, self._coords)

    def write(self, path: Path) -> RankWriteResult:
        began = time.perf_counter()
        with _OpenFiles(self._target, path, self._chunks) as files:
            for chunk in self._chunks:
                if self._cancelled.is_set():
                    raise WritingCancelled
                files.write(chunk)
        self._seconds = time.perf_counter() - began
        return RankWriteResult([], {}, self._seconds)

    def write_checksums(self, path: Path) -> RankWriteResult:
        """Complete and hash the files that this rank laid out."""
        if self._coords is None:
            return RankWriteResult([], {}, self._seconds)
        began, files = time.perf_counter(), [path / name for name in RankFiles(self._target, *self._coords).names]
        for file in files:
            write_checksums(file)
        records = hash_files(files, below=path)
        return RankWriteResult([], records, self._seconds + time.perf_counter() - began)

    def cancel(self) -> None:
        self._cancelled.set()

    def finish(
        self, path: Path, name: str, results: Sequence[RankWriteResult], manifest_fields: Mapping[str, Any]
    ) -> int:
        records = {file: record for part in results for file, record in part.records.items()}
        return finish_folder(path, records, self._files, manifest_fields)
