"""Writing a folder of `torch.distributed.checkpoint` (DCP) files, through its public classes.

What differs from DCP's defaults, and why:
- a chunk's place in its global tensor is taken from `Chunk`, so stacked layers and gate/up halves need no copy;
- objects are written as one-element lists, which is how Megatron stores its `ShardedObject`s;
- tensors go from memory to the file as they are (`tensor_entry`), in the form that `torch.save` gives them;
- every file is hashed while it is written (`hashing`), and errors of the writer threads are never lost.

Rank r writes `__r_0.distcp` and `__r_1.distcp`. DCP's own coordination is not used, since an error on one of its ranks
leaves the others waiting: each rank plans (`RankWriter`), the first one merges the plans (`merged_metadata`), each
writes, and the first one writes `.metadata` (`write_metadata`). Who gathers what in between is `crew`'s business.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megalith.checkpoint.content import Chunk, volume
from megalith.checkpoint.dcp_tensors import SAVE_ID_PREFIX, GlobalTensor, global_tensors
from megalith.checkpoint.hashing import FileRecord, HashedFile
from megalith.checkpoint.safe_loading import dump_bytes
from megalith.checkpoint.tensor_entry import write_tensor_entry
from megalith.errors import CheckpointError

_FILES_PER_RANK = 2  # Megatron's default; also the number of threads that hash and write
_WRITE_BUFFER = 2**20


def encode_objects(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes to store for each object: a list of one element, as Megatron's `ShardedObject`s are.

    Raises:
        CheckpointError: an object holds a type that a load would refuse.
    """
    return {key: dump_bytes([value], key) for key, value in objects.items()}


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
