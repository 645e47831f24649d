"""How much memory the processes of this machine may hold: of the machine, their control group, and `ulimit -v`.

Nothing here needs torch, so that the supervisor and `megalith doctor` can ask too.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def machine_memory() -> int:
    """Bytes of memory of the machine; 0 where it is not known."""
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def memory_limit(proc: Path = _PROC) -> int:
    """Bytes that this process may hold; 0 where that is not known.

    Args:
        proc: where /proc is mounted.
    """
    limits = [machine_memory(), resource.getrlimit(resource.RLIMIT_AS)[0]]
    for folder in _memory_groups(proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the root group has no limit, and v2 says "max"
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit > 0), default=0)


def oom_kills(proc: Path = _PROC) -> int:
    """How many processes of this control group the kernel has killed for want of memory; of the machine without one."""
    group = next(_memory_groups(proc), Path("/nonexistent"))
    for file in (group / "memory.events", group / "memory.oom_control", proc / "vmstat"):
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _memory_groups(proc: Path) -> Iterator[Path]:
    """The folder of the control group that limits the memory of this process, and those of its ancestors."""
    with suppress(OSError, StopIteration):
        mount, root, path = next(_memory_hierarchies(proc))
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = mount / inside.lstrip("/")
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _memory_hierarchies(proc: Path) -> Iterator[tuple[Path, str, str]]:
    """Mount point, mounted group, and group of this process, of each hierarchy that may limit memory; version 1 first.

    Both versions may be mounted: then version 1 has the memory if it names it.
    """
    groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
    for kind, wanted in (("cgroup", "memory"), ("cgroup2", "")):
        for fields in mounts:
            filesystem = fields[fields.index("-") + 1 :]
            if filesystem[0] != kind or (wanted and wanted not in filesystem[-1].split(",")):
                continue
            for _, controllers, path in groups:
                if wanted in controllers.split(","):
                    mount = fields[4].encode().decode("unicode_escape")
                    yield Path(mount), fields[3], path
