"""The state of a run, written into a store."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megalith.checkpoint import Chunk, DirectoryStore, Staging
from megalith.checkpoint.base import BASE
from megalith.config import RunConfig
from megalith.device import is_host
from megalith.train.checkpoint_content import chunks_to_save, content_of
from megalith.train.checkpoint_fit import PRODUCTS, Identity, products_of
from megalith.train.faults import Probe, no_probe
from megalith.train.results import SavedCheckpoint, ScheduledSave
from megalith.train.state import TrainState

if TYPE_CHECKING:
    from megalith.checkpoint import PendingSave, SaveReport


class CheckpointSaver:
    """Writes the state of a run into a store, or into `ephemeral`, where only the last checkpoint is kept.

    Attributes:
        certificate: SHA-256 of the proof of this configuration, for manifests; empty without one.
    """

    certificate = ""

    def __init__(
        self,
        store: DirectoryStore,
        run: RunConfig,
        identity: Identity,
        probe: Probe = no_probe,
        ephemeral: DirectoryStore | None = None,
    ) -> None:
        self._store, self._run, self._identity, self._probe, self._ephemeral = store, run, identity, probe, ephemeral

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        """Write a checkpoint of the state, to keep if `persistent`, else until the next one; return when it is durable.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        report = self._store_for(state, persistent=persistent).save(**self._parts(state))
        return saved_checkpoint(state.iteration, report, report.stall_seconds)

    def schedule(self, state: TrainState, staging: Staging, *, persistent: bool = True) -> PendingSave:
        """Begin to copy the state and to write the copy; arguments and errors as of `save`."""
        return self._store_for(state, persistent=persistent).schedule(**self._parts(state), staging=staging)

    def chunks_of(self, state: TrainState) -> list[Chunk]:
        """Return the tensors that this rank saves."""
        return chunks_to_save(state, self._run, with_optimizer=not self._run.checkpoint.no_save_optim)

    def folder(self, *, persistent: bool = True) -> str:
        """Return the folder that `save` writes to."""
        save = self._run.checkpoint.save or ""
        return save if persistent else self._run.checkpoint.ephemeral_dir(save) or ""

    def _store_for(self, state: TrainState, *, persistent: bool) -> DirectoryStore:
        if self._ephemeral is None:
            assert persistent, "there is no folder for checkpoints of which only the last one is kept"
            return self._store
        # Otherwise a run that was rewound would resume from the last ephemeral checkpoint of the abandoned run.
        self._ephemeral.delete_after(state.iteration)
        return self._store if persistent else self._ephemeral

    def _parts(self, state: TrainState) -> dict[str, Any]:
        """Return the arguments of the store for a save."""
        iteration = state.iteration  # it advances while a thread writes
        return {
            "iteration": iteration,
            "content": content_of(state, self._run),
            "manifest": self._manifest(state),
            "files": self._identity.tokenizer_files,
            "best": state.best.iteration if self._run.checkpoint.keep_best else None,
            "on_stage": lambda stage: self._probe(stage, iteration),
        }

    def _manifest(self, state: TrainState) -> dict[str, Any]:
        base = {} if self._identity.base is None else {BASE: dict(self._identity.base)}
        return {
            **base,
            "config": self._run.to_dict(),
            "tokenizer": dict(self._identity.tokenizer),
            "tokenizer_files": sorted(self._identity.tokenizer_files),
            "data": dict(self._identity.data),
            "threads": torch.get_num_threads() if is_host(state.context.device) else None,
            PRODUCTS: products_of(self._run, state.context.device),
            **({"certificate": self.certificate} if self.certificate else {}),
        }


def saved_checkpoint(iteration: int, report: SaveReport, stall_seconds: float) -> SavedCheckpoint:
    """Return the result of a save for the hooks."""
    speed = report.bytes / report.write_seconds / 1e9 if report.write_seconds else 0.0
    path = str(report.path)
    return SavedCheckpoint(
        iteration, path, report.seconds, report.bytes, stall_seconds, report.waited_seconds, gigabytes_per_second=speed
    )


@dataclass
class _UnderWay:
    """The save that is being written; `stall` is how long the training stood still for it until now."""

    iteration: int
    pending: PendingSave
    stall: float


class AsyncSaver:
    """Saves asynchronously, one checkpoint at a time."""

    def __init__(self, saver: CheckpointSaver) -> None:
        self._saver, self._staging = saver, Staging()
        self._under_way: _UnderWay | None = None

    def reserve(self, state: TrainState) -> None:
        """Take the memory for the copies, so that the first save is no slower than the others."""
        import megalith.checkpoint.store.saving  # noqa: F401  # takes a second, for which the first save would stand still

        self._staging.reserve(self._saver.chunks_of(state))

    @property
    def scheduled(self) -> int | None:
        """Iteration of the save in progress, or None."""
        return None if self._under_way is None else self._under_way.iteration

    @property
    def busy(self) -> bool:
        """True while a thread of this rank works on the save in progress."""
        return self._under_way is not None and self._under_way.pending.busy

    @property
    def failed(self) -> bool:
        """True if this rank could not write its part."""
        return self._under_way is not None and self._under_way.pending.failed

    def schedule(self, state: TrainState, *, persistent: bool = True) -> ScheduledSave:
        """Start copying the state, which may change after `wait_for_copies`, and writing the copy.

        No save is under way, and all ranks call it together. Raises CheckpointError on failure.
        """
        assert self._under_way is None, f"the save of iteration {self.scheduled} is still under way"
        began = time.perf_counter()
        pending = self._saver.schedule(state, self._staging, persistent=persistent)
        seconds = time.perf_counter() - began
        self._under_way = _UnderWay(state.iteration, pending, seconds)
        return ScheduledSave(state.iteration, self._saver.folder(persistent=persistent), seconds)

    def wait_for_copies(self) -> None:
        """Wait until the state may change; no time is lost if that has been the case for some time."""
        if self._under_way is not None:
            began = time.perf_counter()
            self._under_way.pending.wait_for_copies()
            self._under_way.stall += time.perf_counter() - began

    def advance(self, *, failed: bool = False) -> SavedCheckpoint | None:
        """Advance the pending save by one stage, waiting for its threads; return the checkpoint once complete.

        Collective.

        Raises:
            CheckpointError: a rank could not write it; earlier checkpoints are unchanged.
        """
        under_way, self._under_way = self._under_way, None  # an error ends it
        assert under_way is not None, "no save is under way"
        began = time.perf_counter()
        report = under_way.pending.advance(failed=failed)
        under_way.stall += time.perf_counter() - began
        if report is None:
            self._under_way = under_way
            return None
        return saved_checkpoint(under_way.iteration, report, under_way.stall)

    def close(self) -> None:
        """Cancel a pending save; earlier checkpoints are untouched."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.pending.abandon()
        self._staging.release()
