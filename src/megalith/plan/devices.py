"""Devices that a plan can be for, with what they have of memory; their rates are in `megalith.datasheet`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalith.errors import ConfigError

GIB = 2**30
BLOCK = 512
"""Bytes of whose multiples torch's allocator for GPUs makes blocks (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        name: of the product, as its driver has it.
        compute: NVIDIA's compute capability; None for a CPU.
        gib: memory; 0 if it is not known.
    """

    name: str
    compute: tuple[int, int] | None
    gib: int

    @property
    def block(self) -> int:
        """Return the bytes of whose multiples a tensor takes memory."""
        return 1 if self.compute is None else BLOCK

    @property
    def libraries(self) -> int:
        """Return the bytes that cuBLAS takes of torch's allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        if self.compute is None:
            return 0
        return 32 * 2**20 if self.compute >= (9, 0) else 8 * 2**20 + 128 * 2**10

    @property
    def context(self) -> int:
        """Return the bytes outside of torch's allocator: contexts of the device and of NCCL."""
        return 0 if self.compute is None else 3 * GIB // 2

    @property
    def room(self) -> int:
        """Return the bytes that tensors may take; the gaps between torch's blocks take 8 % of what is left."""
        return (self.gib * GIB - self.context) * (100 if self.compute is None else 92) // 100


DEVICES = {
    "CPU": Device("cpu", None, 0),
    "T4": Device("Tesla T4", (7, 5), 16),
    "V100-16GB": Device("Tesla V100-SXM2-16GB", (7, 0), 16),
    "V100": Device("Tesla V100-SXM2-32GB", (7, 0), 32),
    "V100S": Device("Tesla V100S-PCIE-32GB", (7, 0), 32),
    "RTX3090": Device("NVIDIA GeForce RTX 3090", (8, 6), 24),
    "A10": Device("NVIDIA A10", (8, 6), 24),
    "A100-40GB": Device("NVIDIA A100-SXM4-40GB", (8, 0), 40),
    "A100": Device("NVIDIA A100-SXM4-80GB", (8, 0), 80),
    "RTX4090": Device("NVIDIA GeForce RTX 4090", (8, 9), 24),
    "L40S": Device("NVIDIA L40S", (8, 9), 48),
    "H100": Device("NVIDIA H100 80GB HBM3", (9, 0), 80),
    "H200": Device("NVIDIA H200", (9, 0), 140),
    "B200": Device("NVIDIA B200", (10, 0), 179),
    "GB200": Device("NVIDIA GB200", (10, 0), 184),
    "RTX5090": Device("NVIDIA GeForce RTX 5090", (12, 0), 32),
}
"""Name in `--gpus` -> device. Memory is what drivers report, in whole GiB."""


def read_devices(text: str) -> tuple[int, Device]:
    """Read NxDEVICE, such as 8xH100; ConfigError if it is not one of these."""
    found = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip().replace(" ", ""), re.ASCII)
    device = found and {name.upper(): one for name, one in DEVICES.items()}.get(found[2].upper())
    if not found or not device or found[1] == "0":
        raise ConfigError(f"--gpus {text} is not NxDEVICE, such as 8xH100; devices are {', '.join(DEVICES)}")
    return int(found[1] or 1), device
