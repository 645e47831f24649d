"""Saving beside the training: what of it the loop sees."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megalith.checkpoint import PendingSave, Staging
from megalith.train.checkpoint_saver import CheckpointSaver, saved_checkpoint
from megalith.train.results import SavedCheckpoint, ScheduledSave
from megalith.train.state import TrainState


@dataclass
class _UnderWay:
    """The save that is being written; `stall` is how long the training stood still for it until now."""

    iteration: int
    pending: PendingSave
    stall: float


class BackgroundSaver:
    """Schedules saves, one at a time.

    Args:
        saver: knows what a checkpoint holds and where it goes.
    """

    def __init__(self, saver: CheckpointSaver) -> None:
        self._saver, self._staging = saver, Staging()
        self._under_way: _UnderWay | None = None

    def reserve(self, state: TrainState) -> None:
        """Take the memory for the copies, so that the first save is no slower than the others."""
        self._staging.reserve(self._saver.chunks_of(state))

    @property
    def scheduled(self) -> int | None:
        """The iteration of the save that is under way; None if there is none."""
        return None if self._under_way is None else self._under_way.iteration

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is at work for it."""
        return self._under_way is not None and self._under_way.pending.busy

    @property
    def failed(self) -> bool:
        """Whether this rank could not do its part."""
        return self._under_way is not None and self._under_way.pending.failed

    def schedule(self, state: TrainState, *, persistent: bool = True) -> ScheduledSave:
        """Begin to copy the state and to write the copy; no save is under way. All ranks call it together.

        The state may change after `settle`.

        Raises:
            CheckpointError: it cannot be written.
        """
        assert self._under_way is None, f"the save of iteration {self.scheduled} is still under way"
        began = time.perf_counter()
        pending = self._saver.schedule(state, self._staging, persistent=persistent)
        seconds = time.perf_counter() - began
        self._under_way = _UnderWay(state.iteration, pending, seconds)
        return ScheduledSave(state.iteration, self._saver.folder(persistent=persistent), seconds)

    def settle(self) -> None:
        """Wait until the state may change; no time is lost if that has been the case for some time."""
        if self._under_way is not None:
            began = time.perf_counter()
            self._under_way.pending.settle()
            self._under_way.stall += time.perf_counter() - began

    def proceed(self, *, failed: bool = False) -> SavedCheckpoint | None:
        """Go on to the next stage of the save under way, waiting for what is busy; all ranks call it together.

        Args:
            failed: a rank is known to have failed.

        Returns:
            The checkpoint when it is complete, else None.

        Raises:
            CheckpointError: it could not be written, on whichever rank; earlier checkpoints are untouched.
        """
        under_way, self._under_way = self._under_way, None  # an error ends it
        assert under_way is not None, "no save is under way"
        began = time.perf_counter()
        report = under_way.pending.proceed(failed=failed)
        under_way.stall += time.perf_counter() - began
        if report is None:
            self._under_way = under_way
            return None
        return saved_checkpoint(under_way.iteration, report, under_way.stall)

    def close(self) -> None:
        """Give up a save that is under way, after a failure; what stood there before stays."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.pending.abandon()
        self._staging.release()
