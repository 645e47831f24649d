"""A save beside the training: a thread of each rank writes copies of its tensors, and the ranks commit at the end of a
later step.

The thread speaks to no other rank, so that it never meets a collective of the training. What it wrote is known when
all ranks say so (`train.agreement`); then all call `commit`. At most one save is under way.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megalith.checkpoint.dcp import Written
from megalith.checkpoint.hashing import WritingCancelled
from megalith.checkpoint.saving import Saving
from megalith.errors import CheckpointError

_NICENESS = 10  # of the writers: the threads that train go first
_SECONDS_TO_STOP = 10.0


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes:
        seconds: from its begin until it was in its place.
        bytes: of all its files.
        path: where it is; None in memory.
        stall_seconds: how long its caller could do nothing else.
        write_seconds: how long the slowest rank wrote.
        waited_seconds: the part of the stall in which writers of a background save were waited for.
    """

    seconds: float
    bytes: int
    path: Path | None
    stall_seconds: float
    write_seconds: float
    waited_seconds: float = 0.0


class PendingSave(Protocol):
    """A save that is being written."""

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing."""
        ...

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part."""
        ...

    def commit(self, *, failed: bool = False) -> SaveReport:
        """Wait until all ranks have written, and put the checkpoint in its place; all ranks call it together.

        Args:
            failed: a rank is known to have failed, so that the others need not write to the end.

        Raises:
            CheckpointError: it could not be written, on whichever rank; what was there before is untouched.
        """
        ...

    def abandon(self) -> None:
        """Stop writing and remove what was written, as far as this rank can; nothing if it was committed."""
        ...


class BackgroundSave:
    """Writes in a thread from its construction on.

    Args:
        saving: begun, over copies that stay as they are until `commit` returns.
        final: where the folder is to appear.
        started: when the save began, by `time.perf_counter`.
    """

    def __init__(self, saving: Saving, final: Path, started: float) -> None:
        self._saving, self._final, self._started = saving, final, started
        self._written: Written | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint-save", daemon=True)
        self._thread.start()
        self._stall = time.perf_counter() - started

    @property
    def writing(self) -> bool:
        return self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def commit(self, *, failed: bool = False) -> SaveReport:
        began = time.perf_counter()
        if failed:
            self._saving.cancel()
        waited: list[float] = []

        def result() -> Written:
            self._thread.join()
            waited.append(time.perf_counter() - began)
            return self._result(cancelled=failed)

        saved = self._saving.commit(result)
        now = time.perf_counter()
        stall = self._stall + now - began
        return SaveReport(now - self._started, saved.nbytes, self._final, stall, saved.write_seconds, waited[0])

    def _result(self, *, cancelled: bool) -> Written:
        """What this rank wrote; of a cancelled writer nothing, since the failure is another rank's to tell."""
        if isinstance(self._error, WritingCancelled) and cancelled:
            return Written([], {})
        if self._error is not None:
            if isinstance(self._error, Exception):
                raise self._error
            raise CheckpointError(f"the thread that wrote the checkpoint ended: {self._error!r}") from self._error
        assert self._written is not None
        return self._written

    def abandon(self) -> None:
        self._saving.cancel()
        self._thread.join(_SECONDS_TO_STOP)
        self._saving.abandon()

    def _write(self) -> None:
        give_way()
        try:
            self._written = self._saving.write()
        except BaseException as error:  # told to all ranks at the end of the next step
            self._error = error


def give_way() -> None:
    """Let this thread, and those that it starts, run only where the others of the process leave time."""
    if sys.platform == "linux":  # elsewhere the call would concern the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
