"""In which dtype a product or a reduction is carried out.

Half-precision tensors keep their storage and their rounding, but a device without fast arithmetic for them multiplies
in fp32 and rounds the result: on a CPU fp16 products run at 0 to 3 GFLOP/s and fp32-then-round at 6 times that and more
(one thread, torch 2.13). bf16 products are as slow on a processor without instructions for them: with AVX2 1 to 10
GFLOP/s and with the first AVX-512 processors 30, where fp32 runs at 150. Reductions go up to fp32 and never down, so
that fp64 stays fp64.

The processor's features decide (`megalith.device`), never a measurement, so that a run is the same each time.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from megalith.device import CPU_FEATURES, capability_of, is_host

_ROW_BY_MV = "amx_bf16" in CPU_FEATURES


def is_row_for_mv(x: Tensor) -> bool:
    """Return whether a product of x is fastest as one of a matrix and a vector (`torch.mv`), which sums in fp32.

    So is one row of bf16 where a processor has no instructions for bf16, or those for tiles: on an Intel CPU with AMX
    two threads read weights at 15 GB/s by oneDNN, which rearranges them first, and at 21 by `mv`.
    """
    if x.dtype != torch.bfloat16 or not is_host(x.device) or x.numel() != x.shape[-1]:
        return False
    return (_ROW_BY_MV or product_dtype(x) != x.dtype) and not torch.is_grad_enabled()


def product_dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrix products of a dtype are computed on a device; accelerators widen none."""
    if dtype not in (torch.float16, torch.bfloat16) or not is_host(device) or dtype in capability_of(device).half:
        return dtype
    return torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `x` are computed on its device."""
    return product_dtype_on(x.device, x.dtype)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for the half-precision dtypes and `dtype` itself otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, computed in the product dtype and rounded to the dtype of `a`. Shapes as `torch.matmul`."""
    dtype = product_dtype(a)
    return torch.matmul(a.to(dtype), b.to(dtype)).to(a.dtype)


class FactoryKwargs(TypedDict):
    """Dtype and device of the parameters of a module, passed to its submodules as in torch's own modules."""

    dtype: torch.dtype
    device: torch.device
