"""Diagnosis of NVIDIA GPUs that torch cannot use, so that `--device auto` does not silently choose the CPU.

Without a GPU this looks up a few file names; `nvidia-smi` runs only if there is a GPU that torch does not find.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalith.torch_builds import Gpu, query_gpus, remedy, run_nvidia_smi, runs

_ROOT = Path("/")
_WSL = "usr/lib/wsl/lib/nvidia-smi"
_OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""CUDA's major version -> the oldest driver for all its minor versions (NVIDIA, "CUDA Compatibility", minor version
compatibility)."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA driver and GPUs of this machine.

    Attributes:
        version: such as 535.129.03; empty if unknown.
        cuda: newest CUDA version that it supports, such as 12.2; empty if unknown.
        forbidden: one device file, if this process may open none: not allocated to the job (SLURM's ConstrainDevices),
            or of a group that the user is not in.
    """

    version: str
    cuda: str
    gpus: tuple[str, ...]
    nodes: bool = True
    forbidden: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)) or "an NVIDIA GPU"
        supported = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{names} (driver {self.version or 'of unknown version'}{supported})"


def find_driver(root: Path = _ROOT) -> Driver | None:
    """Return the driver and GPUs that `/proc`, `/dev` and `nvidia-smi` show; None without an NVIDIA GPU."""
    nodes = _has_nodes(root)
    about = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    wsl = (root / _WSL).exists()
    if not (nodes or about or wsl):
        return None
    output = run_nvidia_smi(root) or ""
    found = re.search(r"(?:Driver|KMD) Version:\s*([\d.]+)", output)
    version = found[1] if found else _kernel_module(root / "proc/driver/nvidia/version")
    gpus = [match[1] for path in about if (match := re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.M))]
    gpus = gpus or re.findall(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|", output, re.M)
    if wsl and not gpus:
        return None
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", output)
    return Driver(version, cuda[1] if cuda else "", tuple(gpus), nodes or wsl, _forbidden(root))


def _has_nodes(root: Path) -> bool:
    return any(root.glob("dev/nvidia[0-9]*"))


def _forbidden(root: Path) -> str:
    found = sorted(root.glob("dev/nvidia[0-9]*"))
    for node in found:
        try:
            os.close(os.open(node, os.O_RDWR))
        except PermissionError:  # a cgroup may forbid what the file mode allows
            continue
        except OSError:
            pass
        return ""
    return str(found[0]) if found else ""


def _kernel_module(file: Path) -> str:
    """Return the version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 ...`."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text(), re.M) if file.exists() else None
    return found[1] if found else ""


def is_hidden(root: Path, environ: Mapping[str, str]) -> bool:
    """Return whether the user or the scheduler has hidden the GPUs from this process.

    NVIDIA_VISIBLE_DEVICES says so only where there are no device files: the Container Device Interface (Podman,
    Kubernetes) sets it to "void" in containers that it has given GPUs, so that the older hook adds no others.
    """
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return True
    return environ.get("NVIDIA_VISIBLE_DEVICES") in ("", "void", "none") and not _has_nodes(root)


def unused_gpu(root: Path | None = None, environ: Mapping[str, str] = os.environ, processes: int = 1) -> str:
    """Return which GPU torch cannot use, why, and a remedy; "" if there is none.

    Only the first `processes` GPUs are checked, so that an old display GPU after them is no error.
    """
    if torch.cuda.is_available():
        return _without_kernels(root or _ROOT, processes) if torch.version.cuda else ""
    root = root or _ROOT
    if is_hidden(root, environ) or torch.version.hip or (driver := find_driver(root)) is None:
        return ""
    return f"this machine has {driver}, and torch {torch.__version__} cannot use it: {_reason(driver, root, environ)}"


def _reason(driver: Driver, root: Path, environ: Mapping[str, str]) -> str:
    built = torch.version.cuda
    if built is None:
        for_it = f" for CUDA {driver.cuda} or older" if driver.cuda else ""
        known = remedy(query_gpus(root), torch.__version__)
        return f"it is built without CUDA. {known or f'Install a build of torch{for_it}'}"
    if driver.cuda and _major(driver.cuda) < _major(built):
        oldest = _OLDEST_DRIVERS.get(_major(built))
        newer = f"to {oldest} or newer" if oldest else "to a newer one"
        known = remedy(query_gpus(root), torch.__version__)
        known = known or f"Update the driver {newer}, or install a build of torch for CUDA {_major(driver.cuda)}"
        return f"it is built for CUDA {built}, which is newer than the driver. {known}"
    if not driver.nodes:
        return "there are no /dev/nvidia* here. Start the container with GPUs (docker run --gpus all)"
    if driver.forbidden:
        return (
            f"this process may not open {driver.forbidden}. Ask the scheduler for a GPU (srun --gres=gpu:1), or have "
            "the group of that file"
        )
    if visible := environ.get("CUDA_VISIBLE_DEVICES"):
        return f"CUDA_VISIBLE_DEVICES={visible} selects no GPU that works. Correct or unset it"
    try:
        torch.cuda.init()
        problem = "it finds no CUDA device"
    except (RuntimeError, AssertionError) as error:
        problem = str(error).strip().splitlines()[0].rstrip(".")
    return f"{problem}. Check that nvidia-smi works, and that driver and torch (built for CUDA {built}) match"


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _without_kernels(root: Path, processes: int) -> str:
    """Return a message if this build of torch lacks kernels for one of the first `processes` GPUs; else ""."""
    if not (built := torch.cuda.get_arch_list()):
        return ""
    numbers = range(min(torch.cuda.device_count(), processes))
    gpus = [Gpu(torch.cuda.get_device_name(number), "", torch.cuda.get_device_capability(number)) for number in numbers]
    for gpu in gpus:
        if gpu.capability and not any(runs(arch, gpu.capability) for arch in built):
            driver = find_driver(root)
            version = driver.version if driver else ""
            known = remedy([replace(other, driver=version) for other in gpus], torch.__version__) if version else ""
            return (
                f"torch {torch.__version__} (built for CUDA {torch.version.cuda}) has no kernels for {gpu}: it has "
                f"{', '.join(built)}. {known or 'Install a build of torch that has them'}, or hide this GPU by "
                "CUDA_VISIBLE_DEVICES"
            )
    return ""
