"""What has been read so far from the command line, the recipe and the environment, with everything wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """The values that one source gives, and what there is to say about it.

    Attributes:
        values: setting name -> value.
        recipe: path of a recipe that is asked for, empty for none.
        problems: what cannot be read or is refused, one line each.
        faulty: names of settings whose value could not be read, so that nothing more is said of them.
        notes: one line for each thing that was read in another way than written.
        nothing: reason -> flags that were accepted and need nothing.
    """

    values: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    problems: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    nothing: dict[str, list[str]] = field(default_factory=dict)

    def needs_nothing(self, flag: str, why: str) -> None:
        """Record a flag that was accepted and has no effect."""
        flags = self.nothing.setdefault(why, [])
        if flag not in flags:
            flags.append(flag)
