"""Builds of torch for NVIDIA GPUs: which of them has kernels for the GPUs of a machine and starts on its driver.

Standard library only: scripts/choose_torch.py asks it before anything is installed, and `--device auto` for the remedy
where the installed build does not serve. The architectures are those of x86-64.

Source: the table "PyTorch CUDA Support Matrix" in PyTorch's repository for 2.11 to 2.14; pytorch/pytorch#190385 for
2.15, which has no build for CUDA 12; NVIDIA, "CUDA Compatibility", minor version compatibility, for the oldest drivers.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.errors import ConfigError, make_install

INDEX = "https://download.pytorch.org/whl"
_WSL = "usr/lib/wsl/lib/nvidia-smi"
_NVIDIA_SMI_SECONDS = 30.0
_FIELDS = ("name", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; `capability` is None where its version does not say."""

    name: str
    driver: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})" if self.capability else self.name


@dataclass(frozen=True)
class Build:
    """One build of torch.

    Attributes:
        name: its index under `INDEX`, which is also the local label of its version.
        oldest_driver: first major version of the driver that starts it.
        before: first version of torch that has no such build; "" if there is none.
    """

    name: str
    oldest_driver: int
    architectures: tuple[str, ...]
    before: str = ""

    def lacks_kernels(self, gpus: Sequence[Gpu]) -> list[str]:
        """Return the GPUs that it has no kernels for; one of unknown capability is taken to have some."""
        return [
            str(gpu)
            for gpu in gpus
            if gpu.capability and not any(runs(arch, gpu.capability) for arch in self.architectures)
        ]


BUILDS = (
    Build("cu130", 580, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")),
    Build("cu126", 525, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"), before="2.15"),
)
"""The preferred one first. PyPI has newer CUDA 13 builds with the same architectures and drivers."""


def runs(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture runs on a GPU: binaries within a major version, PTX on later ones."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
    if match is None:
        return True
    major, minor, specific = int(match[2]), int(match[3]), match[4] == "a"
    if specific:
        return (major, minor) == capability
    if match[1] == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def choose(gpus: Sequence[Gpu]) -> tuple[Build, str]:
    """Return the first build that serves all GPUs of a machine, and why those before it do not.

    Raises:
        ConfigError: no build serves them all.
    """
    driver = gpus[0].driver
    named, major = ", ".join(dict.fromkeys(map(str, gpus))), int(driver.partition(".")[0])
    reasons: list[str] = []
    for build in BUILDS:
        lacks, old = build.lacks_kernels(gpus), major < build.oldest_driver
        unknown = [gpu.name for gpu in gpus if gpu.capability is None]
        if unknown and not old:
            raise ConfigError(
                f"nvidia-smi does not say which compute capability {unknown[0]} has; choose a build of torch: cu126 "
                "for GPUs before Turing, else cu130"
            )
        if not lacks and not old:
            return build, "; ".join([f"{named}, driver {driver}", *reasons])
        reasons += [f"{build.name} has no kernels for {lacks[0]}"] if lacks else []
        reasons += [f"{build.name} needs driver {build.oldest_driver} or newer"] if old else []
    drivers = [build.oldest_driver for build in BUILDS if not build.lacks_kernels(gpus)]
    remedy = (
        f"update the driver to {min(drivers)} or newer"
        if drivers
        else "choose the build for one of them, and hide the others by CUDA_VISIBLE_DEVICES"
        if len(set(map(str, gpus))) > 1
        else "compute on another GPU, or on the CPU"
    )
    raise ConfigError(f"no build of torch serves {named}, driver {driver}: {'; '.join(reasons)}; {remedy}")


def query_gpus(root: Path = Path("/")) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists; none if it is missing, fails or does not answer."""
    for count in (3, 2):  # compute_cap is unknown to drivers before 510
        fields = ",".join(_FIELDS[:count])
        output = run_nvidia_smi(root, f"--query-gpu={fields}", "--format=csv,noheader")
        if output is None:
            break
        rows = [re.fullmatch(r"(.+?), (\d[\d.]*)(?:, (?:(\d+)\.(\d+)|.*))?", line) for line in output.splitlines()]
        if found := [Gpu(row[1], row[2], (int(row[3]), int(row[4])) if row[3] else None) for row in rows if row]:
            return found
    return []


def run_nvidia_smi(root: Path, *arguments: str) -> str | None:
    """Return what nvidia-smi prints; None if it is missing or does not answer."""
    program = root / _WSL
    command = [str(program) if program.exists() else "nvidia-smi", *arguments]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, errors="replace")
    except OSError:
        return None
    try:
        return process.communicate(timeout=_NVIDIA_SMI_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: a process that hangs in the driver does not end
        return None


def requirement(build: str, version: str) -> list[str]:
    """Return pip's arguments for a build; `version` is that of torch without a label, "" for the newest.

    The label keeps pip from taking another build of the same version from another index.

    Raises:
        ConfigError: this version has no such build.
    """
    before = next((known.before for known in BUILDS if known.name == build), "")
    if version and before and _numbers(version) >= _numbers(before):
        raise ConfigError(f"torch {version} has no build {build}: it ended before {before}; install an older torch")
    wanted = f"torch=={version}+{build}" if version else f"torch<{before}" if before else "torch"
    return [wanted, "--extra-index-url", f"{INDEX}/{build}"]


def remedy(gpus: Sequence[Gpu], installed: str) -> str:
    """Return the command that replaces torch by the build for these GPUs, or why there is none; "" without a GPU.

    Args:
        installed: version of torch, with or without its label.
    """
    if not gpus:
        return ""
    try:
        build, _ = choose(gpus)
    except ConfigError as error:
        return str(error)
    version = installed.partition("+")[0]
    ended = build.before and _numbers(version) >= _numbers(build.before)
    words = shlex.join(requirement(build.name, "" if ended else version))
    return f"Install the build for this machine: {make_install(f'TORCH={build.name}') or f'pip install {words}'}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
