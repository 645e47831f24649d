"""Which checkpoints may go when a newer one is in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """What is kept beside the newest checkpoint; everything, by default.

    Attributes:
        keep_last: how many of the newest complete ones, the newest included.
        retain_interval: multiples of it are never deleted. Without `keep_last` every other one is deleted when the next
            one is saved, as Megatron's `--save-retain-interval` does.
    """

    keep_last: int | None = None
    retain_interval: int | None = None

    def superseded(
        self, saved: int, before: int | None, there: Sequence[int], is_complete: Callable[[int], bool]
    ) -> list[int]:
        """The iterations to delete; none after `saved`, and none if that is not complete.

        Args:
            saved: what has just been saved.
            before: what the tracker said before that.
            there: all the iterations.
            is_complete: whether a checkpoint has all its files. One that has not counts for nothing; it goes when
                enough newer ones are there.
        """
        if self.keep_last is None and self.retain_interval is None:
            return []
        older = sorted((iteration for iteration in there if iteration < saved), reverse=True)
        if not older or not is_complete(saved):
            return []
        if self.keep_last is None:
            return [iteration for iteration in older if iteration == before and not self._is_retained(iteration)]
        kept, superseded = 1, []
        for iteration in older:
            if kept < self.keep_last:
                kept += is_complete(iteration)
            elif not self._is_retained(iteration):
                superseded.append(iteration)
        return superseded

    def _is_retained(self, iteration: int) -> bool:
        return self.retain_interval is not None and iteration % self.retain_interval == 0


KEEP_ALL = Retention()
