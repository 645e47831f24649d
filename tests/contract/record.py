"""Add what is new to the record: `python -m tests.contract.record`. Nothing in it is changed or removed by this.

A new flag of training: write `--flag VALUE | group.setting = ?` into `flags_that_work.txt`, with the other words that
it needs as a third column; this fills in the value.
"""

from __future__ import annotations

from . import library, training
from .lines import add, read, write


def main() -> None:
    """Complete all files."""
    add("run_config", library.fields())
    add("errors", library.error_classes())
    add("signatures", {(name,): library.signature(name) for name in library.CALLED})
    write("names", [*read("names"), *((name,) for name in library.documented_names())])
    write("flags_that_work", [_completed(*columns) for columns in read("flags_that_work")])


def _completed(flag: str, effect: str, *others: str) -> tuple[str, ...]:
    if not effect.endswith(" = ?"):
        return (flag, effect, *others)
    return (flag, training.setting(training.answer(flag, *others), effect.partition(" ")[0]), *others)


if __name__ == "__main__":
    main()
