"""Zeroed memory of a CPU that is not written before its first use."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from megalith.device import has_memory, is_host

_SMALLEST = 1 << 20  # bytes; below it the pages at the ends of a mapping would count


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous tensor of zeros, as `torch.zeros` does.

    On Linux a large one on a CPU is a mapping whose pages the system clears when they are first used. `torch.zeros`
    writes all of it, so that the pages are written twice and the start waits for them.
    """
    size = prod(shape) * dtype.itemsize
    if not is_host(device) or not has_memory(device) or sys.platform != "linux" or size < _SMALLEST:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
