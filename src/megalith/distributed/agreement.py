"""Facts that must be equal on all ranks, compared before anything depends on them.

Ranks that train with different settings, versions or data give wrong numbers without an error, or wait for each other
in different collectives. Settings and versions are compared at the meeting of the ranks (`launch.py`), what has to be
read first (data, tokenizer) as soon as it is.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from megalith import __version__
from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.errors import ConfigError

Facts = Mapping[str, str]
"""Name -> value, as the user should read both."""

_NAMED = 8


def versions() -> dict[str, str]:
    """The code and what it runs on."""
    return {
        "megalith": f"{__version__}, sources {source_digest()}",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def source_digest() -> str:
    """A short hash of all sources of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def difference(own: Facts, other: Facts, own_name: str, other_name: str) -> str:
    """What differs between two ranks, in one message; empty if nothing does."""
    unequal = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    if not unequal:
        return ""
    lines = [
        f"  {name}: {own.get(name, 'absent')} on {own_name}, {other.get(name, 'absent')} on {other_name}"
        for name in unequal[:_NAMED]
    ]
    if len(unequal) > _NAMED:
        lines.append(f"  and {len(unequal) - _NAMED} more")
    return "\n".join([f"{own_name} and {other_name} are not set up alike; all ranks of a run must be:", *lines])


def refuse_unequal(facts: Facts, axis: Axis) -> None:
    """See that all ranks of the axis hold the same facts; they call this together.

    Raises:
        ConfigError: they do not, on all ranks alike; names two that differ, and in what.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    digests = comm.all_gather_objects(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), axis)
    if len(set(digests)) == 1:
        return
    everywhere = comm.all_gather_objects((socket.gethostname(), dict(facts)), axis)
    usual = max(digests, key=digests.count)
    odd = next(place for place, digest in enumerate(digests) if digest != usual)
    (odd_host, odd_facts), (host, usual_facts) = everywhere[odd], everywhere[digests.index(usual)]
    names = f"rank {axis.ranks[odd]} ({odd_host})", f"rank {axis.ranks[digests.index(usual)]} ({host})"
    raise ConfigError(difference(odd_facts, usual_facts, *names))
