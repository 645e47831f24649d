"""Files that are read soon, brought into the system's memory meanwhile.

Between the decision for a checkpoint and its load a run builds its model and plans what to read, and the disk would
have nothing to do. The system is only asked for what comes next: nothing is copied here, and no thread waits for the
interpreter after every MiB while the planning holds it. Where the system needs the memory for something else, the
load reads from the disk again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalith.distributed.machine import memory_limit

_PIECE = 2**24  # asked for in one call, which returns when the disk has taken the order
_THREADS = 8  # at most, as those of a load
_SHARE_OF_MEMORY = 16  # of the machine's, for each process: with eight of them half of it


class Prefetch:
    """Has the system read files, from threads, until it is stopped or enough is asked for.

    Args:
        paths: which.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stopped = threading.Event()
        room = memory_limit() // _SHARE_OF_MEMORY
        threads = min(_THREADS, len(paths)) if hasattr(os, "posix_fadvise") else 0  # macOS has none
        for number in range(threads):
            own = (paths[number::threads], room // threads)
            threading.Thread(target=self._read, args=own, name="prefetch", daemon=True).start()

    def stop(self) -> None:
        """Ask for no more; returns at once."""
        self._stopped.set()

    def _read(self, paths: Sequence[Path], room: int) -> None:
        """Ask for files one after the other; what is wrong with them the load will find."""
        for path in paths:
            size = 0
            with suppress(OSError), path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for start in range(0, min(size, room), _PIECE):
                    if self._stopped.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_WILLNEED)
            room -= size
