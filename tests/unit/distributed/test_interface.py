"""The interface that leads to another host. What two hosts do with it is tried by hand in two network namespaces."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from megalith.distributed import machine
from megalith.distributed.machine import (
    interface_towards,
    interface_with,
    is_own_address,
    own_address,
    unusable_interfaces,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for as Linux answers")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "no-such-host.invalid"])
def test_nothing_leads_to_a_loopback_address(host: str) -> None:
    """A host whose own name has 127.0.1.1 must not make its ranks listen there."""
    assert own_address(host) == ""
    assert interface_towards([host]) == ""


@LINUX
def test_an_address_belongs_to_its_interface() -> None:
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("203.0.113.9") == "", "an address of no interface here"


@LINUX
def test_an_address_of_version_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfe800000000000000000000000000001 02 40 20 80     eth0\n"
    )
    monkeypatch.setattr(machine, "_ADDRESSES_V6", table)
    assert [interface_with(address) for address in ("::1", "fe80::1%eth0", "fe80::2")] == ["lo", "eth0", ""]


def test_the_first_host_that_is_reached_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"me": "", "peer": "10.0.0.1", "third": "10.0.0.2"}
    monkeypatch.setattr(machine, "own_address", addresses.__getitem__)
    monkeypatch.setattr(machine, "interface_with", {"10.0.0.1": "eth1", "10.0.0.2": "eth2"}.__getitem__)
    assert interface_towards(["me", "peer", "third"]) == "eth1"


@LINUX
def test_a_route_gives_the_address_of_this_machine() -> None:
    """Where there is a route at all, the address is one that an interface here has."""
    own = own_address("192.0.2.1")
    assert own == "" or interface_with(own) in {name for _, name in socket.if_nameindex()}


def test_own_addresses() -> None:
    assert is_own_address("127.0.0.1") and is_own_address("localhost")
    assert not is_own_address("192.0.2.1") and not is_own_address("no-such-host.invalid")


@pytest.mark.parametrize(
    ("backend", "text", "usable"),
    [
        ("gloo", "", True),
        ("gloo", "eth0", True),
        ("gloo", "eth0:1,lo", True),
        ("gloo", "eth0,eth7", False),
        ("gloo", "eth", False),
        ("gloo", "eth0,", True),
        ("nccl", "=eth0:1", True),
        ("nccl", "^lo,", True),
        ("nccl", "eth", True),
        ("nccl", "=eth", False),
        ("nccl", "=eth0", True),
        ("nccl", "ib", False),
        ("nccl", "^ib", True),
        ("nccl", "^lo,eth,docker", False),
        ("nccl", "^=lo,eth", True),
    ],
)
def test_interfaces_that_a_user_names(monkeypatch: pytest.MonkeyPatch, backend: str, text: str, usable: bool) -> None:
    monkeypatch.setattr(machine, "interfaces", lambda: {"lo": [], "eth0": [], "docker0": []})
    complaint = unusable_interfaces(backend, {f"{backend.upper()}_SOCKET_IFNAME": text})
    assert (complaint == "") is usable
    if complaint:
        assert f"{backend.upper()}_SOCKET_IFNAME={text}" in complaint and "docker0" in complaint
