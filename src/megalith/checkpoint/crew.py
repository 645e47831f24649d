"""Ranks that act together: what one of them cannot do is an error on all of them, at the same call.

Without this a rank with a full disk would leave the others waiting in their next collective. Every rank makes the
same calls in the same order; alone, an act is just done.

KeyboardInterrupt and SystemExit are not agreed on: whoever is told to leave at once leaves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.errors import CheckpointError, MegalithError

T = TypeVar("T")

_NAMED_CAUSES = 4  # different messages in one error; a thousand ranks mostly have the same


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What came of an act on one rank."""

    acted: bool  # whether the rank had anything to do
    result: T | None
    cause: str | None  # why it failed; None where it succeeded
    kind: type[MegalithError]  # as what it failed
    host: str


class Crew:
    """The ranks of an axis, which share a store."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def all(self, act: Callable[[], T]) -> list[T]:
        """Do something on every rank; returns the results by rank, which are pickled on the way.

        Raises:
            MegalithError: it failed on a rank; the message, equal on all, names that rank and the cause. It is of the
                kind raised there, a CheckpointError where that was none of ours or ranks differ. Alone, or where it was
                no MegalithError, this rank's own exception is raised.
        """
        results: list[Any] = self._agreed(act)
        return results

    def first(self, act: Callable[[], T]) -> T:
        """Do something on the first rank only and return its result, or raise its error, on every rank; as `all`."""
        results: list[Any] = self._agreed(act if self.axis.is_first else None)
        found: T = results[0]
        return found

    def _agreed(self, act: Callable[[], T] | None) -> list[T | None]:
        if self.axis.size == 1:
            assert act is not None
            return [act()]
        result, error = None, None
        try:
            result = act() if act is not None else None
        except Exception as caught:
            error = caught
        cause: str | None = None
        kind: type[MegalithError] = CheckpointError
        if isinstance(error, MegalithError):
            cause, kind = str(error), type(error)
        elif error is not None:  # its type too, as its message alone may say nothing
            cause = f"{type(error).__name__}: {error}"
        own = _Outcome(act is not None, result, cause, kind, socket.gethostname())
        outcomes: Sequence[_Outcome[T]] = comm.all_gather_objects(own, self.axis)
        if all(outcome.cause is None for outcome in outcomes):
            return [outcome.result for outcome in outcomes]
        if error is not None and not isinstance(error, MegalithError):
            raise error
        kinds = {outcome.kind for outcome in outcomes if outcome.cause is not None}
        raise (kinds.pop() if len(kinds) == 1 else CheckpointError)(_together(outcomes)) from error


def _together(outcomes: Sequence[_Outcome[Any]]) -> str:
    """One message for what went wrong, each cause once; ranks are named unless all that acted have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.cause is not None:
            ranks_of.setdefault(outcome.cause, []).append(rank)
    (cause, ranks), *_ = ranks_of.items()
    if len(ranks) == sum(outcome.acted for outcome in outcomes):
        return cause
    lines = [f"{_named(ranks, outcomes)}: {cause}" for cause, ranks in list(ranks_of.items())[:_NAMED_CAUSES]]
    if len(ranks_of) > _NAMED_CAUSES:
        lines.append(f"and {len(ranks_of) - _NAMED_CAUSES} other causes on further ranks")
    return "\n".join(lines)


def _named(ranks: Sequence[int], outcomes: Sequence[_Outcome[Any]]) -> str:
    others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"rank {ranks[0]} on {outcomes[ranks[0]].host}{others}"
