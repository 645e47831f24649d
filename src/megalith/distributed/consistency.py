"""Consistency checks between ranks: facts at start-up and, with --debug-collectives, every collective.

Ranks with different settings, versions or data compute wrong numbers without an error, or deadlock in different
collectives. Settings and versions are compared at the rendezvous (`launch.py`), data and tokenizer once they are read.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megalith import __version__
from megalith.distributed import comm
from megalith.distributed.context import Axis, Observer
from megalith.errors import ConfigError, MegalithError

Facts = Mapping[str, str]
"""Name -> value, both as printed."""

_MAX_LISTED = 8


def versions() -> dict[str, str]:
    """Return the versions of this package (with a hash of its sources), torch and Python."""
    return {
        "megalith": f"{__version__}, sources {source_digest()}",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


@cache  # forked ranks have that of their parent
def source_digest() -> str:
    """Return a short hash of all sources of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def difference(own: Facts, other: Facts, own_name: str, other_name: str) -> str:
    """Return a message that lists the facts in which two ranks differ; "" if they are equal."""
    unequal = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    if not unequal:
        return ""
    lines = [
        f"  {name}: {own.get(name, 'absent')} on {own_name}, {other.get(name, 'absent')} on {other_name}"
        for name in unequal[:_MAX_LISTED]
    ]
    if len(unequal) > _MAX_LISTED:
        lines.append(f"  and {len(unequal) - _MAX_LISTED} more")
    return "\n".join([f"{own_name} and {other_name} differ; these must be equal on all ranks of a run:", *lines])


def require_equal(facts: Facts, axis: Axis) -> None:
    """Raise the same ConfigError on all ranks of the axis if their facts differ; a collective call."""
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


_RECORD_BYTES = 1024
_SEPARATOR = " at "
_HERE = Path(__file__).parent
_INNER = {str(_HERE / name) for name in ("comm.py", "consistency.py", "watchdog.py")}
_TORCH = str(Path(torch.__file__).parent)
_FRAMES = 3


class Observers(Observer):
    """Sequence of observers, called in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        """Raise MegalithError on all ranks of the axis if they do not call the same collective."""
        for observer in self._observers:
            observer.before(operation, axis, tensor, detail)

    def after(self, operation: str, axis: Axis) -> None:
        for observer in self._observers:
            observer.after(operation, axis)

    def waiting(self, peer: int | None = None) -> None:
        for observer in self._observers:
            observer.waiting(peer)

    def waited(self) -> None:
        for observer in self._observers:
            observer.waited()


class CollectiveCheck(Observer):
    """Comparison of every collective over its axis before it starts (`--debug-collectives`).

    Some mismatches compute wrong numbers without an error (gloo sums float32 with int32 of the same size, and sums on
    one rank while it takes the maximum on another), others abort the process in native code. This check raises an error
    on all ranks of the axis that names the calls and their stack frames. It costs one more collective on `device` each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: dict[tuple[int, ...], int] = {}

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        """Raise MegalithError on all ranks of the axis if they do not call the same collective."""
        number = self._counts[axis.ranks] = self._counts.get(axis.ranks, 0) + 1
        what = operation if tensor is None else f"{operation} of {list(tensor.shape)} {tensor.dtype}"
        own = f"{what}{f' ({detail})' if detail else ''}{_SEPARATOR}{_call_site()}"
        calls = self._exchange(own, axis)
        if len({call.partition(_SEPARATOR)[0] for call in calls}) > 1:
            lines = [f"  rank {rank}: {call}" for rank, call in zip(axis.ranks, calls, strict=True)]
            raise MegalithError(
                f"--debug-collectives: the ranks of {axis.name} call different collectives (number {number} over these "
                "ranks):\n" + "\n".join(lines)
            )

    def _exchange(self, own: str, axis: Axis) -> list[str]:
        line = own.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES)
        record = torch.frombuffer(bytearray(line), dtype=torch.uint8).to(self._device)
        gathered = comm.all_gather(record, replace(axis, observer=None)).cpu().numpy().tobytes()
        parts = [gathered[start : start + _RECORD_BYTES] for start in range(0, len(gathered), _RECORD_BYTES)]
        return [part.decode(errors="replace").rstrip() for part in parts]


def _call_site() -> str:
    """Return the innermost stack frames outside torch and the collectives, as one line."""
    places: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(places) < _FRAMES:
        file = frame.f_code.co_filename
        if file not in _INNER and not file.startswith((_TORCH, "<")):
            path = Path(file)
            places.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " < ".join(places) or "a thread of autograd"
