"""How flags without a setting here are listed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Flags that share a reason."""

    reason: str
    flags: str


@dataclass(frozen=True)
class Partly:
    """A flag whose `accepted` values need nothing, for the reason `why`, and whose others are `refused`."""

    flag: str
    accepted: str
    why: str
    refused: str
