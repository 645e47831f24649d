"""A `Store` in memory: the double for tests of what saves and loads."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.background import PendingSave, SaveReport
from megalith.checkpoint.commit import no_point
from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent, by_key
from megalith.checkpoint.fit import Contents, StoredTensor, check_complete, fitted, keys_of
from megalith.checkpoint.folder import EncodedContent
from megalith.checkpoint.safe_loading import load_bytes
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.store import NO_FILES, provenance
from megalith.errors import CheckpointError


@dataclass(frozen=True)
class _Saved:
    tensors: dict[str, Tensor]
    encoded: EncodedContent
    manifest: dict[str, Any]


class _PendingInMemory:
    """A scheduled save: what was copied, and how it takes its place."""

    busy = failed = False

    def __init__(self, copied: _Saved, put: Callable[[_Saved], None], started: float) -> None:
        self._copied, self._put, self._started = copied, put, started

    def settle(self) -> None:
        pass

    def proceed(self, *, failed: bool = False) -> SaveReport | None:
        self._put(self._copied)
        return SaveReport(time.perf_counter() - self._started, self._copied.encoded.nbytes, None, 0.0, 0.0)

    def abandon(self) -> None:
        pass


class MemoryStore:
    """Behaves like `DirectoryStore` without files: the same errors, the same copies. Nothing in it can be damaged."""

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._latest: int | None = None

    def save(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] = NO_FILES,
        on_point: Callable[[str], None] = no_point,
    ) -> SaveReport:
        started = time.perf_counter()
        copied = self._copied(iteration, content, manifest, files, on_point)
        self._put(iteration, copied, on_point)
        seconds = time.perf_counter() - started
        return SaveReport(seconds, copied.encoded.nbytes, None, seconds, seconds)

    def schedule(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        staging: Staging,
        files: Mapping[str, bytes] = NO_FILES,
        on_point: Callable[[str], None] = no_point,
    ) -> PendingSave:
        started = time.perf_counter()
        copied = self._copied(iteration, content, manifest, files, on_point)
        return _PendingInMemory(copied, lambda saved: self._put(iteration, saved, on_point), started)

    def _copied(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        files: Mapping[str, bytes],
        on_point: Callable[[str], None],
    ) -> _Saved:
        encoded = EncodedContent(content, files)
        on_point("pre_save")
        check_complete(content.chunks)
        tensors = {key: _assembled(chunks) for key, chunks in by_key(content.chunks).items()}
        on_point("mid_save")
        facts = json.loads(json.dumps({"iteration": iteration, **provenance(), **manifest}))
        return _Saved(tensors, encoded, facts)

    def _put(self, iteration: int, saved: _Saved, on_point: Callable[[str], None]) -> None:
        on_point("pre_commit")
        self._saved[iteration] = saved
        on_point("mid_commit")
        self._latest = iteration
        on_point("post_commit")

    def load(self, iteration: int, content: CheckpointContent, *, verify: bool = True) -> LoadedContent:
        saved = self._existing(iteration)
        stored = self.contents(iteration)
        chunks = fitted(f"iteration {iteration}", stored, content, keys_of(content)).chunks
        with torch.no_grad():
            for chunk in chunks:
                chunk.tensor.copy_(_box(saved.tensors[chunk.key], chunk.offset, chunk.tensor))
        objects = {key: _restored(saved.encoded.objects[key], key)[0] for key in content.objects}
        return LoadedContent(self.common(iteration), objects, stored.not_in(keys_of(content)))

    def contents(self, iteration: int) -> Contents:
        saved = self._existing(iteration)
        tensors = {key: StoredTensor(tuple(tensor.shape), tensor.dtype) for key, tensor in saved.tensors.items()}
        return Contents(tensors, frozenset(saved.encoded.objects))

    def common(self, iteration: int) -> dict[str, Any]:
        common: dict[str, Any] = _restored(self._existing(iteration).encoded.common, "the common state")
        return common

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        return self._existing(iteration).manifest

    def read_file(self, iteration: int, name: str) -> bytes:
        files = self._existing(iteration).encoded.files
        if name not in files:
            raise CheckpointError(f"{name} was not saved with iteration {iteration}")
        return files[name]

    def iterations(self) -> list[int]:
        return sorted(self._saved)

    def latest(self) -> int | None:
        return self._latest

    def verify(self, iteration: int, *, deferred: bool = False) -> list[str]:
        self._existing(iteration)
        return []

    def newest_verified(self, *, deferred: bool = False) -> tuple[int | None, list[str]]:
        return self._latest, []

    def weights_only(self, iteration: int) -> bool:
        self._existing(iteration)
        return False

    def delete_after(self, iteration: int) -> None:
        for later in [other for other in self._saved if other > iteration]:
            del self._saved[later]

    def claim(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _existing(self, iteration: int) -> _Saved:
        if iteration not in self._saved:
            held = ", ".join(map(str, self.iterations())) or "none"
            raise CheckpointError(f"iteration {iteration} is not here; the store holds the iterations: {held}")
        return self._saved[iteration]


def _assembled(chunks: Sequence[Chunk]) -> Tensor:
    whole = torch.empty(chunks[0].global_shape, dtype=chunks[0].tensor.dtype)
    for chunk in chunks:
        _box(whole, chunk.offset, chunk.tensor).copy_(chunk.tensor.detach())
    return whole


def _box(tensor: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    """The part of a global tensor that starts at `offset` and has the shape of `like`."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))]


def _restored(data: bytes, name: str) -> Any:
    return load_bytes(io.BytesIO(data), name)
