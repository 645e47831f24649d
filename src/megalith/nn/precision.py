"""In which dtype a product or a reduction is carried out.

Half-precision tensors keep their storage and their rounding, but a device without arithmetic for them multiplies
in fp32: on a CPU fp16 matrix products run at 0 to 3 GFLOP/s while fp32-then-round runs at 6 times that and more
(design.md section 7). Reductions go up to fp32 and never down, so that fp64 stays fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `x` are computed on its device."""
    return torch.float32 if x.dtype == torch.float16 and x.device.type == "cpu" else x.dtype


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for the half-precision dtypes and `dtype` itself otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the product dtype, rounded to the dtype of `a`. Shapes as `torch.matmul`."""
    dtype = product_dtype(a)
    return torch.matmul(a.to(dtype), b.to(dtype)).to(a.dtype)
