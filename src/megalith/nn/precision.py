"""In which dtype a product or a reduction is carried out.

Half-precision tensors keep their storage and their rounding, but a device without fast arithmetic for them multiplies
in fp32 and rounds the result: on a CPU fp16 products run at 0 to 3 GFLOP/s and fp32-then-round at 6 times that and more
(one thread, torch 2.13). bf16 products are as slow on a processor without instructions for them: with AVX2 1 to 10
GFLOP/s and with the first AVX-512 processors 30, where fp32 runs at 150. Reductions go up to fp32 and never down, so
that fp64 stays fp64.

The processor's features decide, never a measurement, so that a run is the same each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

_BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}  # the last one is ARM's
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ISA_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
_CONVERTING = {"AVX2_VNNI_2": {"avx_ne_convert"}}  # what oneDNN uses of the features under such a limit
_CPU_INFO = Path("/proc/cpuinfo")


def features_of(cpu_info: str) -> set[str]:
    """Return the instruction sets in the text of /proc/cpuinfo, of x86 or ARM."""
    for line in cpu_info.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(values.split())
    return set()


def has_fast_bf16(features: set[str], environ: Mapping[str, str]) -> bool:
    """Tell whether oneDNN, which multiplies bf16 for torch on CPUs, has instructions for it that `environ` allows."""
    limit = next((environ[name].upper() for name in _ISA_VARIABLES if environ.get(name)), "")
    if limit in _ISA_WITHOUT_BF16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(features & _CONVERTING.get(limit, _BF16_INSTRUCTIONS))


def _read_features() -> set[str]:
    try:
        return features_of(_CPU_INFO.read_text())
    except OSError:
        return set()


_FEATURES = _read_features()
_BF16_ON_CPU = torch.bfloat16 if has_fast_bf16(_FEATURES, os.environ) else torch.float32
_ROW_BY_MV = "amx_bf16" in _FEATURES


def is_row_for_mv(x: Tensor) -> bool:
    """Return whether a product of x is fastest as one of a matrix and a vector (`torch.mv`), which sums in fp32.

    So is one row of bf16 where a processor has no instructions for bf16, or those for tiles: on an Intel CPU with AMX
    two threads read weights at 15 GB/s by oneDNN, which rearranges them first, and at 21 by `mv`.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.numel() != x.shape[-1]:
        return False
    return (_ROW_BY_MV or product_dtype(x) != x.dtype) and not torch.is_grad_enabled()


def product_dtype_on(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrix products of a dtype are computed on a type of device."""
    if device_type != "cpu":
        return dtype
    return torch.float32 if dtype == torch.float16 else _BF16_ON_CPU if dtype == torch.bfloat16 else dtype


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `x` are computed on its device."""
    return product_dtype_on(x.device.type, x.dtype)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for the half-precision dtypes and `dtype` itself otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, computed in the product dtype and rounded to the dtype of `a`. Shapes as `torch.matmul`."""
    dtype = product_dtype(a)
    return torch.matmul(a.to(dtype), b.to(dtype)).to(a.dtype)


class FactoryKwargs(TypedDict):
    """Dtype and device of the parameters of a module, handed down to its parts as torch's own modules do it."""

    dtype: torch.dtype
    device: torch.device
