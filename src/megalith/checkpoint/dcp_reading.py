"""Reading a folder of `torch.distributed.checkpoint` (DCP) files, through its public classes.

What differs from DCP's defaults, and why:
- `.metadata` and objects are read by the restricted readers of `safe_loading`; a tensor is read straight into its
  destination where it fits, without torch's unpickler seeing the file;
- a tensor of the checkpoint that covers only part of what is asked is an error, not a half-filled tensor.

A load needs no coordination at all: each rank plans and reads for itself.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.futures import Future

from megalith.checkpoint.content import CheckpointContent, volume
from megalith.checkpoint.dcp_tensors import (
    METADATA_FILE,
    GlobalTensor,
    global_tensors,
    plain_exceptions,
    single_process,
)
from megalith.checkpoint.hashed_reading import ReadThrough
from megalith.checkpoint.safe_loading import load_bytes, read_metadata
from megalith.checkpoint.tensor_entry import Heads, read_tensor_entry
from megalith.errors import CheckpointError

_WORTH_A_THREAD = 2**22  # bytes that are read in about the time that threads take to start


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
    with single_process(), plain_exceptions(), torch.no_grad():
        dcp.load(
            state,
            storage_reader=RestrictedReader(path, metadata, through or ReadThrough(path, {})),
            planner=ChunkLoadPlanner(str(path)),
            no_dist=True,
        )
    return {key: state[key] for key in content.objects}
