"""Folders of `torch.distributed.checkpoint` (DCP) files: writing the files of a rank, and reading any box of a tensor.

DCP's format is used, and its table of contents (`Metadata`) is planned and written by its public classes. Its own save
and load are not:
- a chunk's place in its global tensor is taken from `Chunk`, so stacked layers and gate/up halves need no copy;
- objects are written as one-element lists, which is how Megatron stores its `ShardedObject`s, and are read, like
  `.metadata`, by the restricted readers of `safe_loading`;
- tensors go between memory and the file as they are (`torch_archive`), in the form that `torch.save` gives them, and
  every file is hashed while it is written or read (`hashing`);
- a tensor of the checkpoint that covers only part of what is asked is an error, not a half-filled tensor;
- an error on one of DCP's ranks leaves the others waiting: here each rank plans (`RankWriter`), the first one merges
  the plans (`merged_metadata`), each writes, and the first one writes `.metadata` (`write_metadata`). Who gathers what
  in between is `rank_group`'s business. A load needs no coordination: each rank reads for itself.

Rank r writes `__r_0.distcp` and `__r_1.distcp`.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megalith.checkpoint.content import (
    CheckpointContent,
    Chunk,
    balanced,
    by_key,
    check_filled,
    overlap,
    view_of,
    volume,
)
from megalith.checkpoint.files.hashing import FileRecord, HashedFile, HashingReader, hash_files
from megalith.checkpoint.files.safe_loading import dump_bytes, load_bytes, read_metadata
from megalith.checkpoint.files.torch_archive import HeaderCache, read_tensor_entry, write_tensor_entry
from megalith.checkpoint.files.torch_internals import StorageInfo
from megalith.errors import CheckpointError

METADATA_FILE = ".metadata"
SAVE_ID_PREFIX = "megalith-"
"""Marks `.metadata` files written here: such a checkpoint has a manifest, or is damaged."""

_FILES_PER_RANK = 2  # Megatron's default; also the number of threads that hash and write
_WRITE_BUFFER = 2**20
_WORTH_A_THREAD = 2**22  # bytes that are read in about the time that threads take to start


# --- writing ----------------------------------------------------------------------------------------------------------


def encode_objects(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """Serialise each object as a list of one element, as Megatron's `ShardedObject`s are."""
    return {key: dump_bytes([value], key) for key, value in objects.items()}


@dataclass(frozen=True)
class RankWriteResult:
    """Storage entries and file records of one rank's files."""

    results: list[WriteResult]  # where each item is
    records: dict[str, FileRecord]  # the size and digest of each file
    seconds: float = 0.0  # how long it took


class RankWriter:
    """One rank's part in writing a checkpoint folder; `plan` says what it writes, for `merged_metadata`.

    Args:
        objects: key -> what `encode_objects` made.
        tensor_of: returns the elements of a chunk when its turn comes, called by several threads.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        objects: Mapping[str, bytes],
        rank: int,
        tensor_of: Callable[[Chunk], Tensor] = lambda chunk: chunk.tensor,
    ) -> None:
        self._rank, self._tensor_of, self._cancelled = rank, tensor_of, threading.Event()
        self._parts: dict[MetadataIndex, Chunk | bytes] = {
            **{MetadataIndex(chunk.key, chunk.offset): chunk for chunk in chunks},
            **{MetadataIndex(key): data for key, data in objects.items()},
        }
        assert len(self._parts) == len(chunks) + len(objects), "two chunks of a tensor have one offset"
        self.plan = SavePlan([_write_item(index, part) for index, part in self._parts.items()])

    def write(self, path: Path) -> RankWriteResult:
        """Write the files of this rank into the folder `path`, durably. Raises WritingCancelled after `cancel`."""
        began = time.perf_counter()
        files = {f"__{self._rank}_{number}.distcp": part for number, part in enumerate(self._files())}
        with ThreadPoolExecutor(_FILES_PER_RANK, thread_name_prefix="checkpoint-writer") as pool:
            written = list(pool.map(lambda name: self._write_file(path / name, files[name]), files))
        results = [result for file, _ in written for result in file]
        records = {name: record for name, (_, record) in zip(files, written, strict=True)}
        return RankWriteResult(results, records, time.perf_counter() - began)

    def cancel(self) -> None:
        """Make `write`, in any thread, end soon."""
        self._cancelled.set()

    def _files(self) -> list[list[MetadataIndex]]:
        """Return the items of each file; objects in the first and before tensors, since readers want them early."""
        objects = [index for index, part in self._parts.items() if isinstance(part, bytes)]
        tensors = {index: part for index, part in self._parts.items() if isinstance(part, Chunk)}
        indices = list(tensors)
        shares = balanced([chunk.nbytes for chunk in tensors.values()], _FILES_PER_RANK)
        files = [[indices[number] for number in share] for share in shares]
        return [file for file in ([*objects, *files[0]], *files[1:]) if file]

    def _write_file(self, path: Path, indices: Sequence[MetadataIndex]) -> tuple[list[WriteResult], FileRecord]:
        results, raw = [], HashedFile(path, self._cancelled.is_set)
        with _durable_stream(raw) as stream:
            for index in indices:
                start, part = stream.tell(), self._parts[index]
                if isinstance(part, Chunk):
                    write_tensor_entry(stream, self._tensor_of(part).detach().cpu())
                else:
                    stream.write(part)
                length = stream.tell() - start
                info = StorageInfo(path.name, start, length)
                results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))
        return results, raw.record()


def _write_item(index: MetadataIndex, part: Chunk | bytes) -> WriteItem:
    if isinstance(part, bytes):
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=part.tensor.shape),
        properties=TensorProperties(dtype=part.tensor.dtype),
        size=torch.Size(part.global_shape),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


@contextmanager
def _durable_stream(raw: HashedFile) -> Iterator[io.BufferedWriter]:
    """Open a buffer over a file, which is synced at the end; errors of the disk are raised as themselves."""
    with io.BufferedWriter(raw, _WRITE_BUFFER) as stream:
        try:
            yield cast(io.BufferedWriter, stream)
            stream.flush()
            if raw.failure is not None:
                raise raw.failure
            os.fsync(raw.fileno())
        except BaseException as error:
            raw.abandon()
            if raw.failure is not None and error is not raw.failure:
                raise raw.failure from error
            raise


def merged_metadata(plans: Sequence[SavePlan]) -> Metadata:
    """Merge the plans of all ranks, in rank order, into the table of contents."""
    _refuse_double_writes(plans)
    _refuse_gaps(plans)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan(list(plans))[1]


def _refuse_double_writes(plans: Sequence[SavePlan]) -> None:
    """Assert that no two ranks write one box: DCP would drop one and never say that the ranks disagree."""
    writer: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            other = writer.setdefault(item.index, rank)
            where = f" at {tuple(item.index.offset)}" if item.index.offset is not None else ""
            assert other == rank, f"{item.index.fqn}{where} is to be written by ranks {other} and {rank}"


def _refuse_gaps(plans: Sequence[SavePlan]) -> None:
    """Refuse plans that leave elements unwritten, which a load would leave as they are in memory."""
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


class _MetadataWriter(FileSystemWriter):
    """DCP's writer of `.metadata`, whose default is to name the absolute, here temporary, path as the checkpoint."""

    def __init__(self, path: Path, checkpoint_name: str) -> None:
        super().__init__(path, sync_files=True)
        self._checkpoint_name = checkpoint_name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._checkpoint_name, save_id=SAVE_ID_PREFIX + self.save_id)


def write_metadata(
    path: Path, checkpoint_name: str, metadata: Metadata, written: Sequence[RankWriteResult]
) -> dict[str, FileRecord]:
    """Write `.metadata` durably, after the files of all ranks; return the records of all files so far."""
    _MetadataWriter(path, checkpoint_name).finish(metadata, [part.results for part in written])
    records = {name: record for part in written for name, record in part.records.items()}
    return records | hash_files([path / METADATA_FILE], threads=1)


# --- reading ----------------------------------------------------------------------------------------------------------


def open_metadata(path: Path) -> Metadata:
    """Read `.metadata` of a checkpoint folder and check that what it points to can be there."""
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


@dataclass(frozen=True)
class _Read:
    """A box of a stored tensor that goes to a box of a wanted one."""

    key: str  # of the tensor
    place: StorageInfo  # the entry in its file
    shape: tuple[int, ...]  # of the whole entry
    start: tuple[int, ...]  # of the box in the entry
    target: Tensor  # a view of the tensor to fill, of the shape of the box


@torch.no_grad()
def read_sharded(
    path: Path, metadata: Metadata, content: CheckpointContent, through: HashingReader | None = None
) -> dict[str, Any]:
    """Fill the chunks of `content`, which `source.fitted` has checked, and return its objects."""
    # Objects first and here: torch's list of safe types is global, so threads must not share it.
    objects = {key: _read_object(path, metadata, key) for key in content.objects}
    through = through or HashingReader(path, {})
    header_cache: HeaderCache = {}
    by_file: dict[str, list[_Read]] = {}
    for parts in by_key(content.chunks).values():
        for read in _reads(path, metadata, parts):
            by_file.setdefault(read.place.relative_path, []).append(read)
    stored = sum(read.place.length for reads in by_file.values() for read in reads)
    if len(by_file) <= 1 or stored < _WORTH_A_THREAD:  # conversions read tensor by tensor
        for name, reads in by_file.items():
            _read_file(path / name, reads, through, header_cache)
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checkpoint-reader") as pool:
            list(pool.map(lambda name: _read_file(path / name, by_file[name], through, header_cache), by_file))
    return objects


def _place_of(path: Path, metadata: Metadata, index: MetadataIndex) -> StorageInfo:
    found = metadata.storage_data.get(index)
    if found is None:
        raise CheckpointError(f"{path / METADATA_FILE} is damaged: it does not say where {index.fqn} is")
    return cast(StorageInfo, found)


def _read_object(path: Path, metadata: Metadata, key: str) -> Any:
    info, source = _place_of(path, metadata, MetadataIndex(key)), f"{key} in {path}"
    with (path / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        wrapped = load_bytes(io.BytesIO(file.read(info.length)), source)
    if not (isinstance(wrapped, list) and len(wrapped) == 1):
        raise CheckpointError(f"{source} is damaged: expected a list of one element")
    return wrapped[0]


def _reads(path: Path, metadata: Metadata, wanted: Sequence[Chunk]) -> Iterator[_Read]:
    """Yield the reads that fill the chunks of one key; a CheckpointError if they leave a gap."""
    held = cast(TensorStorageMetadata, metadata.state_dict_metadata[wanted[0].key]).chunks
    at = {tuple(stored.offsets): stored for stored in held}
    for chunk in wanted:
        alike, filled = at.get(chunk.offset), 0
        exact = alike is not None and alike.sizes == chunk.tensor.shape  # stored in the same layout: the usual case
        for stored in [alike] if alike is not None and exact else held:
            if (box := overlap(stored.offsets, stored.sizes, chunk.offset, chunk.tensor.shape)) is not None:
                place = _place_of(path, metadata, MetadataIndex(chunk.key, stored.offsets))
                start = tuple(low - begin for (low, _), begin in zip(box, stored.offsets, strict=True))
                target = view_of(chunk, box).detach()
                filled += target.numel()
                yield _Read(chunk.key, place, tuple(stored.sizes), start, target)
        check_filled(str(path), chunk, filled)


def _read_file(path: Path, reads: Sequence[_Read], through: HashingReader, header_cache: HeaderCache) -> None:
    """Read from one file in ascending order, straight into the destination where a whole entry goes there."""
    with path.open("rb", buffering=0) as file, through.reading(path.name, file.fileno()) as reading:
        for read in sorted(reads, key=lambda read: read.place.offset):
            whole = read.shape == tuple(read.target.shape)
            target = read.target if whole else None
            try:
                tensor = read_tensor_entry(
                    reading, read.place.offset, read.place.length, read.shape, target, header_cache
                )
            except (EOFError, ValueError) as error:
                raise CheckpointError(f"{path} is damaged at {read.key}: {error}") from error
            if tensor is not read.target:
                box = tuple(slice(a, a + size) for a, size in zip(read.start, read.target.shape, strict=True))
                read.target.copy_(tensor[box])
