"""Files that are read soon, brought into the system's memory meanwhile.

Between the decision for a checkpoint and its load a run builds its model, and the disk would have nothing to do. What
is fetched is not kept here: where the system needs the memory for something else, the load reads from the disk again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PIECE = 2**20
_THREADS = 8  # at most, as those of a load
_SHARE_OF_MEMORY = 16  # of the machine's, for each process: with eight of them half of it


class Prefetch:
    """Reads files in threads until it is stopped, or has read enough.

    Args:
        paths: which.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stopped = threading.Event()
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY
        threads = min(_THREADS, len(paths))
        for number in range(threads):
            own = (paths[number::threads], room // threads)
            threading.Thread(target=self._read, args=own, name="prefetch", daemon=True).start()

    def stop(self) -> None:
        """Read no more; returns at once."""
        self._stopped.set()

    def _read(self, paths: Sequence[Path], room: int) -> None:
        """Read files one after the other, and forget them; what is wrong with them the load will find."""
        buffer, done = memoryview(bytearray(_PIECE)), 0
        for path in paths:
            with suppress(OSError), path.open("rb", buffering=0) as file:
                while done < room and not self._stopped.is_set() and (got := file.readinto(buffer)):
                    done += got
