"""How much memory the run takes."""

from __future__ import annotations

import resource
import sys

import torch


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes by name: the largest resident size of the process, and what torch holds on a CUDA device."""
    # Linux counts in KiB, macOS in bytes.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures = {"max_resident_bytes": resident}
    if device.type == "cuda":
        figures |= {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "max_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    return figures
