"""Limits of memory and processor time, network interfaces and addresses of this machine.

This module does not import torch, so that the supervisor and `megalith doctor` can use it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def processor() -> str:
    """Return the name of the processor and those of its instruction sets that training uses."""
    try:
        text = (_PROC / "cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    named = re.search(r"^(?:model name|Model)\s*:\s*(.+)", text, re.MULTILINE)
    has = set(text.split())
    return f"{named[1] if named else platform.machine()} ({' '.join(each for each in _INSTRUCTIONS if each in has)})"


def machine_memory() -> int:
    """Return the machine's memory in bytes; 0 if unknown."""
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def memory_limit(proc: Path = _PROC) -> int:
    """Return the bytes that this process may allocate; 0 if unknown."""
    limits = [machine_memory(), resource.getrlimit(resource.RLIMIT_AS)[0]]
    for folder in _groups(proc, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the root group has no limit, and v2 says "max"
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit > 0), default=0)


def oom_kills(proc: Path = _PROC) -> int:
    """Return how many processes of this cgroup (without one: of the machine) the OOM killer has ended."""
    group = next(_groups(proc, "memory"), Path("/nonexistent"))
    for file in (group / "memory.events", group / "memory.oom_control", proc / "vmstat"):
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def bound_cores() -> int:
    """Return the number of cores that this process is bound to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(proc: Path = _PROC) -> int:
    """Return the number of cores that this process may compute on at once: those that it is bound to, or fewer.

    A container may have a share of the time of all cores (`docker run --cpus`, limits of Kubernetes), rounded up here.
    With more threads than that all of them are stopped for most of the time: on two cores of which one may be used, a
    training step with two threads took 8 times as long as with one (benchmarks/results/README.md).
    """
    cores = bound_cores()
    for folder in _groups(proc, "cpu"):
        with suppress(OSError, ValueError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # version 1 says -1 where there is no limit, version 2 "max"
                cores = min(cores, -(-int(quota) // int(period)))
    return cores


def _groups(proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of the cgroup in which a controller limits this process, then those of its ancestors."""
    with suppress(OSError, StopIteration):
        mount, root, path = next(_hierarchies(proc, controller))
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = mount / inside.lstrip("/")
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _hierarchies(proc: Path, controller: str) -> Iterator[tuple[Path, str, str]]:
    """Yield mount point, mounted group, and this process's group of each hierarchy that may have a controller.

    If both cgroup versions are mounted, version 1 comes first, as it has the controller if it lists it.
    """
    groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
    for kind, wanted in (("cgroup", controller), ("cgroup2", "")):
        for fields in mounts:
            filesystem = fields[fields.index("-") + 1 :]
            if filesystem[0] != kind or (wanted and wanted not in filesystem[-1].split(",")):
                continue
            for _, controllers, path in groups:
                if wanted in controllers.split(","):
                    mount = fields[4].encode().decode("unicode_escape")
                    yield Path(mount), fields[3], path


_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_GAP_SECONDS = 15.0  # longer than most single waits for other machines
_ANY_PORT = 9  # nothing is sent to it
_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def interface_towards(hosts: Iterable[str]) -> str:
    """Return the interface with a route to the first of these hosts that is not this machine; "" if unknown."""
    return next((interface_with(own) for own in map(own_address, hosts) if own), "")


def own_address(towards: str) -> str:
    """Return this machine's address as seen from host `towards`; "" if that is a loopback address or unknown."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)  # chooses a route, sends nothing
            own = str(asking.getsockname()[0])
    except OSError:
        return ""
    return "" if own.startswith("127.") or own == "::1" else own


def is_own_address(host: str) -> bool:
    """Return whether a host name or address belongs to this machine; that of a service in front of it does not."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def interface_with(address: str) -> str:
    """Return the name of the interface that has an address; "" if unknown."""
    address = address.partition("%")[0]
    return next((name for name, addresses in interfaces().items() if address in addresses), "")


def interfaces() -> dict[str, list[str]]:
    """Return this machine's interfaces, name -> addresses; without addresses if they cannot be determined."""
    v6 = _v6_addresses()
    names = dict.fromkeys([*(name for _, name in socket.if_nameindex()), *v6])
    return {name: [*_v4_of(name), *v6.get(name, [])] for name in names}


def unusable_interfaces(backend: str, environ: Mapping[str, str]) -> str:
    """Return which of the interfaces that the user names for a backend do not exist, as a message; "" if all do.

    GLOO_SOCKET_IFNAME lists names; NCCL_SOCKET_IFNAME lists prefixes, exact names after "=", or exclusions after "^".
    """
    variable = interface_variable(backend)
    text, names = environ.get(variable, ""), list(interfaces())
    if not text:
        return ""
    if backend == "gloo":
        missing = [name for name in text.split(",") if name and name.partition(":")[0] not in names]
    else:
        missing = [] if _chosen_by_nccl(text, names) else [text]
    if not missing:
        return ""
    return f"{variable}={text}: no interface {', '.join(missing)} on this machine; it has {', '.join(names)}"


def interface_variable(backend: str) -> str:
    """Return the environment variable that names a backend's interfaces."""
    return f"{backend.upper()}_SOCKET_IFNAME"


def _chosen_by_nccl(text: str, names: Sequence[str]) -> list[str]:
    words = text.lstrip("^=").split(",")
    words = [name for word in words if (name := word.partition(":")[0])]  # NCCL accepts NAME:PORT
    if text.startswith(("=", "^=")):
        found = [name for name in names if name in words]
    else:
        found = [name for name in names if name.startswith(tuple(words))]
    return [name for name in names if name not in found] if text.startswith("^") else found


def _v4_of(name: str) -> list[str]:
    if sys.platform != "linux":
        return []
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # it has none
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def _v6_addresses() -> dict[str, list[str]]:
    lines = _ADDRESSES_V6.read_text().splitlines() if _ADDRESSES_V6.is_file() else []
    found: dict[str, list[str]] = {}
    for digits, *_, name in map(str.split, lines):
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def connection_error(host: str, port: int) -> OSError | None:
    """Try to connect to an address; return the OSError, or None on success."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        return error
    return None


class AwakeClock:
    """Clock that excludes most of the time in which this process or its machine was suspended."""

    def __init__(self) -> None:
        self._elapsed, self._seen = 0.0, time.monotonic()

    def elapsed(self) -> float:
        """Return seconds since creation; call every few seconds. A longer gap, such as a slow name server, counts in
        part."""
        now = time.monotonic()
        gap, self._seen = now - self._seen, now
        self._elapsed += min(gap, _GAP_SECONDS)
        return self._elapsed


def host_identity() -> str:
    """Return an id that is equal for processes that can signal each other, share memory and use a common loopback."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")]
    return " ".join(names)


def try_to_write(folder: Path) -> None:
    """Create the folder and write a temporary file to it; OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x" * 4096)
