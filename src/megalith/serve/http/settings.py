"""Where the server listens, who may use it, and the limits that protect it. Imports neither torch nor FastAPI."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

_MEBIBYTE = 1 << 20
MOST_ADAPTERS = 64
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True)
class Limits:
    """Bounds on what a client may cost; times in seconds."""

    body_bytes: int = 4 * _MEBIBYTE
    header_bytes: int = 32 * 1024
    headers: int = 100
    body_seconds: float = 20.0  # to send the body
    header_seconds: float = 10.0  # to send the headers, from the connection or the first byte of a later request on
    stalled_seconds: float = 30.0  # for a client to read from a full socket before it is dropped
    lingering_seconds: float = 30.0  # for a client to finish sending after an answer that leaves its body unread
    lingering_bytes: int = 64 * _MEBIBYTE  # that it may send during that time
    connections: int = 1024  # open at a time; a further one is closed at once
    waiting: int = 256  # sequences in the queue; a further one is answered with 429
    request_seconds: float = 600.0  # maximum duration of a request
    samples: int = 128  # maximum number of continuations of a request
    retry_seconds: int = 2  # value of Retry-After
    drain_seconds: float = 30.0  # for running requests to finish after SIGTERM


@dataclass(frozen=True)
class Defaults:
    """What a request of `PUT /api` gets that does not say it; the flags of the launch set them."""

    tokens_to_generate: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    length: int | None = None  # of prompt and answer, if a request names no number of tokens; None: no rule
    max_tokens: int | None = None  # prompts x length that are refused above (--max-tokens-to-oom); None: no limit


@dataclass(frozen=True)
class ServerSettings:
    """How the server is reached."""

    host: str = "127.0.0.1"
    port: int = 5000
    model_name: str = "megalith"
    api_keys: tuple[str, ...] = ()  # any of them opens the API; none: everyone who reaches the port may use it
    allowed_hosts: tuple[str, ...] = ()  # names under which the server may be addressed besides its own
    allowed_origins: tuple[str, ...] = ()  # web pages of other origins that may use it, as `https://host:port`
    open_to_all: bool = False  # listen beyond this machine without a key
    log_prompts: bool = True
    adapters: tuple[str, ...] = ()  # LoRA adapters beside the model, as NAME=FOLDER
    adapter_folder: Path | None = None  # in which clients may load and unload adapters; None: they may not
    limits: Limits = Limits()

    @property
    def adapter_paths(self) -> dict[str, Path]:
        """Name -> folder of the adapters beside the model."""
        return {name: Path(folder) for name, _, folder in (given.partition("=") for given in self.adapters)}

    def violations(self) -> list[str]:
        """List the invalid values with flag, value and rule."""
        found = []
        if not 0 <= self.port <= 65535:
            found.append(f"--port {self.port} is not between 1 and 65535")
        if not is_loopback(self.host) and not self.api_keys and not self.open_to_all:
            found.append(
                f"--host {self.host} lets other machines in, and there is no key: give --api-key-file FILE (or set "
                "MEGALITH_API_KEY), or --i-know-it-is-open if everyone who reaches the port may use it"
            )
        for key in self.api_keys:
            if not key.strip() or not key.isascii() or not key.isprintable() or " " in key:
                found.append("--api-key is empty or has characters that no header carries; use letters and digits")
        found += [
            f"--allowed-origin {origin} is no origin, as browsers send it; give SCHEME://HOST or SCHEME://HOST:PORT in "
            "small letters, without a path"
            for origin in self.allowed_origins
            if not _ORIGIN.fullmatch(origin)
        ]
        for flag, value in (
            ("--max-body-bytes", self.limits.body_bytes),
            ("--max-queue", self.limits.waiting),
            ("--request-timeout", self.limits.request_seconds),
            ("--max-connections", self.limits.connections),
        ):
            if not value > 0:  # also NaN
                found.append(f"{flag} {value:g} is not above 0")
        if not self.limits.drain_seconds >= 0:
            found.append(f"--drain-timeout {self.limits.drain_seconds:g} is not a number of 0 or more")
        return found + self._adapter_violations()

    def _adapter_violations(self) -> list[str]:
        found = [f"--lora {given}: give NAME=FOLDER" for given in self.adapters if not given.partition("=")[2]]
        found += [f"--lora {name}: {wrong}" for name in self.adapter_paths if (wrong := name_problem(name))]
        if len(self.adapter_paths) < len(self.adapters):
            found.append("--lora gives a name twice")
        if len(self.adapters) > MOST_ADAPTERS:
            found.append(f"--lora: {len(self.adapters)} adapters are more than {MOST_ADAPTERS}")
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            found.append(f"--lora-dir {self.adapter_folder} is no folder")
        if self.adapter_folder is not None and not self.api_keys and not is_loopback(self.host):
            found.append(
                "--lora-dir lets everyone who reaches the port change what is served; give --api-key-file FILE"
            )
        return found


def name_problem(name: str) -> str | None:
    """Return what is wrong with the name of adapters, or None."""
    if _ADAPTER_NAME.fullmatch(name):
        return None
    return f"{name[:128]!a} is no name of adapters; use letters, digits, '.', '_', '-' and '/', 128 at most"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener on that address."""
    if host == "localhost":
        return True
    address = ip_address(host)
    return address is not None and address.is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
