"""Checkpoint folders: writing one of format torch_dist, checking and reading one of any format.

    .metadata  __<rank>_<0 or 1>.distcp      tensors and objects (DCP)
    common.pt                                the state that all ranks share
    metadata.json                            names the format, for Megatron
    <other files>                            such as the tokenizer's, so that the folder can be used alone
    manifest.json                            size and hash of all the others; written last

`store` names and commits folders; `sources` read the files of other formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent, balanced, renamed
from megalith.checkpoint.files import manifest as manifests
from megalith.checkpoint.files.commit import check_space, write_durably
from megalith.checkpoint.files.dcp import (
    METADATA_FILE,
    RankWriter,
    RankWriteResult,
    encode_objects,
    merged_metadata,
    write_metadata,
)
from megalith.checkpoint.files.hashing import FileRecord, HashingReader, hash_files
from megalith.checkpoint.files.manifest import MANIFEST_FILE
from megalith.checkpoint.files.safe_loading import dump_bytes
from megalith.checkpoint.sources.source import Source, damaged, fitted, open_source
from megalith.checkpoint.sources.torch_dist import COMMON_FILE, FORMAT_FILE, TorchDistSource
from megalith.errors import CheckpointError, NewerFormatError, OtherModelError
from megalith.progress import task

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_OWN_FILES = {METADATA_FILE, COMMON_FILE, FORMAT_FILE, MANIFEST_FILE}


Signature = tuple[tuple[str, int, int], ...]


def check_further_files(names: Collection[str]) -> None:
    """Check that files of these names can lie in a checkpoint folder."""
    for name in names:
        plain = name == Path(name).name and not name.startswith((".", "__", "mp_rank_")) and name not in _OWN_FILES
        assert plain, f"{name!r} is not a name for a further file of a checkpoint"


def finish_folder(
    path: Path, records: Mapping[str, FileRecord], files: Mapping[str, bytes], manifest_fields: Mapping[str, Any]
) -> int:
    """Write, durably, what makes a checkpoint of a folder in which all ranks' tensors and objects are.

    `manifest_fields` are entries besides sizes and hashes. Returns the bytes of all the files but the manifest.
    """
    for name, data in files.items():
        write_durably(path / name, data)
    found = {**records, **hash_files([path / name for name in files], threads=1)}
    write_durably(path / MANIFEST_FILE, manifests.render(found, manifest_fields))
    return sum(record.size for record in found.values())


class TorchDistWriter(RankWriter):
    """Writer of one rank's files of a torch_dist folder, which are hashed while they are written.

    `store.saving` calls its methods and communicates between them. Only the first rank writes the common state and
    additional files. `nbytes` is an upper bound of the bytes on disk.
    """

    # Bytes of a torch archive and of the metadata around one tensor: measured 1,280 and six times its key.
    _ENTRY_OVERHEAD, _KEYS_WRITTEN = 1408, 6
    _FIXED_OVERHEAD = 2**17  # the manifest, and what each file takes of its last block

    def __init__(
        self,
        content: CheckpointContent,
        files: Mapping[str, bytes],
        rank: int,
        tensor_of: Callable[[Chunk], Tensor] = lambda chunk: chunk.tensor,
    ) -> None:
        check_further_files(files)
        objects = encode_objects(content.objects)
        self._named_files = {
            COMMON_FILE: dump_bytes(content.common, "the common state") if rank == 0 else b"",
            FORMAT_FILE: json.dumps(_FORMAT).encode("ascii"),
            **(files if rank == 0 else {}),
        }
        super().__init__(renamed(content.chunks, content.written_as), objects, rank, tensor_of)
        self._metadata: Metadata
        entries = sum(self._ENTRY_OVERHEAD + self._KEYS_WRITTEN * len(item.index.fqn) for item in self.plan.items)
        others = sum(map(len, objects.values())) + sum(map(len, self._named_files.values()))
        self.nbytes = content.nbytes + others + entries + self._FIXED_OVERHEAD

    def merge(self, plans: Sequence[Any]) -> None:
        """Merge the plans of all ranks; on the first rank only."""
        self._metadata = merged_metadata(plans)

    def write(self, path: Path) -> RankWriteResult:
        check_space(path.parent, self.nbytes)  # on this host too, before its first byte
        return super().write(path)

    def finish(
        self, path: Path, name: str, results: Sequence[RankWriteResult], manifest_fields: Mapping[str, Any]
    ) -> int:
        """Complete the folder (`finish_folder`), whose name in its place is `name`; on the first rank only."""
        records = write_metadata(path, name, self._metadata, results)
        return finish_folder(path, records, self._named_files, manifest_fields)


class CheckpointFolder:
    """A finished checkpoint folder of any format, for reading. A NewerFormatError if a later version wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: Source = open_source(path)

    def open(self, content: CheckpointContent, requested: Collection[str]) -> PlannedLoad:
        """Check that the checkpoint fits `content` and plan the load; `requested` are the keys of all ranks."""
        stored = self.source.contents()
        found = fitted(str(self.path), stored, content, requested)
        return PlannedLoad(self.source, found, self.source.common(), stored.unrequested(requested))

    def manifest(self) -> dict[str, Any] | None:
        """Read the manifest; None for a checkpoint of another program."""
        return manifests.read(self.path)

    def read_file(self, name: str) -> bytes:
        """Read a further file that was saved with the checkpoint."""
        try:
            return (self.path / Path(name).name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def sizes(self) -> dict[str, int]:
        """Return file name, below the folder -> bytes."""
        return {str(path.relative_to(self.path)): path.stat().st_size for path in _files(self.path)}

    def signature(self) -> Signature:
        """Return name, size and time of change of each file: a value that changes when any file does."""
        status = [(str(path.relative_to(self.path)), path.stat()) for path in _files(self.path)]
        return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in status))

    def problems(self, part: int = 0, parts: int = 1, *, deferred: bool = False) -> list[str]:
        """List all problems: by the manifest's hashes, or without a manifest by the structure alone.

        The files are divided into `parts`, of which this call hashes one; structural problems are listed by each.
        `deferred` leaves the hashes of `read_through` to the load. Raises NewerFormatError for a later version,
        OtherModelError for a model of another kind.
        """
        try:
            body = self.manifest()
            if body is None:
                with task("verifying the checkpoint"):
                    return (self.source.problems() if part == 0 else []) or self.source.changed(part, parts)
            records = manifests.records_of(body)
            if not deferred:
                return manifests.compare(self.path, _share(records, part, parts))
            later = self.read_through()
            now = {name: record for name, record in records.items() if name not in later}
            return manifests.missing(self.path, body) + manifests.compare(self.path, _share(now, part, parts))
        except (NewerFormatError, OtherModelError):
            raise
        except CheckpointError as error:
            return [str(error)]

    def read_through(self, part: int = 0, parts: int = 1) -> dict[str, FileRecord]:
        """Return the files of rank `part` of `parts` whose hashes a load can compare; none without a manifest."""
        body = self.manifest()
        if body is None or not isinstance(self.source, TorchDistSource):
            return {}
        found = ((_DATA_FILE.fullmatch(name), name, record) for name, record in manifests.records_of(body).items())
        return {name: record for match, name, record in found if match and int(match[1]) % parts == part}


def open_verified(path: Path) -> CheckpointFolder:
    """Open a checkpoint folder for reading; a DamagedCheckpointError names all problems of its files."""
    folder = CheckpointFolder(path)
    if problems := folder.problems():
        raise damaged(path, problems)
    return folder


@dataclass(frozen=True)
class PlannedLoad:
    """Load that was checked to fit the checkpoint; no tensor is filled yet."""

    source: Source
    content: CheckpointContent
    common: dict[str, Any]
    unexpected: tuple[str, ...]

    def load(self, expected: Mapping[str, FileRecord]) -> LoadedContent:
        """Fill the tensors in place, comparing the files of `CheckpointFolder.read_through` with their hashes, and read
        the objects. If a file proves damaged, the tensors hold nothing that may be used.
        """
        if not expected:
            return LoadedContent(self.common, self.source.read(self.content), self.unexpected)
        assert isinstance(self.source, TorchDistSource)
        through = HashingReader(self.source.path, expected)
        try:
            objects = self.source.read(self.content, through)
            problems = through.problems()
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.source.path} cannot be read: {error}") from error
        if problems:
            raise damaged(self.source.path, problems)
        return LoadedContent(self.common, objects, self.unexpected)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _share(records: Mapping[str, FileRecord], part: int, parts: int) -> dict[str, FileRecord]:
    """Return share `part` of `parts` of the files, of about equal bytes, so that each rank hashes one."""
    names, share = list(records), balanced([record.size + 1 for record in records.values()], parts)[part]
    return {names[number]: records[names[number]] for number in sorted(share)}
