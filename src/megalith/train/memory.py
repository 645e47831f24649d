"""How much memory the run takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_PAGE = resource.getpagesize()


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes by name: the resident size of the process and its largest one, and what torch holds on a CUDA device."""
    # Linux counts in KiB, macOS in bytes.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures = {"max_resident_bytes": largest}
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        figures["resident_bytes"] = int(sizes.read_text().split()[1]) * _PAGE
        # The kernel keeps its maximum in batches of pages, a little behind.
        figures["max_resident_bytes"] = max(largest, figures["resident_bytes"])
    if device.type == "cuda":
        figures |= {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "max_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "max_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    return figures
