"""Giving back the memory of mapped files.

What is read of a mapped file stays in the memory of the process until the system needs the room, so that reading a
checkpoint through would seem to take as much memory as it has bytes, and a limit on the process would count it so.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_DONTNEED = 4


class MappedFolder:
    """The files of a folder that are mapped into this process, as far as the system tells (Linux).

    Args:
        folder: whose files; they are mapped already.
    """

    def __init__(self, folder: Path) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._libc = ctypes.CDLL(None)
        inside = f"{folder.resolve()}/"
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(inside):
                start, _, stop = fields[0].partition("-")
                self._starts.append(int(start, 16))
                self._stops.append(int(stop, 16))

    def release(self, tensor: Tensor) -> None:
        """Give back the whole pages of a tensor that was read and not written; the next read brings them back."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = (tensor.data_ptr() + span * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        number = bisect.bisect_right(self._starts, start) - 1
        if start < stop and number >= 0 and stop <= self._stops[number]:
            self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)
