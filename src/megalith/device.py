"""What a device can do: the only module that tells kinds of devices apart.

`capability_of` describes a `torch.device` by one value, `Capability`, and whoever decides by device asks it. What torch
does on every accelerator alike is `torch.accelerator`'s; what it has for CUDA alone is called here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalith.datasheet import Accelerator, find_accelerator

cuda_runtime, nccl_version = torch.cuda.cudart, torch.cuda.nccl.version  # for CUDA alone

VOLTA, AMPERE = (7, 0), (8, 0)
"""Compute capabilities: tensor cores, and with them fast fp16; fast bf16, flash attention and cuDNN's."""

_BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}  # the last one is ARM's
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ISA_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
_CONVERTING = {"AVX2_VNNI_2": {"avx_ne_convert"}}  # what oneDNN uses of the features under such a limit
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Capability:
    """What a device can do; a plain value, which needs no such device.

    Attributes:
        kind: torch's type of device: "cpu"; "cuda" for NVIDIA, and for AMD under ROCm; "npu"; ...
        name: of the product, as its driver has it.
        half: 16-bit dtypes with fast matrix products, the preferred one first.
        attention: fused kernels of torch SDPA on an accelerator: flash, cudnn, efficient (memory-efficient).
        compute: NVIDIA's compute capability; None for others.
        memory: bytes; 0 if not known.
    """

    kind: str
    name: str
    half: tuple[torch.dtype, ...]
    attention: tuple[str, ...] = ()
    compute: tuple[int, int] | None = None
    memory: int = 0

    @property
    def title(self) -> str:
        """Return the name, of an NVIDIA GPU with its architecture."""
        return self.name if self.compute is None else f"{self.name} (sm_{self.compute[0]}{self.compute[1]})"

    @property
    def fastest(self) -> torch.dtype:
        """Return the dtype to train in where the user does not choose one."""
        return self.half[0] if self.half else torch.float32

    @property
    def has_windowed_flash(self) -> bool:
        """Return whether torch's flash kernel takes a sliding window and returns the lse of packed documents."""
        return self.compute is not None and "flash" in self.attention

    @property
    def has_grouped_products(self) -> bool:
        """Return whether torch has one kernel for the bf16 products of all experts."""
        return self.kind == "cuda" and torch.bfloat16 in self.half

    @property
    def compiles(self) -> bool:
        """Return whether Triton, in whose language torch.compile writes kernels, supports the device."""
        return self.compute is None or self.compute >= VOLTA

    @property
    def datasheet(self) -> Accelerator | None:
        """Return the peak rates of the product; None if it is not in the table."""
        return find_accelerator(self.name)


def nvidia(name: str, compute: tuple[int, int], memory: int = 0) -> Capability:
    """Describe an NVIDIA GPU. The memory-efficient kernel runs on all that torch supports."""
    if compute >= AMPERE:
        half, kernels = (torch.bfloat16, torch.float16), ("flash", "cudnn", "efficient")
        return Capability("cuda", name, half, kernels, compute, memory)
    return Capability("cuda", name, (torch.float16,) if compute >= VOLTA else (), ("efficient",), compute, memory)


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


CPU_FEATURES = _read_features()
HOST = Capability("cpu", "cpu", (torch.bfloat16,) if has_fast_bf16(CPU_FEATURES, os.environ) else ())
DESCRIBED: dict[torch.device, Capability] = {}
"""Accelerators whose capability was looked up, or set by whoever knows better."""


HOST_KINDS: tuple[str, ...] = ("cpu",)
"""Kinds of devices that compute as the CPU does; a plan for CPUs adds torch's meta device."""


def is_host(device: torch.device) -> bool:
    """Return whether tensors are in the memory of the CPU, which computes when it is called."""
    return device.type in HOST_KINDS


def has_memory(device: torch.device) -> bool:
    """Return whether tensors have values, and not shapes alone as on torch's meta device."""
    return device.type != "meta"


def is_cuda(device: torch.device) -> bool:
    """Return whether a device has NVIDIA's tools and torch's CUDA-only functions, or AMD's under their names."""
    return device.type == "cuda"


def other_accelerator() -> str | None:
    """Return the kind of the accelerator of this process that torch can use and that is not CUDA's, or None.

    Apple's counts as none: it has no fp64, in which norms and losses are read.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in ("cuda", "mps") else found.type


def capability_of(device: torch.device) -> Capability:
    """Return what a device can do."""
    if is_host(device):
        return HOST
    if (found := DESCRIBED.get(device)) is None:  # a dictionary, and no `functools.cache`: torch.compile follows it
        found = DESCRIBED[device] = _describe(device)
    return found


def _describe(device: torch.device) -> Capability:
    half = (torch.bfloat16, torch.float16)
    if not is_cuda(device):
        name_of = getattr(torch.get_device_module(device), "get_device_name", None)
        return Capability(device.type, name_of(device) if name_of else device.type, half)
    found = torch.cuda.get_device_properties(device)
    able = nvidia(found.name, (found.major, found.minor), found.total_memory)
    if torch.version.hip:
        able = Capability("cuda", found.name, half, ("flash", "efficient"), memory=found.total_memory)
    if not torch.backends.cuda.is_flash_attention_available():  # a build without it
        able = replace(able, attention=tuple(kernel for kernel in able.attention if kernel != "flash"))
    return able


def lacks_peer_access(device: torch.device) -> bool:
    """Return whether this GPU cannot reach another visible one directly, as GeForce cards since the RTX 40 series."""
    others = (number for number in range(torch.accelerator.device_count()) if number != device.index)
    reaches = torch.cuda.can_device_access_peer
    return is_cuda(device) and not all(reaches(device, other) for other in others)


def prefer_attention(kernel: str, device: torch.device) -> None:
    """Let torch SDPA choose among kernels: all ("auto"), without cuDNN's ("flash") or without flash ("cudnn")."""
    if is_cuda(device):
        torch.backends.cuda.enable_cudnn_sdp(kernel != "flash")
        torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
