"""Actions on every rank of a group that raise the same error on all of them if any rank fails.

Without this a rank with a full disk would leave the others waiting in their next collective. Every rank makes the
same calls in the same order. With one rank the action is called directly.

KeyboardInterrupt and SystemExit are not agreed on: a rank that is interrupted ends at once.
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
    """Result or error of an action on one rank."""

    acted: bool  # whether the rank ran an action
    result: T | None
    cause: str | None  # why it failed; None where it succeeded
    kind: type[MegalithError]  # type of the error to raise
    host: str


class RankGroup:
    """The ranks of a process group, which agree on the outcome of each action."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results by rank; they are pickled on the way.

        Raises:
            MegalithError: the action failed on a rank. The message, equal on all ranks, names that rank and the cause.
                Its type is the one raised there, or CheckpointError if that is no MegalithError or the types differ. A
                rank whose own exception is no MegalithError raises that one, as does a group of one rank.
        """
        results: list[Any] = self._run(action)
        return results

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank, and return its result or raise its error on every rank.

        Errors are those of `run_on_all`.
        """
        results: list[Any] = self._run(action if self.axis.is_first else None)
        found: T = results[0]
        return found

    def _run(self, action: Callable[[], T] | None) -> list[T | None]:
        if self.axis.size == 1:
            assert action is not None
            return [action()]
        result, error = None, None
        try:
            result = action() if action is not None else None
        except Exception as caught:
            error = caught
        cause: str | None = None
        kind: type[MegalithError] = CheckpointError
        if isinstance(error, MegalithError):
            cause, kind = str(error), type(error)
        elif error is not None:  # its type too, as its message alone may say nothing
            cause = f"{type(error).__name__}: {error}"
        own = _Outcome(action is not None, result, cause, kind, socket.gethostname())
        outcomes: Sequence[_Outcome[T]] = comm.all_gather_objects(own, self.axis)
        if all(outcome.cause is None for outcome in outcomes):
            return [outcome.result for outcome in outcomes]
        if error is not None and not isinstance(error, MegalithError):
            raise error
        kinds = {outcome.kind for outcome in outcomes if outcome.cause is not None}
        raise (kinds.pop() if len(kinds) == 1 else CheckpointError)(_message(outcomes)) from error


def _message(outcomes: Sequence[_Outcome[Any]]) -> str:
    """Return one message with each cause once; ranks are named unless all that ran the action failed alike."""
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
