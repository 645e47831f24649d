"""A save beside the training: a thread of each rank writes copies of its tensors, and the ranks commit at the end of a
later step.

    every rank       begins to copy its tensors; the folder is made                                between two steps
    every rank       copies, writes and hashes its files                                           in threads
    every rank       waits for its copies (`settle`)                                       before the tensors change
    all              tell each other what they wrote                                               between two steps
    the first        .metadata, common.pt, ..., manifest.json; rename; tracker                     in a thread
    all              hear that it is done                                                          between two steps

The threads speak to no other rank, so that they never meet a collective of the training. That all are done with a
stage is agreed upon by the caller (`train.agreement`), and then all call `proceed`. At most one save is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megalith.checkpoint.dcp_writing import Written
from megalith.checkpoint.hashing import WritingCancelled
from megalith.checkpoint.saving import Saving
from megalith.errors import CheckpointError

_SECONDS_TO_STOP = 10.0


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes:
        seconds: from its begin until it was in its place.
        bytes: of all its files.
        path: where it is.
        stall_seconds: how long its caller could do nothing else; of a background save the caller knows that.
        write_seconds: how long the slowest rank wrote.
        waited_seconds: how long threads of a background save were waited for.
    """

    seconds: float
    bytes: int
    path: Path
    stall_seconds: float
    write_seconds: float
    waited_seconds: float = 0.0


T = TypeVar("T")


class _Work(Generic[T]):
    """What a thread does, and what came of it.

    It has the priority of the others: a lower one would hold the interpreter for as long as the system gives it no
    processor.
    """

    def __init__(self, act: Callable[[], T]) -> None:
        self._act = act
        self._results: list[T] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="checkpoint-save", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._act())
        except BaseException as error:  # told to all ranks at the end of a step
            self.error = error

    def result(self) -> T:
        """What came of it, when it is done.

        Raises:
            Exception: its own error.
        """
        self.thread.join()
        if isinstance(self.error, Exception):
            raise self.error
        if self.error is not None:
            raise CheckpointError(f"the thread that wrote the checkpoint ended: {self.error!r}") from self.error
        return self._results[0]


class PendingSave:
    """A save whose tensors are being copied: threads write (on each rank) and then commit (on the first).

    Args:
        saving: begun, over copies that stay as they are until `proceed` has returned for the first time.
        final: where the folder is to appear.
        started: when the save began, by `time.perf_counter`.
    """

    def __init__(self, saving: Saving, final: Path, started: float) -> None:
        self._saving, self._final, self._started = saving, final, started
        self._writing = _Work(saving.write)
        self._written: list[Written] = []
        self._committing: _Work[int] | None = None
        self._waited = 0.0

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is at work for it."""
        return self._work.thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank could not do its part."""
        return self._work.error is not None

    @property
    def _work(self) -> _Work[Any]:
        return self._committing or self._writing

    def settle(self) -> None:
        """Wait until the tensors that are saved may change."""
        self._saving.settle()

    def proceed(self, *, failed: bool = False) -> SaveReport | None:
        """Go on to the next stage, waiting for what is still busy; all ranks call it together.

        Args:
            failed: a rank is known to have failed, so that the others need not write to the end.

        Returns:
            What the save did; None before the last stage.

        Raises:
            CheckpointError: it could not be written, on whichever rank; what was there before is untouched.
        """
        if failed:
            self._saving.cancel()
        if self._committing is None:
            self._written = self._saving.gathered(lambda: self._waited_for(self._writing, cancelled=failed))
            self._committing = _Work(lambda: self._saving.commit(self._written))
            return None
        committing = self._committing
        saved = self._saving.agreed(lambda: self._waited_for(committing), self._written)
        seconds = time.perf_counter() - self._started
        return SaveReport(seconds, saved.nbytes, self._final, 0.0, saved.write_seconds, self._waited)

    def _waited_for(self, work: _Work[Any], *, cancelled: bool = False) -> Any:
        """The result of a thread; of a cancelled one nothing, since the failure is another rank's to tell."""
        began = time.perf_counter()
        try:
            return work.result()
        except WritingCancelled:
            if not cancelled:
                raise
            return Written([], {})
        finally:
            self._waited += time.perf_counter() - began

    def abandon(self) -> None:
        """Stop writing and remove what was written, as far as this rank can; nothing if it was committed."""
        self._saving.cancel()
        self._work.thread.join(_SECONDS_TO_STOP)
        self._saving.abandon()
