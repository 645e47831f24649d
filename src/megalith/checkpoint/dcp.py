"""Writing and reading a folder of `torch.distributed.checkpoint` (DCP) files, through its public classes.

What differs from DCP's defaults, and why:
- a chunk's place in its global tensor is taken from `Chunk`, so stacked layers and gate/up halves need no copy;
- objects are written as one-element lists, which is how Megatron stores its `ShardedObject`s;
- tensors go from memory to the file as they are (`tensor_entry`), in the form that `torch.save` gives them;
- every file is hashed while it is written (`hashing`), and errors of the writer threads are never lost;
- `.metadata` and objects are read by the restricted readers of `safe_loading`; a tensor is read straight into its
  destination where it fits, without torch's unpickler seeing the file;
- a tensor of the checkpoint that covers only part of what is asked is an error, not a half-filled tensor.

Rank r writes `__r_0.distcp` and `__r_1.distcp`. DCP's own coordination is not used, since an error on one of its ranks
leaves the others waiting: each rank plans (`RankWriter`), the first one merges the plans (`merged_metadata`), each
writes, and the first one writes `.metadata` (`write_metadata`). Who gathers what in between is `crew`'s business.
A load needs no coordination at all: each rank plans and reads for itself.
"""

from __future__ import annotations

import io
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, volume
from megalith.checkpoint.hashed_reading import ReadThrough
from megalith.checkpoint.hashing import FileRecord, HashedFile
from megalith.checkpoint.safe_loading import dump_bytes, load_bytes, read_metadata
from megalith.checkpoint.tensor_entry import Heads, read_tensor_entry, write_tensor_entry
from megalith.errors import CheckpointError

METADATA_FILE = ".metadata"
SAVE_ID_PREFIX = "megalith-"
"""Marks `.metadata` files written here: such a checkpoint has a manifest, or is damaged."""

_FILES_PER_RANK = 2  # Megatron's default; also the number of threads that hash and write
_WRITE_BUFFER = 2**20
_WORTH_A_THREAD = 2**22  # bytes that are read in about the time that threads take to start


class GlobalTensor:
    """The local chunks of one global tensor, in the shape in which DCP's planners ask for them."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        first = chunks[0]
        for chunk in chunks:
            same = (chunk.global_shape, chunk.tensor.dtype) == (first.global_shape, first.tensor.dtype)
            assert same, f"chunks of {first.key} differ in global shape or dtype"
        self._chunks = {chunk.offset: chunk for chunk in chunks}
        assert len(self._chunks) == len(chunks), f"two chunks of {first.key} have one offset"
        self.dtype = first.tensor.dtype
        self._shape = torch.Size(first.global_shape)

    def size(self) -> torch.Size:
        return self._shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=chunk.tensor.shape)
            for offset, chunk in self._chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._chunks[tuple(index.offset)].tensor


def global_tensors(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Key -> `GlobalTensor`: what the planners below take."""
    return {key: GlobalTensor(parts) for key, parts in by_key(chunks).items()}


def encode_objects(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes to store for each object: a list of one element, as Megatron's `ShardedObject`s are.

    Raises:
        CheckpointError: an object holds a type that a load would refuse.
    """
    return {key: dump_bytes([value], key) for key, value in objects.items()}


# --- save ---------------------------------------------------------------------------------------------------------


class ChunkSavePlanner(dcp.DefaultSavePlanner):
    """Plans the writes of `GlobalTensor`s and objects; refuses a save that leaves a tensor incomplete."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _refuse_double_writes(all_plans)
        _refuse_gaps(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, GlobalTensor) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(object)  # encoded before the writer threads start
        return object


def _refuse_double_writes(plans: Sequence[SavePlan]) -> None:
    """DCP would write one of two equal boxes and never say that the ranks disagree about who holds it."""
    writer: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            other = writer.setdefault(item.index, rank)
            where = f" at {tuple(item.index.offset)}" if item.index.offset is not None else ""
            assert other == rank, f"{item.index.fqn}{where} is to be written by ranks {other} and {rank}"


def _refuse_gaps(plans: Sequence[SavePlan]) -> None:
    """What is not written would keep whatever a later load finds in memory."""
    held: dict[str, int] = {}
    whole: dict[str, int] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is not None and item.tensor_data.chunk is not None:
            key = item.index.fqn
            held[key] = held.get(key, 0) + volume(item.tensor_data.chunk.sizes)
            whole[key] = volume(item.tensor_data.size)
    for key, elements in whole.items():
        if held[key] != elements:
            raise CheckpointError(f"{key}: the chunks to save hold {held[key]} of {elements} elements")


class HashedFileSystem(FileSystem):
    """DCP's file system over files that are hashed in passing and on the disk when they are closed.

    Args:
        cancelled: ends all writing when it is set.
    """

    def __init__(self, cancelled: threading.Event) -> None:
        self.records: dict[str, FileRecord] = {}
        self._cancelled = cancelled

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        raw = HashedFile(Path(path), self._cancelled.is_set)
        with io.BufferedWriter(raw, _WRITE_BUFFER) as stream:
            try:
                yield stream
                stream.flush()
                if raw.failure is not None:
                    raise raw.failure
                os.fsync(raw.fileno())
            except BaseException as error:
                raw.abandon()
                if raw.failure is not None and error is not raw.failure:
                    raise raw.failure from error
                raise
        self.records[Path(path).name] = raw.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class HashedWriter(FileSystemWriter):
    """Writes a plan's items into two files per rank, each by a thread that hashes and writes."""

    def __init__(
        self, path: Path, rank: int = 0, checkpoint_name: str = "", cancelled: threading.Event | None = None
    ) -> None:
        super().__init__(path, sync_files=False, thread_count=_FILES_PER_RANK, overwrite=False)
        self.fs = HashedFileSystem(cancelled or threading.Event())
        self.save_id = SAVE_ID_PREFIX + self.save_id
        self._rank, self._checkpoint_name = rank, checkpoint_name

    @property
    def records(self) -> dict[str, FileRecord]:
        """Size and digest of each file written so far."""
        return cast(HashedFileSystem, self.fs).records

    def storage_meta(self) -> StorageMeta:
        # The default names the absolute, here temporary, path of the writer.
        return StorageMeta(checkpoint_id=self._checkpoint_name, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "a writer serves one checkpoint"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        buckets = [items for items in _balanced(plan.items, _FILES_PER_RANK) if items]
        names = [f"__{self._rank}_{i}.distcp" for i in range(len(buckets))]
        with ThreadPoolExecutor(_FILES_PER_RANK, thread_name_prefix="checkpoint-writer") as pool:
            written = pool.map(lambda name, items: self._write_file(name, items, planner), names, buckets)
            results = [result for file in written for result in file]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            return [_write_item(cast(Any, stream), item, planner.resolve_data(item), name) for item in items]


def _write_item(stream: io.BufferedWriter, item: WriteItem, data: Tensor | io.BytesIO, name: str) -> WriteResult:
    start = stream.tell()
    if isinstance(data, Tensor):
        write_tensor_entry(stream, data.detach().cpu())
    else:
        stream.write(data.getbuffer())
    length = stream.tell() - start
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length))


def _balanced(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Share items over `count` files of about equal size; objects first, since readers want them early."""
    buckets: list[list[WriteItem]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(items, key=_item_bytes):
        if item.type == WriteItemType.BYTE_IO:
            buckets[0].append(item)
    for item in sorted(items, key=_item_bytes, reverse=True):
        if item.type != WriteItemType.BYTE_IO:
            lightest = loads.index(min(loads))
            buckets[lightest].append(item)
            loads[lightest] += _item_bytes(item)
    return buckets


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None or item.tensor_data.chunk is None:
        return 0
    return volume(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What one rank wrote.

    Attributes:
        results: where each item is.
        records: the size and digest of each file.
        seconds: how long it took.
    """

    results: list[WriteResult]
    records: dict[str, FileRecord]
    seconds: float = 0.0


class RankWriter:
    """One rank's part in writing a checkpoint folder.

    Args:
        chunks: the tensors that this rank writes.
        objects: key -> what `encode_objects` made.
        rank: names its files.
        planner: gives the tensors to write; by default those of the chunks.

    Attributes:
        plan: what it writes, for `merged_metadata`.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        objects: Mapping[str, bytes],
        rank: int,
        planner: ChunkSavePlanner | None = None,
    ) -> None:
        self._rank, self._cancelled = rank, threading.Event()
        self._planner = planner or ChunkSavePlanner()
        self._planner.set_up_planner({**global_tensors(chunks), **objects}, is_coordinator=rank == 0)
        self.plan: SavePlan = self._planner.create_local_plan()

    def write(self, path: Path) -> Written:
        """Write the files of this rank into the folder `path`, durably.

        Raises:
            OSError: the disk refused.
            WritingCancelled: by `cancel`.
        """
        began = time.perf_counter()
        writer = HashedWriter(path, self._rank, cancelled=self._cancelled)
        results = writer.write_data(self.plan, self._planner).wait()
        return Written(results, writer.records, time.perf_counter() - began)

    def cancel(self) -> None:
        """Have `write`, in whatever thread it is, end soon."""
        self._cancelled.set()


def merged_metadata(plans: Sequence[SavePlan]) -> Metadata:
    """The table of contents of all ranks' plans, in the order of the ranks.

    Raises:
        CheckpointError: together they leave a tensor incomplete.
    """
    _, metadata = ChunkSavePlanner().create_global_plan(list(plans))
    return metadata


def write_metadata(
    path: Path, checkpoint_name: str, metadata: Metadata, written: Sequence[Written]
) -> dict[str, FileRecord]:
    """Write `.metadata`, durably, when the files of all ranks are there.

    Args:
        path: the folder.
        checkpoint_name: what it gives as the checkpoint's id.
        metadata: what `merged_metadata` made.
        written: by rank.

    Returns:
        File name -> size and digest of all the files so far.
    """
    writer = HashedWriter(path, checkpoint_name=checkpoint_name)
    writer.finish(metadata, [part.results for part in written])
    return {name: record for part in written for name, record in part.records.items()} | writer.records


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def plain_exceptions() -> Iterator[None]:
    """Raise the first cause instead of DCP's CheckpointException, which is a BaseException that `except` misses."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


# --- load ---------------------------------------------------------------------------------------------------------


class ChunkLoadPlanner(dcp.DefaultLoadPlanner):
    """Plans reads into `GlobalTensor`s in place, and reads objects with restricted unpickling."""

    def __init__(self, source: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Without the parent's pass that allocates meta tensors: it turns unknown classes into None.
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self._check_coverage(plan)
        return plan

    def _check_coverage(self, plan: LoadPlan) -> None:
        """Each chunk must be filled wholly: a gap would keep whatever the tensor held before."""
        filled: dict[tuple[str, Any], int] = {}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                index = (item.dest_index.fqn, item.dest_index.offset)
                filled[index] = filled.get(index, 0) + volume(item.lengths)
        for key, value in self.state_dict.items():
            if not isinstance(value, GlobalTensor):
                continue
            for chunk in value.__create_chunk_list__():
                got, want = filled.get((key, chunk.offsets), 0), volume(chunk.sizes)
                if got != want:
                    raise CheckpointError(f"{self._source}: {key} holds {got} of the {want} elements asked for")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return cast(GlobalTensor, self.state_dict[index.fqn]).__get_tensor_shard__(index)

    def transform_tensor(self, read_item: ReadItem, tensor: Tensor) -> Tensor:
        return _narrow(tensor, read_item.dest_offsets, read_item.lengths)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        source = f"{key} in {self._source}"
        wrapped = load_bytes(value, source)
        if not (isinstance(wrapped, list) and len(wrapped) == 1):
            raise CheckpointError(f"{source} is damaged: expected a list of one element")
        self.state_dict[key] = wrapped[0]


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        if (start, length) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, length)
    return tensor


class RestrictedReader(FileSystemReader):
    """Reads a checkpoint folder, each data file in a thread, tensors straight into their destination."""

    def __init__(self, path: Path, metadata: Metadata, through: ReadThrough) -> None:
        super().__init__(path)
        self._folder, self._metadata, self._through = path, metadata, through
        self._heads: Heads = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        # Objects first and here: torch's list of safe types is global, so threads must not share it.
        for name, items in per_file.items():
            self._read_objects(name, [item for item in items if item.type == LoadItemType.BYTE_IO], planner)
        tensors = [[item for item in items if item.type == LoadItemType.TENSOR] for items in per_file.values()]
        stored = sum(self.storage_data[item.storage_index].length for item in plan.items)
        if len(per_file) == 1 or stored < _WORTH_A_THREAD:  # conversions read tensor by tensor
            for name, items in zip(per_file, tensors, strict=True):
                self._read_tensors(name, items, planner)
        else:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checkpoint-reader") as pool:
                list(pool.map(lambda name, items: self._read_tensors(name, items, planner), per_file, tensors))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_objects(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        for item in items:
            info = self.storage_data[item.storage_index]
            with (self._folder / name).open("rb") as file:
                file.seek(info.offset)
                planner.load_bytes(item, io.BytesIO(file.read(info.length)))

    def _read_tensors(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        path = self._folder / name
        with path.open("rb", buffering=0) as file, self._through.reading(name, file.fileno()) as reading:
            for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                info = self.storage_data[item.storage_index]
                target = planner.resolve_tensor(item).detach()
                stored = self._stored(item.storage_index)
                whole = tuple(item.lengths) == stored
                try:
                    tensor = read_tensor_entry(
                        reading, info.offset, info.length, stored, target if whole else None, self._heads
                    )
                except (EOFError, ValueError) as error:
                    raise CheckpointError(f"{path} is damaged at {item.storage_index.fqn}: {error}") from error
                if tensor is not target:
                    target.copy_(_narrow(tensor, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)

    def _stored(self, index: MetadataIndex) -> tuple[int, ...]:
        """The shape of the stored chunk at an index."""
        chunks = self._metadata.state_dict_metadata[index.fqn].chunks  # type: ignore[union-attr]
        if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
            return tuple(chunks[index.index].sizes)
        return tuple(next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset))


def open_metadata(path: Path) -> Metadata:
    """Read `.metadata` of a checkpoint folder and check that what it points to can be there.

    Raises:
        CheckpointError: damaged, of a refused type, or pointing outside its folder or files.
    """
    metadata = read_metadata(path / METADATA_FILE)
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name != Path(name).name:
            raise CheckpointError(f"{path / METADATA_FILE} points outside its folder: {name!r}")
        if name not in sizes:
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            sizes[name] = file.stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise CheckpointError(
                f"{path / name} is truncated: {index.fqn} ends at byte {info.offset + info.length} of {sizes[name]}"
            )
    return metadata


def read_sharded(
    path: Path, metadata: Metadata, content: CheckpointContent, through: ReadThrough | None = None
) -> dict[str, Any]:
    """Fill the chunks of `content` in place and return the objects that it names.

    The caller has compared keys and shapes (`fit.fitted`).

    Args:
        path: the folder.
        metadata: what it holds.
        content: what to read.
        through: the files to hash in passing; none by default.

    Raises:
        CheckpointError: a file is damaged, or an object names a type that is not allowed.
    """
    state = {**global_tensors(content.chunks), **dict.fromkeys(content.objects)}
    with _without_single_process_warning(), plain_exceptions(), torch.no_grad():
        dcp.load(
            state,
            storage_reader=RestrictedReader(path, metadata, through or ReadThrough(path, {})),
            planner=ChunkLoadPlanner(str(path)),
            no_dist=True,
        )
    return {key: state[key] for key in content.objects}
