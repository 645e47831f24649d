"""Devices that a plan can be for: their memory, and how fast they multiply, move memory, launch and communicate.

What a device multiplies at best is its datasheet's (`megalith.datasheet`), the denominator of MFU. What it reaches is
in `Rates`: assumed from the sources that each names, or measured on the machine by `megalith doctor --measure`.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import NamedTuple

from megalith.datasheet import find_accelerator
from megalith.errors import ConfigError

GIB = 2**30
BLOCK = 512
"""Bytes of whose multiples torch's allocator for GPUs makes blocks (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""


Table = Sequence[tuple[float, float]]
"""Sizes, ascending, with the rate that each reaches."""


class Link(NamedTuple):
    """A way between ranks: seconds of a message without length, and bytes a second that a rank sends on it."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        products: dtype -> FLOPs of a matrix product and FLOP/s that it reaches, ascending; between them by logarithms.
        attention: part of the rate of products that fused attention reaches.
        memory: kind of pass (`work.Op`) -> its bytes and the bytes a second that it reaches, ascending. Without its
            dtype where it is not there with it; others are as "memory".
        launch: seconds from one launch to the next.
        asynchronous: whether launches and collectives go on while the host prepares the next ones.
        inside, between: links between devices of a node, and between nodes.
        node: devices of a node, at most.
        watts: of a device and its share of the node under load.
        source: of these figures.
        host: seconds of a micro-batch besides its launches, where these are not asynchronous.
        layer: the same of each layer in it, and again where it is recomputed.
        operations: collective -> the link within a node as it is for this one, if it was measured.
        steps: dtype of weights -> speed of whole training steps over what the rates above say, if it was measured.
        efficiency: speed of finished runs over what the other rates say (`calibration`).
    """

    products: Mapping[str, Table]
    attention: float
    memory: Mapping[str, Table]
    launch: float
    asynchronous: bool
    inside: Link
    between: Link
    node: int
    watts: float
    source: str
    host: float = 0.0
    layer: float = 0.0
    operations: Mapping[str, Link] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    efficiency: float = 1.0

    def product(self, dtype: str, flops: float, *, attention: bool = False) -> float:
        """Return the FLOP/s of a product of so many FLOPs."""
        rate = _between(self.products.get(dtype) or self.products["fp32"], flops)
        return rate * self.attention if attention else rate

    @property
    def best(self) -> float:
        """Return the FLOP/s of the fastest products."""
        return self.efficiency * max(rate for table in self.products.values() for _, rate in table)

    def passes(self, kind: str, size: float) -> float:
        """Return the bytes a second of a pass over so many bytes."""
        table = self.memory.get(kind) or self.memory.get(kind.partition(" ")[0]) or self.memory["memory"]
        return _between(table, size)


def _between(table: Table, size: float) -> float:
    """Return the rate at a size, between its neighbours by logarithms."""
    place = bisect(table, (size, inf))
    if not 0 < place < len(table):
        return table[-1][1] if place else table[0][1]
    (less, slow), (more, fast) = table[place - 1 : place + 1]
    return float(slow * (fast / slow) ** (log(size / less) / log(more / less)))


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        name: of the product, as its driver has it.
        compute: NVIDIA's compute capability; None for a CPU.
        gib: memory; 0 if it is not known.
        rates: how fast it is.
        unplanned: bytes at the peak that finished runs had beside what is planned (`calibration`).
        outside: bytes outside of torch's allocator in finished runs; None if it is not known.
        runs: number of these runs.
    """

    name: str
    compute: tuple[int, int] | None
    gib: int
    rates: Rates
    unplanned: int = 0
    outside: int | None = None
    runs: int = 0

    @property
    def file_name(self) -> str:
        """Return the name as files of its measurements have it."""
        return self.name.replace(" ", "-").replace("/", "-")

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of its datasheet in a dtype; of a CPU the best of its products."""
        known = find_accelerator(self.name)
        if known is None:
            return max(rate for _, rate in self.rates.products.get(dtype) or self.rates.products["fp32"])
        return 1e12 * known.teraflops.get(dtype, known.teraflops["fp32"])

    @property
    def block(self) -> int:
        """Return the bytes of whose multiples a tensor takes memory."""
        return 1 if self.compute is None else BLOCK

    @property
    def libraries(self) -> int:
        """Return the bytes of cuBLAS's workspaces, and others measured in runs.

        torch has a workspace for each handle, and a handle for each thread that multiplies: the one of the forward
        pass, and autograd's of the backward pass (aten/src/ATen/cuda/CublasHandlePool.cpp).
        """
        if self.compute is None:
            return 0
        return self.unplanned + 2 * (32 * 2**20 if self.compute >= (9, 0) else 8 * 2**20 + 128 * 2**10)

    @property
    def context(self) -> int:
        """Return the bytes outside of torch's allocator: contexts of the device and of NCCL."""
        if self.outside is not None:
            return self.outside
        return 0 if self.compute is None else 3 * GIB // 2

    @property
    def room(self) -> int:
        """Return the bytes that tensors may take; the gaps between torch's blocks take 8 % of what is left."""
        return (self.gib * GIB - self.context) * (100 if self.compute is None else 92) // 100


def _gpu(
    name: str,
    compute: tuple[int, int],
    gib: int,
    reached: float,
    attention: float,
    gigabytes: Sequence[float],
    watts: float,
    source: str,
    node: int = 8,
) -> Device:
    """Return a GPU.

    Args:
        reached: part of the datasheet's rate that large products reach.
        attention: part of that which fused attention reaches.
        gigabytes: a second: of memory by the datasheet, sent to another GPU of the node, sent to another node.
        source: of `reached`.
    """
    known = find_accelerator(name)
    assert known is not None, name
    products = {}
    for dtype in ("fp32", "fp16", "bf16"):
        tensor = "tf32" if dtype == "fp32" and "tf32" in known.teraflops else dtype
        best = reached * 1e12 * known.teraflops.get(tensor, known.teraflops["fp32"])
        products[dtype] = [(size, size / (size / best + START)) for size in (2.0**n for n in range(26, 46, 2))]
    memory, inside, between = (1e9 * one for one in gigabytes)
    links = Link(1e-5, inside), Link(2e-5, between)
    rates = Rates(
        products, attention, {"memory": [(1, SHARE_OF_BANDWIDTH * memory)]}, LAUNCH, True, *links, node, watts, source
    )
    return Device(name, compute, gib, rates)


START = 8e-6
"""Seconds by which a product on a GPU takes longer than its FLOPs at the rate of large ones: on an RTX 5090 products of
1024 x 1024 x K take 22.6 us for K 1024 and 57.3 us for 4096 (mamf-finder, huggingface.co/datasets/dnakov/consumer-mamf,
2025-10-20), of which 11 us do not depend on K; data center GPUs are not slower to start."""
LAUNCH = 5e-6
"""Seconds from one launch of eager PyTorch to the next: between the bounds of benchmarks/results/gpu_predicted.json."""
SHARE_OF_BANDWIDTH = 0.85
"""Part of the datasheet's bandwidth that passes over memory reach: A100 1.38 of 1.56, H100 2.9 of 3.35 TB/s or so."""

_MAMF = "bf16 products: MAMF table of stas00/ml-engineering, compute/accelerator"
_GUESS = "products: assumed, no measurement is known"

CPU_RATES = Rates(
    {"fp32": [(1e6, 2e10), (1e8, 8e10), (1e9, 1e11)], "bf16": [(1e6, 2e10), (1e8, 1e11), (1e9, 2.1e11)]},
    attention=0.5,
    memory={"memory": [(1e6, 8e9)], "gelu": [(1e6, 2e9)], "math": [(1e6, 2e9)], "random": [(1e6, 1e9)]},
    launch=1.2e-5,
    asynchronous=False,
    inside=Link(1e-4, 1e9),
    between=Link(2e-4, 1e8),
    node=1 << 30,
    watts=50.0,
    source="one thread of an AVX-512 core (docs/architecture.md#measurements); megalith doctor --measure replaces it",
)

DEVICES = {
    "CPU": Device("cpu", None, 0, CPU_RATES),
    "T4": _gpu("Tesla T4", (7, 5), 16, 0.45, 0.3, (320, 6, 3), 90, _GUESS),
    "V100-16GB": _gpu("Tesla V100-SXM2-16GB", (7, 0), 16, 0.7, 0.4, (900, 110, 11), 420, _GUESS),
    "V100": _gpu("Tesla V100-SXM2-32GB", (7, 0), 32, 0.7, 0.4, (900, 110, 11), 420, _GUESS),
    "V100S": _gpu("Tesla V100S-PCIE-32GB", (7, 0), 32, 0.7, 0.4, (1134, 10, 3), 330, _GUESS),
    "RTX3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 24, 0.9, 0.7, (936, 10, 1.1), 450, _GUESS),
    "A10": _gpu("NVIDIA A10", (8, 6), 24, 0.6, 0.7, (600, 10, 1.1), 200, _GUESS),
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40, 0.869, 0.6, (1555, 230, 22), 650, _MAMF),
    "A100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 0.869, 0.6, (2039, 230, 22), 650, _MAMF),
    "RTX4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 0.9, 0.8, (1008, 8, 1.1), 550, _GUESS),
    "L40S": _gpu("NVIDIA L40S", (8, 9), 48, 0.6, 0.7, (864, 20, 10), 450, _GUESS),
    "H100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 0.803, 0.5, (3350, 360, 45), 1275, _MAMF),
    "H200": _gpu("NVIDIA H200", (9, 0), 140, 0.803, 0.5, (4800, 360, 45), 1275, _MAMF),
    "B200": _gpu("NVIDIA B200", (10, 0), 179, 0.776, 0.45, (8000, 700, 45), 1790, _MAMF),
    "GB200": _gpu("NVIDIA GB200", (10, 0), 184, 0.776, 0.45, (8000, 700, 45), 1850, _MAMF, 64),
    "RTX5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 32, 0.89, 0.8, (1792, 20, 1.1), 700, _GUESS),
}
"""Name in `--gpus` -> device. Memory is what drivers report, in whole GiB."""


def find_device(name: str) -> Device | None:
    """Return the device whose product has a name, as its driver says it."""
    return next((device for device in DEVICES.values() if device.name == name), None)


def read_devices(text: str) -> tuple[int, Device]:
    """Read NxDEVICE, such as 8xH100; ConfigError if it is not one of these."""
    found = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip().replace(" ", ""), re.ASCII)
    device = found and {name.upper(): one for name, one in DEVICES.items()}.get(found[2].upper())
    if not found or not device or found[1] == "0":
        raise ConfigError(f"--gpus {text} is not NxDEVICE, such as 8xH100; devices are {', '.join(DEVICES)}")
    return int(found[1] or 1), device
