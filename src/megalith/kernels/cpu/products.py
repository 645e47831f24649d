"""Products with frozen weights on a CPU, by oneDNN and FBGEMM.

torch computes fp32 products on a CPU with MKL, which on other processors than Intel's is less than half as fast as
oneDNN (benchmarks/results/README.md: on an AMD EPYC, two threads, 2.2 times for all layers of a 124M model from 1 row
to 512, and 7 times for one row and a vocabulary). On Intel's, MKL computes a single row in 0.83 of the time and keeps
it. If the operator is missing, `torch.nn.functional.linear` is equal up to rounding.

`Packing` moves weights into the layout of such a kernel, for a model that only generates. In fp32 oneDNN then takes 0.5
of the time for 2 rows and 0.75 for 16 (AMD, AVX2), in bf16 0.9 of it for 1 row, 0.65 for 16 and 0.95 for 256 (AMD,
AVX512-BF16). Half-precision weights of which a CPU makes fp32 products (nn.precision) go to FBGEMM, which reads fp16,
multiplies in fp32, and takes half of the time of any other way that torch has for 1 to 32 rows. For up to 4 rows it is
also faster than oneDNN's bf16 (0.7 of the time) before AMD's Zen 5, where it takes 1.08 to 1.15 of the time. Scaled by
a power of two, a bf16 weight is exact in fp16 unless it is below 2^-32 of the largest of its matrix, and then wrong by
2^-41 of that one at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.kernels.torch_private import (
    fp16_linear,
    fp16_pack,
    has_fp16_linear,
    has_onednn_bf16,
    has_onednn_linear,
    onednn_linear,
    onednn_pack,
)

_LARGE_WEIGHT = 1 << 18  # elements; the operator's overhead is 20 us, in which a smaller product is complete
_MIN_WORK = 1 << 22  # elements x rows


def _processor() -> tuple[str, int]:
    """Return vendor and family of the processor as /proc/cpuinfo gives them; empty and 0 where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "", 0
    found = (re.search(rf"^{name}\s*: (\w+)$", text, re.MULTILINE) for name in ("vendor_id", "cpu family"))
    vendor, family = (match[1] if match else "" for match in found)
    return vendor, int(family or 0)


_HAS_ONEDNN = has_onednn_linear()
_VENDOR, _FAMILY = _processor()
_MIN_ROWS = 2 if _VENDOR == "GenuineIntel" else 1
FEW_ROWS_BY_FBGEMM = _VENDOR != "AuthenticAMD" or _FAMILY < 26
"""Whether FBGEMM's fp16 is faster than oneDNN's bf16 for few rows: not from AMD's Zen 5 on."""


def min_rows(weight: Tensor) -> int | None:
    """Return the number of rows of x from which oneDNN is faster for x W^T, None if never. The weight is frozen."""
    if not _HAS_ONEDNN or weight.dtype != torch.float32 or not is_host(weight.device):
        return None
    return max(_MIN_ROWS, 1 if weight.numel() >= _LARGE_WEIGHT else -(-_MIN_WORK // max(1, weight.numel())))


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether to compute x W^T with oneDNN."""
    if x.dtype != torch.float32 or weight.requires_grad or x.requires_grad:
        return False
    least = min_rows(weight)
    return least is not None and x.numel() // x.shape[-1] >= least


Product = Callable[[Tensor], Tensor]
"""y = x W^T + b, [rows, I] -> [rows, O], in the dtype of x."""

_ROWS_PACKED_FOR = 16  # oneDNN's layout for them is as fast for 1 and for 512 rows
_FEW_ROWS = 4  # FBGEMM is faster for them than oneDNN in bf16
_PACKED_AT_ONCE = 1 << 23  # elements: a vocabulary is widened to fp32 part by part


@dataclass
class Packing:
    """Copies weights of a model into faster layouts.

    Attributes:
        for_few_rows: Whether bf16 weights are copied into a second layout too, which is faster for few rows.
        num_bytes: of the copies made.
    """

    for_few_rows: bool = False
    num_bytes: int = 0

    def product(self, weight: Tensor, bias: Tensor | None, product_dtype: torch.dtype) -> Product | None:
        """Return the product with a copy of `weight` [O, I]; None if no layout is faster.

        Args:
            bias: [O]; added before rounding.
            product_dtype: of the products of x and the weight on this processor.
        """
        if not is_host(weight.device) or product_dtype not in (torch.float32, torch.bfloat16):
            return None
        if weight.dtype != product_dtype:
            return self._by_fbgemm(weight, bias)
        in_bf16 = weight.dtype == torch.bfloat16 and weight.numel() >= _LARGE_WEIGHT and has_onednn_bf16()
        if not in_bf16 and min_rows(weight) != 1:
            return None
        packed = onednn_pack(weight, _ROWS_PACKED_FOR)
        self.num_bytes += weight.nbytes
        few = self._by_fbgemm(weight, bias) if in_bf16 and self.for_few_rows else None
        if few is None:
            return lambda x: onednn_linear(x, packed, bias)
        return lambda x: few(x) if x.shape[0] <= _FEW_ROWS else onednn_linear(x, packed, bias)

    def _by_fbgemm(self, weight: Tensor, bias: Tensor | None) -> Product | None:
        """Return the product of fp32 with a half-precision weight as fp16; None if FBGEMM has none."""
        largest = float(weight.abs().amax())
        if not has_fp16_linear() or not math.isfinite(largest):
            return None
        exponent = min(15 - math.frexp(largest)[1], 126)  # the largest is then below 2^15; fp16 ends at 65504
        rows = max(1, _PACKED_AT_ONCE // weight.shape[1])
        biases = repeat(None) if bias is None else bias.float().split(rows)
        weights = (part.float().mul_(2.0**exponent) for part in weight.split(rows))
        parts = [fp16_pack(part, own) for part, own in zip(weights, biases, strict=False)]
        self.num_bytes += weight.nbytes
        unscale = torch.tensor([2.0**-exponent])  # [1], not a scalar: the product with it is in fp32

        def product(x: Tensor) -> Tensor:
            scaled = x * unscale
            found = [fp16_linear(scaled, part) for part in parts]
            return (found[0] if len(found) == 1 else torch.cat(found, -1)).to(x.dtype)

        return product
