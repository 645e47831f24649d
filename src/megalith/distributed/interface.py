"""Which network interface leads to another host: gloo is told by name, and guesses badly when it is not.

Left alone it takes the address that the host's own name has. Many hosts have 127.0.1.1 there, or nothing at all; then
each rank waits on its loopback interface for ranks of other hosts. What leads to one host leads to all.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_ANY_PORT = 9  # nothing is sent to it
_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def interface_towards(hosts: Iterable[str]) -> str:
    """The interface that leads to the first of these hosts that is not this machine; empty where it is not known.

    Args:
        hosts: names or addresses.
    """
    return next((interface_with(own) for own in map(own_address, hosts) if own), "")


def own_address(towards: str) -> str:
    """The address of this machine as another one sees it; empty if that is a loopback address, or no route is known.

    Args:
        towards: name or address of the other.
    """
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

    GLOO_SOCKET_IFNAME is a list of names. NCCL_SOCKET_IFNAME is one of prefixes, of names behind "=", and of what to
    leave out behind "^".
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
    """The variable that names the network interfaces of a backend."""
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
