"""Which network interface leads to another host: gloo is told by name, and guesses badly when it is not.

Left alone it takes the address that the host's own name has. Many hosts have 127.0.1.1 there, or nothing at all; then
each rank waits on its loopback interface for ranks of other hosts. What leads to one host leads to all.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
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


def interface_with(address: str) -> str:
    """The name of the interface that has an address of this machine; empty where that cannot be found out."""
    if not address or sys.platform != "linux":
        return ""
    found = _with_v6(address) if ":" in address else _with_v4(address)
    return next(iter(found), "")


def _with_v4(address: str) -> list[str]:
    import fcntl

    wanted, found = socket.inet_aton(address), []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if answer[20:24] == wanted:
                found.append(name)
    return found


def _with_v6(address: str) -> list[str]:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    lines = _ADDRESSES_V6.read_text().splitlines() if _ADDRESSES_V6.is_file() else []
    return [fields[-1] for fields in map(str.split, lines) if fields[0] == wanted]
