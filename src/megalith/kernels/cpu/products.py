"""Products with weights that are not trained, in fp32 on a CPU, by oneDNN.

torch gives fp32 products on a CPU to MKL, which on processors that are not Intel's reaches less than half of what
oneDNN does (benchmarks/results/README.md: on an AMD EPYC, two threads, 2.2 times for all layers of a 124M model from 1
row to 512, and 7 times for one row and a vocabulary). On Intel's a single row is left to MKL, which takes 0.83 of the
time there. Where the operator is missing, `torch.nn.functional.linear` is the same to rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megalith.kernels.torch_private import has_onednn_linear

_LARGE_WEIGHT = 1 << 18  # elements; the operator takes 20 us to begin, in which a smaller product is done
_MUCH_WORK = 1 << 22  # elements x rows


def _of_intel() -> bool:
    """Whether the processor is Intel's, as far as the system says so."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_THERE = has_onednn_linear()
_FEWEST_ROWS = 2 if _of_intel() else 1


def least_rows(weight: Tensor) -> int | None:
    """From how many rows of x on x W^T is to be computed here; None where never. The weight is not trained."""
    if not _THERE or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    return max(_FEWEST_ROWS, 1 if weight.numel() >= _LARGE_WEIGHT else -(-_MUCH_WORK // max(1, weight.numel())))


def applies(x: Tensor, weight: Tensor) -> bool:
    """Whether x W^T is to be computed here."""
    if x.dtype != torch.float32 or weight.requires_grad or x.requires_grad:
        return False
    least = least_rows(weight)
    return least is not None and x.numel() // x.shape[-1] >= least
