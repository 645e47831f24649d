"""`--debug-collectives`: before each collective, all its ranks compare what they are about to call.

Some mismatches give wrong numbers without an error (gloo sums float32 with int32 of the same size, and sums on one rank
while it takes the maximum on the other), others abort the process in native code. Here each becomes an error on all
ranks of the axis that names both calls and where they stand. Costs one more collective for each; nothing when it is
off, as then nobody observes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis, Observer
from megalith.errors import MegalithError

_RECORD_BYTES = 1024
_SEPARATOR = " at "
_HERE = Path(__file__).parent
_INNER = {str(_HERE / name) for name in ("comm.py", "debug.py", "watch.py")}
_TORCH = str(Path(torch.__file__).parent)
_FRAMES = 3


class Observers:
    """Several observers as one, called in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
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


class CollectiveCheck:
    """Observer that compares each collective over its axis before it starts.

    Args:
        device: where collectives of this run are (a GPU's cannot take tensors of the CPU).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: dict[tuple[int, ...], int] = {}

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        """Raises MegalithError, equal on all ranks of the axis, if they do not all call the same."""
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

    def after(self, operation: str, axis: Axis) -> None:
        """Nothing is left to compare."""

    def waiting(self, peer: int | None = None) -> None:
        """A wait is no collective."""

    def waited(self) -> None:
        """A wait is no collective."""

    def _exchange(self, own: str, axis: Axis) -> list[str]:
        line = own.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES)
        record = torch.frombuffer(bytearray(line), dtype=torch.uint8).to(self._device)
        gathered = comm.all_gather(record, replace(axis, observer=None)).cpu().numpy().tobytes()
        parts = [gathered[start : start + _RECORD_BYTES] for start in range(0, len(gathered), _RECORD_BYTES)]
        return [part.decode(errors="replace").rstrip() for part in parts]


def _call_site() -> str:
    """The innermost frames that are neither torch's nor of the collectives themselves."""
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
