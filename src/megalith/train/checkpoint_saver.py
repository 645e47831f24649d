"""The state of a run, written into a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megalith.checkpoint import Chunk, PendingSave, SaveReport, Staging, Store
from megalith.config import RunConfig
from megalith.train.checkpoint_content import chunks_to_save, content_of
from megalith.train.checkpoint_fit import PRODUCTS, Identity, products_of
from megalith.train.faults import Probe, no_probe
from megalith.train.results import SavedCheckpoint
from megalith.train.state import TrainState


class CheckpointSaver:
    """Writes the state of a run into a store.

    Args:
        store: where checkpoints go.
        run: the configuration.
        identity: what the run reads.
        probe: called at the points of a save.
        passing: where those go of which only the last one is kept; None if there are none.
    """

    def __init__(
        self,
        store: Store,
        run: RunConfig,
        identity: Identity,
        probe: Probe = no_probe,
        passing: Store | None = None,
    ) -> None:
        self._store, self._run, self._identity, self._probe, self._passing = store, run, identity, probe, passing

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        """Write a checkpoint of the state as it is; returns when it is durable.

        Args:
            state: of the run.
            persistent: one to keep, rather than one of which only the last is kept.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        report = self._store_for(state, persistent=persistent).save(
            state.iteration,
            content_of(state, self._run),
            self._manifest(state),
            files=self._identity.tokenizer_files,
            on_point=self._points(state.iteration),
        )
        return saved_checkpoint(state.iteration, report, report.stall_seconds)

    def schedule(self, state: TrainState, staging: Staging, *, persistent: bool = True) -> PendingSave:
        """Begin to copy the state and to write the copy; arguments and errors as of `save`.

        Args:
            state, persistent: as of `save`.
            staging: memory for the copy.
        """
        return self._store_for(state, persistent=persistent).schedule(
            state.iteration,
            content_of(state, self._run),
            self._manifest(state),
            staging=staging,
            files=self._identity.tokenizer_files,
            on_point=self._points(state.iteration),
        )

    def chunks_of(self, state: TrainState) -> list[Chunk]:
        """The tensors that this rank saves."""
        return chunks_to_save(state, self._run, with_optimizer=not self._run.checkpoint.no_save_optim)

    def folder(self, *, persistent: bool = True) -> str:
        """Where `save` writes."""
        save = self._run.checkpoint.save or ""
        return save if persistent else self._run.checkpoint.passing_folder(save) or ""

    def _store_for(self, state: TrainState, *, persistent: bool) -> Store:
        if self._passing is None:
            assert persistent, "there is no folder for checkpoints of which only the last one is kept"
            return self._store
        # A run that went back would otherwise find the last one of the way that it has left, and resume from that.
        self._passing.delete_after(state.iteration)
        return self._store if persistent else self._passing

    def _points(self, iteration: int) -> Callable[[str], None]:
        return lambda point: self._probe(point, iteration)

    def _manifest(self, state: TrainState) -> dict[str, Any]:
        return {
            "config": self._run.to_dict(),
            "tokenizer": dict(self._identity.tokenizer),
            "tokenizer_files": sorted(self._identity.tokenizer_files),
            "data": dict(self._identity.data),
            "threads": torch.get_num_threads() if state.context.device.type == "cpu" else None,
            PRODUCTS: products_of(self._run, state.context.device.type),
        }


def saved_checkpoint(iteration: int, report: SaveReport, stall_seconds: float) -> SavedCheckpoint:
    """What the listeners of a run hear of a save."""
    speed = report.bytes / report.write_seconds / 1e9 if report.write_seconds else 0.0
    return SavedCheckpoint(
        iteration,
        str(report.path or ""),
        report.seconds,
        report.bytes,
        stall_seconds,
        report.waited_seconds,
        speed,
    )
