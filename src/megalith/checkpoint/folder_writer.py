"""One rank's part in writing a folder: the ports `FolderWriter` and `SharedFiles`, and the two formats.

    torch_dist    each rank writes files of its own and hashes them in passing (`dcp`)
    torch         the ranks write into files together, which are hashed when all are done (`formats.per_rank`)

The order of the calls, and what the ranks tell each other between them, is `saving`'s business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megalith.checkpoint import manifest as manifests
from megalith.checkpoint.commit import check_space, write_durably
from megalith.checkpoint.content import CheckpointContent, renamed, volume
from megalith.checkpoint.dcp_writing import RankWriter, Written, merged_metadata
from megalith.checkpoint.folder import EncodedContent, check_further_files, finish_folder
from megalith.checkpoint.formats.per_rank import FilesOnDisk
from megalith.checkpoint.formats.per_rank_layout import target_of
from megalith.checkpoint.hashing import hash_files
from megalith.checkpoint.manifest import MANIFEST_FILE
from megalith.errors import CheckpointError
from megalith.layout import Layout


class SharedFiles(Protocol):
    """Files that several ranks write into: all lay out before any writes, and all have written before any seals."""

    def lay_out(self, path: Path) -> None:
        """Make those files of the folder that this rank makes for others too."""
        ...

    def seal(self, path: Path) -> Written:
        """Complete and hash the files that this rank laid out."""
        ...


class FolderWriter(Protocol):
    """What one rank does for a checkpoint folder, in the order of the methods."""

    @property
    def shared(self) -> SharedFiles | None:
        """What is to be done before and after `write` where ranks write into files together."""
        ...

    @property
    def plan(self) -> Any:
        """What the first rank must know of it before; it is pickled."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the disk, rounded up."""
        ...

    def merge(self, plans: Sequence[Any]) -> None:
        """On the first rank: take the plans of all.

        Raises:
            CheckpointError: together they leave a tensor incomplete.
        """
        ...

    def write(self, path: Path) -> Written:
        """Write the tensors of this rank, durably."""
        ...

    def cancel(self) -> None:
        """Have `write`, in whatever thread it is, end soon."""
        ...

    def finish(self, path: Path, name: str, written: Sequence[Written], facts: Mapping[str, Any]) -> int:
        """On the first rank: write, durably, what makes a checkpoint of the folder.

        Args:
            path: the folder, under whatever temporary name.
            name: its name when it is in its place.
            written: what each rank wrote.
            facts: what the manifest says beside sizes and hashes.

        Returns:
            Bytes of all the files but the manifest.
        """
        ...


MakeWriter = Callable[[CheckpointContent, Mapping[str, bytes], int], FolderWriter]
"""Makes a writer of the content, the further files and the rank."""


class TorchDistWriter:
    """Of format torch_dist; each rank writes files of its own.

    Args:
        content: what this rank writes; the common state counts on the first rank only.
        files: further files of the first rank, name -> bytes.
        rank: of this process.
    """

    shared = None

    def __init__(self, content: CheckpointContent, files: Mapping[str, bytes], rank: int) -> None:
        self._encoded = EncodedContent(content, files, rank=rank)
        self._writer = RankWriter(renamed(content.chunks, content.written_as), self._encoded.objects, rank)
        self._metadata: Metadata

    @property
    def plan(self) -> Any:
        return self._writer.plan

    @property
    def nbytes(self) -> int:
        return self._encoded.nbytes

    def merge(self, plans: Sequence[Any]) -> None:
        self._metadata = merged_metadata(plans)

    def write(self, path: Path) -> Written:
        check_space(path.parent, self.nbytes)  # on this host too, before its first byte
        return self._writer.write(path)

    def cancel(self) -> None:
        self._writer.cancel()

    def finish(self, path: Path, name: str, written: Sequence[Written], facts: Mapping[str, Any]) -> int:
        return finish_folder(path, name, self._encoded, self._metadata, written, facts)


class PerRankWriter:
    """Of format torch: the first of the replicas of each (tensor, pipeline, expert) place lays out its files.

    Args:
        content: what this rank writes. The common state is that of any rank, the objects those of its place.
        files: further files of the first rank, name -> bytes.
        rank: of this process.
        layout: of all ranks.

    Raises:
        CheckpointError: the saved args describe no model that this version has.
    """

    def __init__(self, content: CheckpointContent, files: Mapping[str, bytes], rank: int, layout: Layout) -> None:
        check_further_files(files)
        place = layout.coordinates(rank)
        dtype = getattr(torch, str(vars(content.common["args"])["params_dtype"]).removeprefix("torch."))
        self._target = target_of(content.common, content.objects, dtype, "the checkpoint to save")
        alike = next(ranks for ranks in layout.groups("cp", "dp") if rank in ranks)
        copy = alike.index(rank)  # the first ones of these have all the experts, in order
        self._place = (place["tp"], place["pp"], copy) if copy < layout.ep else None
        self._chunks, self._files = content.chunks, dict(files) if rank == 0 else {}
        self._cancelled = threading.Event()
        self._seconds = 0.0

    @property
    def shared(self) -> SharedFiles:
        return self

    @property
    def plan(self) -> Any:
        """Key -> elements that this rank holds of it."""
        held: dict[str, int] = {}
        for chunk in self._chunks:
            held[chunk.key] = held.get(chunk.key, 0) + chunk.tensor.numel()
        return held

    @property
    def nbytes(self) -> int:
        own = FilesOnDisk(self._target, Path()).nbytes(self._place) if self._place is not None else 0
        return own + sum(map(len, self._files.values()))

    def merge(self, plans: Sequence[Any]) -> None:
        for key, shape in {chunk.key: chunk.global_shape for chunk in self._target.chunks()}.items():
            held, wanted = sum(plan.get(key, 0) for plan in plans), volume(shape)
            if held != wanted:
                raise CheckpointError(f"{key}: the chunks to save hold {held} of {wanted} elements")

    def lay_out(self, path: Path) -> None:
        if self._place is not None:
            FilesOnDisk(self._target, path).lay_out(self._place)

    def write(self, path: Path) -> Written:
        began = time.perf_counter()
        FilesOnDisk(self._target, path).fill(self._chunks, self._cancelled.is_set)
        self._seconds = time.perf_counter() - began
        return Written([], {}, self._seconds)

    def seal(self, path: Path) -> Written:
        if self._place is None:
            return Written([], {}, self._seconds)
        began, files = time.perf_counter(), FilesOnDisk(self._target, path)
        files.seal(self._place)
        records = hash_files([path / name for name in files.files(self._place)], below=path)
        return Written([], records, self._seconds + time.perf_counter() - began)

    def cancel(self) -> None:
        self._cancelled.set()

    def finish(self, path: Path, name: str, written: Sequence[Written], facts: Mapping[str, Any]) -> int:
        records = {file: record for part in written for file, record in part.records.items()}
        for file, data in self._files.items():
            write_durably(path / file, data)
        records |= hash_files([path / file for file in self._files], threads=1)
        write_durably(path / MANIFEST_FILE, manifests.render(records, facts))
        return sum(record.size for record in records.values())
