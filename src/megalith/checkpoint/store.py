"""Where checkpoints live: the `Store` port, a directory on a disk, and a double in memory.

A save is visible only when it is complete and durable; a load fills the given tensors in place after it has checked
every file against the manifest. Neither ever changes a checkpoint that is there. A damaged checkpoint is found, named
and passed over in favour of the newest sound one.

Which checkpoints to keep, saving in the background and other formats are not decided here.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import megalith
from megalith.checkpoint import manifest as manifests
from megalith.checkpoint.commit import (
    building,
    check_space,
    clear_leftovers,
    naming_full_disk,
    no_point,
    put_back_replaced,
    replace_durably,
    write_durably,
)
from megalith.checkpoint.content import CheckpointContent, LoadedContent, by_key, volume
from megalith.checkpoint.dcp import (
    SAVE_ID_PREFIX,
    encode_objects,
    open_metadata,
    read_sharded,
    write_sharded,
)
from megalith.checkpoint.formats.torch_dist import is_extra_state
from megalith.checkpoint.hashing import FileRecord, hash_files
from megalith.checkpoint.owner import claim
from megalith.checkpoint.safe_loading import dump_bytes, load_bytes, load_tensors_and_plain_data
from megalith.errors import CheckpointError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
SAVE_POINTS = ("pre_save", "mid_save", "pre_commit", "mid_commit", "post_commit")
"""Where a save calls `on_point`: before the first byte, with the tensors written, before the rename, between the rename
and the tracker, and at the end."""

_ITERATION = re.compile(r"iter_(\d{7,})")
_ENTRY_OVERHEAD = 2048  # bytes of a torch archive and of the metadata around one tensor
_FIXED_OVERHEAD = 2**20


@dataclass(frozen=True)
class SaveReport:
    """What a save did: its wall time, the bytes of all its files, and where it is (None in memory)."""

    seconds: float
    bytes: int
    path: Path | None


@dataclass(frozen=True)
class StoredTensor:
    """Global shape and dtype of a tensor in a checkpoint, and in how many chunks it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int = 1


@dataclass(frozen=True)
class Contents:
    """The table of contents of a checkpoint."""

    tensors: dict[str, StoredTensor]
    objects: frozenset[str]


class Store(Protocol):
    """Keeps checkpoints under their iteration numbers."""

    def save(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        on_point: Callable[[str], None] = no_point,
    ) -> SaveReport:
        """Write a checkpoint and point the tracker to it.

        Args:
            iteration: its number.
            content: tensors, objects and common state.
            manifest: facts for people and for later runs.
            files: further files to lay beside these, name -> bytes; they are hashed like all others.
            on_point: called at each of `SAVE_POINTS`.

        Raises:
            CheckpointError: it could not be written; what was there before is untouched.
        """
        ...

    def load(self, iteration: int, content: CheckpointContent, *, verify: bool = True) -> LoadedContent:
        """Fill the tensors of `content` in place; read its objects and the common state.

        Args:
            iteration: which checkpoint.
            content: tensors to fill and names of objects to read.
            verify: compare every file with the manifest's hashes first.

        Raises:
            CheckpointError: damaged, or it does not fit; then no tensor has been touched.
        """
        ...

    def contents(self, iteration: int) -> Contents:
        """What a checkpoint holds, without reading the tensors."""
        ...

    def common(self, iteration: int) -> dict[str, Any]:
        """The common state alone."""
        ...

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        """The manifest, or None for a checkpoint of another program."""
        ...

    def iterations(self) -> list[int]:
        """All the checkpoints that are there, ascending, sound or not."""
        ...

    def latest(self) -> int | None:
        """What the tracker says, or None if there is none or it is not a number."""
        ...

    def verify(self, iteration: int) -> list[str]:
        """Everything that is wrong with a checkpoint; empty if it is sound."""
        ...

    def newest_verified(self) -> tuple[int | None, list[str]]:
        """The checkpoint to continue from, and what the user must hear about the way there.

        It is the tracker's if sound, else the newest sound one before it, else any sound one.
        """
        ...

    def claim(self) -> AbstractContextManager[None]:
        """Hold the store for this run, so that no second run saves into it."""
        ...


class DirectoryStore:
    """A save folder in Megatron's layout: `iter_%07d/` of format torch_dist, and the tracker file.

    Args:
        path: the save folder; it is made by the first save.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._sound: dict[int, tuple[tuple[str, int, int], ...]] = {}

    def folder(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration is or would be."""
        return self.path / f"iter_{iteration:07d}"

    def claim(self) -> AbstractContextManager[None]:
        return claim(self.path)

    # --- save

    def save(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        on_point: Callable[[str], None] = no_point,
    ) -> SaveReport:
        started = time.perf_counter()
        final = self.folder(iteration)
        rest = {
            COMMON_FILE: dump_bytes(content.common, "the common state"),
            FORMAT_FILE: json.dumps(FORMAT).encode("ascii"),
            **(files or {}),
        }
        objects = encode_objects(content.objects)
        needed = _bytes_to_write(content, objects, sum(map(len, rest.values())))
        on_point("pre_save")
        with naming_full_disk(self.path, needed):
            self.path.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.path)
            check_space(self.path, needed)
            with building(final) as new:
                records = write_sharded(new.path, content.chunks, objects, final.name)
                on_point("mid_save")
                records |= self._write_rest(new.path, rest)
                facts = {"iteration": iteration, **_provenance(), **manifest}
                write_durably(new.path / manifests.MANIFEST_FILE, manifests.render(records, facts))
                on_point("pre_commit")
                new.commit()
            self._sound.pop(iteration, None)
            on_point("mid_commit")
            replace_durably(self.path / TRACKER_FILE, str(iteration).encode("ascii"))
        on_point("post_commit")
        return SaveReport(time.perf_counter() - started, sum(record.size for record in records.values()), final)

    def _write_rest(self, folder: Path, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
        for name, data in files.items():
            write_durably(folder / name, data)
        return hash_files([folder / name for name in files], threads=1)

    # --- load

    def load(self, iteration: int, content: CheckpointContent, *, verify: bool = True) -> LoadedContent:
        folder = self._existing(iteration)
        if verify and (problems := self.verify(iteration)):
            raise CheckpointError(_listing(f"{folder} is damaged", problems))
        metadata = open_metadata(folder)
        stored = _contents(metadata)
        _check_fit(str(folder), stored, content)
        common = _read_common(folder)
        objects = read_sharded(folder, metadata, content)
        return LoadedContent(common, objects, _unexpected(stored, content))

    def contents(self, iteration: int) -> Contents:
        return _contents(open_metadata(self._existing(iteration)))

    def common(self, iteration: int) -> dict[str, Any]:
        return _read_common(self._existing(iteration))

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        return manifests.read(self._existing(iteration))

    def iterations(self) -> list[int]:
        if not self.path.is_dir():
            return []
        named = ((path, _ITERATION.fullmatch(path.name)) for path in self.path.iterdir())
        return sorted(int(match[1]) for path, match in named if match and path.is_dir())

    def latest(self) -> int | None:
        text = self._tracker_text()
        return int(text) if text is not None and re.fullmatch(r"\d+", text) else None

    def _tracker_text(self) -> str | None:
        try:
            return (self.path / TRACKER_FILE).read_text("ascii", "replace").strip()
        except OSError:
            return None

    def _existing(self, iteration: int) -> Path:
        folder = self.folder(iteration)
        if not folder.is_dir():
            held = ", ".join(map(str, self.iterations())) or "none"
            raise CheckpointError(f"{folder} does not exist; {self.path} holds the iterations: {held}")
        return folder

    # --- verify

    def verify(self, iteration: int) -> list[str]:
        folder = self._existing(iteration)
        signature = _signature(folder)
        if self._sound.get(iteration) == signature:
            return []
        problems = _problems(folder)
        if not problems:
            self._sound[iteration] = signature
        return problems

    def newest_verified(self) -> tuple[int | None, list[str]]:
        put_back_replaced(self.path)
        there = self.iterations()
        tracked = self.latest()
        notes = self._tracker_notes(tracked, there)
        for iteration in _candidates(tracked, there):
            problems = self.verify(iteration)
            if not problems:
                if self.manifest(iteration) is None:
                    notes.append(f"{self.folder(iteration)} has no {manifests.MANIFEST_FILE}: taken without hashes")
                return iteration, notes
            notes += problems
        return None, notes

    def _tracker_notes(self, tracked: int | None, there: Sequence[int]) -> list[str]:
        path = self.path / TRACKER_FILE
        text = self._tracker_text()
        if not there and text is None:
            return []
        if text is None:
            return [f"{path} is missing"]
        if tracked is None:
            return [f"{path} holds {text[:40]!r} instead of an iteration"]
        if tracked not in there:
            return [f"{path} points to iteration {tracked}, and {self.folder(tracked)} does not exist"]
        later = [iteration for iteration in there if iteration > tracked]
        return [f"{path} says {tracked}; the later {_names(later)} are left aside"] if later else []


def _names(iterations: Sequence[int]) -> str:
    return ", ".join(f"iter_{iteration:07d}" for iteration in iterations)


def _candidates(tracked: int | None, there: Sequence[int]) -> list[int]:
    """The order in which checkpoints are tried: up to the tracker's from the newest, then those after it."""
    if tracked is None:
        return sorted(there, reverse=True)
    return sorted(there, key=lambda iteration: (iteration > tracked, abs(iteration - tracked)))


def _provenance() -> dict[str, str]:
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "megalith_version": megalith.__version__,
        "torch_version": torch.__version__,
    }


def _bytes_to_write(content: CheckpointContent, objects: Mapping[str, bytes], rest: int) -> int:
    entries = len(content.chunks) + len(objects)
    data = content.nbytes + sum(map(len, objects.values())) + rest
    return data + entries * _ENTRY_OVERHEAD + _FIXED_OVERHEAD


def _read_common(folder: Path) -> dict[str, Any]:
    common = load_tensors_and_plain_data(folder / COMMON_FILE)
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / COMMON_FILE} is damaged: it holds a {type(common).__name__}")
    return common


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when any file of a folder does: name, size and time of change of each."""
    status = [(path.name, path.stat()) for path in folder.iterdir()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in status))


def _problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint folder: by its manifest, or by its structure where it has none."""
    try:
        body = manifests.read(folder)
        if body is not None:
            return manifests.compare(folder, manifests.records_of(body))
        metadata = open_metadata(folder)
        _read_common(folder)
        json.loads((folder / FORMAT_FILE).read_text("ascii"))
    except CheckpointError as error:
        return [str(error)]
    except (OSError, ValueError) as error:
        return [f"{folder / FORMAT_FILE} is missing or damaged: {error}"]
    if metadata.storage_meta is not None and str(metadata.storage_meta.save_id).startswith(SAVE_ID_PREFIX):
        return [f"{folder / manifests.MANIFEST_FILE} is missing"]
    return []


def _contents(metadata: Metadata) -> Contents:
    tensors, objects = {}, []
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            objects.append(key)
        else:
            tensors[key] = StoredTensor(tuple(stored.size), stored.properties.dtype, len(stored.chunks))
    return Contents(tensors, frozenset(objects))


def _listing(head: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{head}:", *lines])


def _check_fit(source: str, stored: Contents, wanted: CheckpointContent) -> None:
    """Raise one CheckpointError that lists every difference between what is stored and what is asked for."""
    lines = []
    for key, chunks in by_key(wanted.chunks).items():
        shape, dtype = chunks[0].global_shape, chunks[0].tensor.dtype
        held = stored.tensors.get(key)
        if held is None:
            lines.append(f"{key} is not in the checkpoint")
            continue
        if held.shape != shape:
            lines.append(f"{key} has shape {list(held.shape)} in the checkpoint and {list(shape)} here")
        if held.dtype != dtype:
            lines.append(f"{key} is {_short(held.dtype)} in the checkpoint and {_short(dtype)} here")
    lines += [f"{key} is not in the checkpoint" for key in wanted.objects if key not in stored.objects]
    if not lines:
        return
    unasked = [key for key in _unexpected(stored, wanted) if key in stored.tensors]
    if unasked:
        lines.append(f"in the checkpoint and not asked for: {', '.join(unasked)}")
    raise CheckpointError(_listing(f"{source} does not fit this model and optimizer", lines))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unexpected(stored: Contents, wanted: CheckpointContent) -> tuple[str, ...]:
    asked = {chunk.key for chunk in wanted.chunks} | set(wanted.objects)
    there = [*stored.tensors, *sorted(stored.objects)]
    return tuple(key for key in there if key not in asked and not is_extra_state(key))


@dataclass
class _Remembered:
    tensors: dict[str, Tensor]
    objects: dict[str, bytes]
    common: bytes
    manifest: dict[str, Any]


class MemoryStore:
    """A `Store` for tests: the behaviour of `DirectoryStore` without a disk. Nothing in it can be damaged.

    Further files of a save are counted and forgotten: no one reads them through the port.
    """

    def __init__(self) -> None:
        self._saved: dict[int, _Remembered] = {}
        self._latest: int | None = None

    def claim(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        on_point: Callable[[str], None] = no_point,
    ) -> SaveReport:
        started = time.perf_counter()
        on_point("pre_save")
        tensors = {}
        for key, chunks in by_key(content.chunks).items():
            held = sum(chunk.tensor.numel() for chunk in chunks)
            shape = chunks[0].global_shape
            if held != volume(shape):
                raise CheckpointError(f"{key}: the chunks to save hold {held} of {volume(shape)} elements")
            tensors[key] = torch.empty(shape, dtype=chunks[0].tensor.dtype)
            for chunk in chunks:
                _box(tensors[key], chunk.offset, chunk.tensor).copy_(chunk.tensor)
        on_point("mid_save")
        objects = encode_objects(content.objects)
        facts = json.loads(json.dumps({"iteration": iteration, **_provenance(), **manifest}))
        saved = _Remembered(tensors, objects, dump_bytes(content.common, "the common state"), facts)
        on_point("pre_commit")
        self._saved[iteration] = saved
        on_point("mid_commit")
        self._latest = iteration
        on_point("post_commit")
        size = content.nbytes + sum(map(len, (*objects.values(), *(files or {}).values()))) + len(saved.common)
        return SaveReport(time.perf_counter() - started, size, None)

    def load(self, iteration: int, content: CheckpointContent, *, verify: bool = True) -> LoadedContent:
        saved = self._existing(iteration)
        stored = self.contents(iteration)
        _check_fit(f"iteration {iteration}", stored, content)
        with torch.no_grad():
            for chunk in content.chunks:
                chunk.tensor.copy_(_box(saved.tensors[chunk.key], chunk.offset, chunk.tensor))
        objects = {key: _restored(saved.objects[key], key)[0] for key in content.objects}
        return LoadedContent(self.common(iteration), objects, _unexpected(stored, content))

    def contents(self, iteration: int) -> Contents:
        saved = self._existing(iteration)
        tensors = {key: StoredTensor(tuple(tensor.shape), tensor.dtype) for key, tensor in saved.tensors.items()}
        return Contents(tensors, frozenset(saved.objects))

    def common(self, iteration: int) -> dict[str, Any]:
        common: dict[str, Any] = _restored(self._existing(iteration).common, "the common state")
        return common

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        return self._existing(iteration).manifest

    def iterations(self) -> list[int]:
        return sorted(self._saved)

    def latest(self) -> int | None:
        return self._latest

    def verify(self, iteration: int) -> list[str]:
        self._existing(iteration)
        return []

    def newest_verified(self) -> tuple[int | None, list[str]]:
        return self._latest, []

    def _existing(self, iteration: int) -> _Remembered:
        if iteration not in self._saved:
            held = ", ".join(map(str, self.iterations())) or "none"
            raise CheckpointError(f"iteration {iteration} is not here; the store holds the iterations: {held}")
        return self._saved[iteration]


def _box(tensor: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    """The part of a global tensor that starts at `offset` and has the shape of `like`."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))]


def _restored(data: bytes, name: str) -> Any:
    return load_bytes(io.BytesIO(data), name)
