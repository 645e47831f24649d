"""Faults put in on purpose, for tests that show what a crash costs.

A run is killed at a named point of a named step, as a power cut would: no handler runs, no buffer is flushed. Parsed
from text at the edge of the program; the rest of it only calls a probe at each point.
"""

from __future__ import annotations

import os
import signal
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
"""Called with the name of the point and the iteration (steps done before it)."""


def no_probe(point: str, iteration: int) -> None:
    """The probe of a run without faults."""


@dataclass(frozen=True)
class Fault:
    """`kill9@step=7,point=mid_save`: SIGKILL to this process at that point of the step that makes iteration 7."""

    step: int
    point: str

    def __call__(self, point: str, iteration: int) -> None:
        """The probe: does not return when its moment has come."""
        if point == self.point and iteration == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def parse_fault(text: str) -> Fault:
    """Read a fault from its text form.

    Raises:
        ConfigError: unknown action, point or field.
    """
    action, _, rest = text.partition("@")
    fields = dict(part.partition("=")[::2] for part in rest.split(","))
    if action != "kill9" or set(fields) != {"step", "point"} or not fields["step"].isdigit():
        raise ConfigError(f"MEGALITH_FAULT={text} is not understood; write kill9@step=7,point=mid_save")
    if fields["point"] not in POINTS:
        raise ConfigError(f"MEGALITH_FAULT: no point {fields['point']}; use one of {', '.join(POINTS)}")
    return Fault(int(fields["step"]), fields["point"])
