"""What this machine has: memory that its processes may hold, network interfaces, and its place among others.

Nothing here needs torch, so that the supervisor and `megalith doctor` can ask too.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def machine_memory() -> int:
    """Bytes of memory of the machine; 0 where it is not known."""
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def memory_limit(proc: Path = _PROC) -> int:
    """Bytes that this process may hold; 0 where that is not known."""
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
    """Mount point, mounted group, and group of this process, of each hierarchy that may limit memory.

    Both versions may be mounted: then version 1 has the memory if it names it, and comes first.
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


_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_GAP_SECONDS = 15.0  # more than most single waits for other machines
_ANY_PORT = 9  # nothing is sent to it
_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def interface_towards(hosts: Iterable[str]) -> str:
    """The interface that leads to the first of these hosts that is not this machine; empty where it is not known."""
    return next((interface_with(own) for own in map(own_address, hosts) if own), "")


def own_address(towards: str) -> str:
    """The address of this machine as another one sees it; empty if that is a loopback address, or no route is known."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)  # chooses a route, sends nothing
            own = str(asking.getsockname()[0])
    except OSError:
        return ""
    return "" if own.startswith("127.") or own == "::1" else own


def is_own_address(host: str) -> bool:
    """Whether a name or address is one of this machine's; that of a service in front of it is not."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def interface_with(address: str) -> str:
    """The name of the interface that has an address of this machine; empty where that cannot be found out."""
    address = address.partition("%")[0]
    return next((name for name, addresses in interfaces().items() if address in addresses), "")


def interfaces() -> dict[str, list[str]]:
    """The interfaces of this machine with their addresses; without addresses where those cannot be found out."""
    v6 = _v6_addresses()
    names = dict.fromkeys([*(name for _, name in socket.if_nameindex()), *v6])
    return {name: [*_v4_of(name), *v6.get(name, [])] for name in names}


def unusable_interfaces(backend: str, environ: Mapping[str, str]) -> str:
    """Return what is wrong with the interfaces that the user names for a backend; empty if nothing is.

    GLOO_SOCKET_IFNAME lists names, NCCL_SOCKET_IFNAME prefixes, names behind "=", and what to leave out behind "^".
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
    return f"{variable}={text}: there is no interface {', '.join(missing)} here; there are {', '.join(names)}"


def interface_variable(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"


def _chosen_by_nccl(text: str, names: Sequence[str]) -> list[str]:
    words = text.lstrip("^=").split(",")
    words = [name for word in words if (name := word.partition(":")[0])]  # NCCL takes a port behind each
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


def refusal(host: str, port: int) -> OSError | None:
    """Knock at an address; why no connection can be made, None where someone opens."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        return error
    return None


class AwakeClock:
    """Seconds since it was made, without most of those in which this process or its machine was suspended."""

    def __init__(self) -> None:
        self._elapsed, self._seen = 0.0, time.monotonic()

    def elapsed(self) -> float:
        """To be called every few seconds. Of a longer gap a part counts: it may have been a wait for a name server."""
        now = time.monotonic()
        gap, self._seen = now - self._seen, now
        self._elapsed += min(gap, _GAP_SECONDS)
        return self._elapsed


def place() -> str:
    """What is equal for processes that can signal each other, share memory, and reach each other over loopback."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")]
    return " ".join(names)
