"""Peak rates of accelerators from their datasheets: the denominator of MFU, and of whatever plans by a device's speed.

TFLOP/s of dense matrix products: without structured sparsity, with fp32 accumulation. fp32 is the rate of the ordinary
cores; the others are those of the tensor cores. A format that a device has no fast product for is absent.

Datasheets with sparse figures only were halved. Rates of 16-bit formats on GeForce cards are those with fp32
accumulation, half of those with fp16 accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """A device as its datasheet describes it.

    Attributes:
        name: of the product.
        pattern: regular expression for `torch.cuda.get_device_name`.
        teraflops: fp32, tf32, fp16, bf16 or fp8 -> TFLOP/s.
    """

    name: str
    pattern: str
    teraflops: Mapping[str, float]


def _rates(
    fp32: float,
    half: float,
    *,
    tf32: float | None = None,
    bf16: bool = True,
    fp8: float | None = None,
) -> dict[str, float]:
    """Return the rates by dtype; fp16 and bf16 are multiplied equally fast wherever there is bf16."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half if bf16 else None, "fp8": fp8}
    return {name: rate for name, rate in rates.items() if rate is not None}


ACCELERATORS = (
    # NVIDIA Grace Blackwell (GB200/GB300 NVL72) and HGX B100/B200/B300 datasheets, for one GPU
    Accelerator("GB300", r"GB300", _rates(80.0, 2500.0, tf32=1250.0, fp8=5000.0)),
    Accelerator("GB200", r"GB200", _rates(80.0, 2500.0, tf32=1250.0, fp8=5000.0)),
    Accelerator("B300", r"\bB300\b", _rates(75.0, 2250.0, tf32=1125.0, fp8=4500.0)),
    Accelerator("B200", r"\bB200\b", _rates(75.0, 2250.0, tf32=1125.0, fp8=4500.0)),
    Accelerator("B100", r"\bB100\b", _rates(60.0, 1750.0, tf32=875.0, fp8=3500.0)),
    # NVIDIA H200, GH200 Grace Hopper and H100 datasheets, H100 Tensor Core GPU Architecture whitepaper
    Accelerator("GH200", r"GH200", _rates(66.9, 989.4, tf32=494.7, fp8=1978.9)),
    Accelerator("H200 NVL", r"H200 NVL", _rates(60.0, 835.5, tf32=417.5, fp8=1670.5)),
    Accelerator("H200 SXM", r"\bH200\b", _rates(66.9, 989.4, tf32=494.7, fp8=1978.9)),
    Accelerator("H100 NVL", r"H100 NVL", _rates(60.0, 835.5, tf32=417.5, fp8=1670.5)),
    Accelerator("H100 PCIe", r"\bH[18]00 PCIe", _rates(51.2, 756.0, tf32=378.0, fp8=1513.0)),
    Accelerator("H100 SXM", r"\bH[18]00\b", _rates(66.9, 989.4, tf32=494.7, fp8=1978.9)),
    Accelerator("H20", r"\bH20\b", _rates(44.0, 148.0, tf32=74.0, fp8=296.0)),
    # NVIDIA A100, A30, A40, A10 datasheets; A10G: datasheet of the EC2 G5 instances' GPU; the A800 computes as the A100
    Accelerator("A100", r"\bA[18]00\b", _rates(19.5, 312.0, tf32=156.0)),
    Accelerator("A30", r"\bA30\b", _rates(10.3, 165.0, tf32=82.0)),
    Accelerator("A40", r"\bA40\b", _rates(37.4, 149.7, tf32=74.8)),
    Accelerator("A10G", r"\bA10G\b", _rates(35.0, 70.0, tf32=35.0)),
    Accelerator("A10", r"\bA10\b", _rates(31.2, 125.0, tf32=62.5)),
    # NVIDIA L4, L40, L40S datasheets
    Accelerator("L40S", r"\bL40S\b", _rates(91.6, 362.05, tf32=183.0, fp8=733.0)),
    Accelerator("L40", r"\bL40\b", _rates(90.5, 181.05, tf32=90.5, fp8=362.0)),
    Accelerator("L4", r"\bL4\b", _rates(30.3, 121.0, tf32=60.0, fp8=242.5)),
    # NVIDIA RTX Blackwell, Ada and Ampere GA102 GPU architecture whitepapers
    Accelerator("RTX 5090", r"RTX 5090\b(?! D| Laptop)", _rates(104.8, 209.5, tf32=104.8, fp8=419.0)),
    Accelerator("RTX 4090", r"RTX 4090\b(?! D| Laptop)", _rates(82.6, 165.2, tf32=82.6, fp8=330.3)),
    Accelerator("RTX 3090 Ti", r"RTX 3090 Ti\b", _rates(40.0, 80.0, tf32=40.0)),
    Accelerator("RTX 3090", r"RTX 3090\b", _rates(35.6, 71.0, tf32=35.6)),
    Accelerator("RTX 6000 Ada", r"RTX 6000 Ada", _rates(91.1, 364.2, tf32=182.1, fp8=728.5)),
    Accelerator("RTX A6000", r"RTX A6000\b", _rates(38.7, 154.8, tf32=77.4)),
    # NVIDIA T4, V100 and V100S datasheets
    Accelerator("T4", r"\bT4\b", _rates(8.1, 65.0, bf16=False)),
    Accelerator("V100S", r"\bV100S\b", _rates(16.4, 130.0, bf16=False)),
    Accelerator("V100 PCIe", r"\bV100-PCIE", _rates(14.0, 112.0, bf16=False)),
    Accelerator("V100 SXM", r"\bV100\b", _rates(15.7, 125.0, bf16=False)),
)
"""The first whose pattern is found in the name of a device is that device."""


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the accelerator that a driver calls by this name, None for one that is not in the table.

    An instance of a partitioned GPU ("NVIDIA A100-SXM4-40GB MIG 1g.5gb") has a part of the rate of the whole: None.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((known for known in ACCELERATORS if re.search(known.pattern, device_name)), None)
