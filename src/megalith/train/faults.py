"""Fault injection: crashes, hangs and exceptions at a named point of a run, for tests that show what they cost.

MEGALITH_FAULT kills a run at a named point of a named step, as a power cut would: no handler runs, no buffer is
flushed. Or it hangs, fails, leaves or slows down there. It is parsed from text at the edge of the program; the rest of
it only calls a probe at each point. NaN losses on purpose: `step_hooks.NaNInjector`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from megalith.errors import ConfigError

POINTS = (
    "data",
    "fwd",
    "bwd",
    "opt",
    "pre_save",
    "mid_save",
    "pre_commit",
    "mid_commit",
    "post_commit",
    "eval",
    "load",
)

Probe = Callable[[str, int], None]
"""Called with the name of a point of the run and the iteration; unlike a `Hook` or `StepHook` it receives no data."""


def no_probe(point: str, iteration: int) -> None:
    """Do nothing: the probe of a run without fault injection."""


ACTIONS = {
    "kill9": "as a power cut",
    "stop": "the process is stopped, as by SIGSTOP",
    "sleep": "it does something else for ever",
    "raise": "an exception",
    "leave": "it ends as if all were done",
    "slow": "0.2 s more at this point, from this step on",
}
_SLOW_SECONDS = 0.2
_FIELDS = {"step", "point", "rank", "attempt"}


@dataclass(frozen=True)
class Fault:
    """`kill9@step=7,point=mid_save`: something bad at that point of the step that makes iteration 7."""

    action: str
    step: int
    point: str
    rank: int | None = None  # the only rank that it strikes; every rank if None
    # the attempt of a run that it strikes, counted from 0: a restart meets it no more. Every one if None.
    attempt: int | None = 0

    def applies_to(self, rank: int, attempt: int) -> bool:
        """Return whether the fault can occur on this rank at all."""
        return self.rank in (None, rank) and self.attempt in (None, attempt)

    def __call__(self, point: str, iteration: int) -> None:
        """Trigger the fault at its moment; most faults do not return."""
        if point != self.point or iteration < self.step:
            return
        if self.action == "slow":
            time.sleep(_SLOW_SECONDS)
        elif iteration == self.step:
            self._trigger()

    def _trigger(self) -> None:
        if self.action == "raise":
            raise RuntimeError(f"MEGALITH_FAULT at step {self.step}, point {self.point}")
        if self.action == "leave":
            raise SystemExit(0)
        if self.action == "sleep":
            while True:
                time.sleep(3600.0)
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill9" else signal.SIGSTOP)


def parse_fault(text: str, world_size: int | None = None) -> Fault:
    """Read a fault from its text form, such as `sleep@rank=1,step=7,point=fwd` or `raise@step=3,point=fwd,attempt=all`.

    Raises:
        ConfigError: unknown action, point or field, or a rank outside of `world_size`.
    """
    action, _, rest = text.partition("@")
    fields = dict(part.partition("=")[::2] for part in rest.split(","))
    numbers = [fields.get("step", ""), fields.get("rank", "0"), fields.get("attempt", "0").replace("all", "0")]
    known = action in ACTIONS and {"step", "point"} <= set(fields) <= _FIELDS
    if not known or not all(number.isdecimal() for number in numbers):
        raise ConfigError(
            f"MEGALITH_FAULT={text} is not understood; write kill9@step=7,point=mid_save, with rank=N for one rank and "
            f"attempt=N or attempt=all for restarts; actions: {', '.join(ACTIONS)}"
        )
    if fields["point"] not in POINTS:
        raise ConfigError(f"MEGALITH_FAULT: no point {fields['point']}; use one of {', '.join(POINTS)}")
    attempt = fields.get("attempt", "0")
    rank = int(fields["rank"]) if "rank" in fields else None
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"MEGALITH_FAULT={text}: rank={rank} of {world_size}; ranks count from 0 to {world_size - 1}")
    return Fault(action, int(fields["step"]), fields["point"], rank, None if attempt == "all" else int(attempt))
