"""What a result was measured on: processor, versions, commit, and how busy the machine was with other work."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "gigatoken", "orjson", "llama_cpp_python", "numpy", "megalith")
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")
"""Flags of /proc/cpuinfo that decide how fast a processor multiplies; the last two are ARM's."""
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
QUIET_LOAD, QUIET_STEAL = 0.5, 0.01
"""Load average and share of the processors' time taken by the host above which a result is marked."""


def describe() -> dict[str, Any]:
    """Return the processor, its features, the cores of this process, and versions."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:(.*)", info, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "features": [name for name in FEATURES if name in flags],
        "cores": num_cores(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def name_of(machine: Mapping[str, Any]) -> str:
    """Return a name for files: the maker of the processor and its last feature, as in `amd-avx512`."""
    processor = machine["processor"].lower()
    maker = next((maker for maker in ("amd", "intel", "arm") if maker in processor), processor)
    short = {"avx512f": "avx512", "avx512_bf16": "avx512", "amx_tile": "amx", "amx_bf16": "amx"}
    kind = short.get(last := (machine["features"] or [""])[-1], last)
    return re.sub(r"\W+", "-", f"{maker} {kind}").strip("-")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str:
    """Return the commit of this clone, with `-dirty` if source or benchmarks differ from it; empty outside a clone."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=8", "HEAD")
        return f"{head}-dirty" if head and git("status", "--porcelain", "--", "../src", "*.py", "peers") else head
    except OSError:  # there is no git
        return ""


class Disturbance:
    """Other work on the machine: its load average at the start, and the time that the host took since then."""

    def __init__(self, load: float) -> None:
        self.load = load
        self._began, self._stolen = time.perf_counter(), _stolen_seconds()

    def record(self) -> dict[str, float]:
        """Return the load average before and the share of the processors' time that was stolen meanwhile."""
        seconds = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        stolen = (_stolen_seconds() - self._stolen) / seconds if seconds else 0.0
        return {"load_before": round(self.load, 2), "stolen": round(stolen, 4)}


def is_disturbed(record: Mapping[str, Any]) -> bool:
    """Return whether a result must be marked as measured beside other work."""
    return record.get("load_before", 0.0) > QUIET_LOAD or record.get("stolen", 0.0) > QUIET_STEAL


def _stolen_seconds() -> float:
    """Return the steal time of all processors since boot: the eighth figure of the first line of /proc/stat."""
    figures = _read("/proc/stat").partition("\n")[0].split()[1:]
    return int(figures[7]) / os.sysconf("SC_CLK_TCK") if len(figures) > 7 else 0.0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
