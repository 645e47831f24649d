"""fp32 products with frozen weights on a CPU, by oneDNN.

torch computes fp32 products on a CPU with MKL, which on other processors than Intel's is less than half as fast as
oneDNN (benchmarks/results/README.md: on an AMD EPYC, two threads, 2.2 times for all layers of a 124M model from 1 row
to 512, and 7 times for one row and a vocabulary). On Intel's, MKL computes a single row in 0.83 of the time and keeps
it. If the operator is missing, `torch.nn.functional.linear` is equal up to rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megalith.kernels.torch_private import has_onednn_linear

_LARGE_WEIGHT = 1 << 18  # elements; the operator's overhead is 20 us, in which a smaller product is complete
_MIN_WORK = 1 << 22  # elements x rows


def _is_intel() -> bool:
    """Return whether /proc/cpuinfo names an Intel processor."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_HAS_ONEDNN = has_onednn_linear()
_MIN_ROWS = 2 if _is_intel() else 1


def min_rows(weight: Tensor) -> int | None:
    """Return the number of rows of x from which oneDNN is faster for x W^T, None if never. The weight is frozen."""
    if not _HAS_ONEDNN or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    return max(_MIN_ROWS, 1 if weight.numel() >= _LARGE_WEIGHT else -(-_MIN_WORK // max(1, weight.numel())))


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether to compute x W^T with oneDNN."""
    if x.dtype != torch.float32 or weight.requires_grad or x.requires_grad:
        return False
    least = min_rows(weight)
    return least is not None and x.numel() // x.shape[-1] >= least
