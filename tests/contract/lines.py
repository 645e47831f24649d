"""The files of the record: one fact a line, sorted, with columns divided by ` | `; `# ` begins a heading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
_SEPARATOR = " | "


def read(name: str) -> list[tuple[str, ...]]:
    """The lines of a file as columns."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    return [tuple(line.split(_SEPARATOR)) for line in text.splitlines() if line and not line.startswith("# ")]


def write(name: str, lines: Iterable[tuple[str, ...]], *, ordered: bool = False) -> None:
    """Write the lines of a file below its heading, which stays; sorted unless their order counts."""
    path = FOLDER / f"{name}.txt"
    heading = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    body = [_SEPARATOR.join(columns).rstrip() for columns in lines]
    body = body if ordered else sorted(set(body))
    path.write_text("\n".join([*heading, *body]) + "\n", encoding="utf-8")


def lost(name: str, now: Mapping[tuple[str, ...], str]) -> list[str]:
    """Compare a record whose last column is what its other columns lead to with what they lead to now.

    Returns:
        A line for each fact that no longer holds.
    """
    found = []
    for *key, recorded in read(name):
        today = now.get(tuple(key), "gone")
        if today != recorded:
            found.append(f"{_SEPARATOR.join(key)}: was {recorded}, is {today}")
    return found


def add(name: str, now: Mapping[tuple[str, ...], str]) -> None:
    """Add what is new to such a record; what is in it stays as it is."""
    recorded = {tuple(key): value for *key, value in read(name)}
    write(name, [(*key, value) for key, value in {**now, **recorded}.items()])


def complain(name: str, found: Iterable[str]) -> str:
    """The message of a test that fails."""
    listed = "\n  ".join(found)
    return (
        f"what others hold on to is gone or changed:\n  {listed}\n"
        f"Bring it back. To remove it is a decision of its own: then take it out of tests/contract/{name}.txt and say "
        "so in the changelog."
    )
