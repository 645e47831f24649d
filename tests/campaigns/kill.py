"""SIGKILL at random moments of training runs: the last state equals the uninterrupted run's, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..e2e.checkpoints import assert_same, curve_of, state_of
from ..e2e.warm import Running, WarmProcess
from .material import TRAIN, finish_within, has_ended, last_lines, prepare_data

LAST = 16
KINDS: dict[str, tuple[int, list[str]]] = {
    "saves": (1, []),
    "async saves": (1, ["--async-save"]),
    "keep-last": (1, ["--keep-last", "2"]),
    "2 ranks, ZeRO-1": (2, ["--use-distributed-optimizer"]),
    "2 ranks, TP, async": (2, ["--tensor-model-parallel-size", "2", "--async-save", "--keep-last", "2"]),
}
"""Name -> ranks and flags."""
_PATIENCE_SECONDS = 180.0


@dataclass
class Whole:
    """The uninterrupted run of a kind, and how long a run takes."""

    folder: Path
    seconds: float


def run(kills: int, seed: int, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Kill that many runs; returns the table and the findings."""
    chance = random.Random(f"kill {seed}")
    prepare_data(folder)
    warm = WarmProcess(folder)
    counts, findings, wholes = Counter[tuple[str, str]](), list[str](), dict[str, Whole]()
    try:
        while sum(counts[kind, "kills"] for kind in KINDS) < kills:
            kind = chance.choice(list(KINDS))
            if kind not in wholes:
                wholes[kind] = _uninterrupted(warm, kind, folder)
            counts[kind, "runs"] += 1
            place = _new_folder(folder, f"trial-{sum(counts[kind, 'runs'] for kind in KINDS)}")
            for _ in range(chance.randint(1, 4)):
                killed = _kill(warm, kind, place, wholes[kind].seconds, chance, findings)
                counts[kind, "kills"] += killed
                wholes[kind].seconds *= 1.0 if killed else 0.8  # it was over before: the machine has become faster
            found = _compare(warm, kind, place, wholes[kind])
            counts[kind, "equal"] += found is None
            findings += [f"{kind}, {place.name}: {found}"] if found else []
    finally:
        warm.close()
    columns = ("runs", "kills", "equal")
    return [["kind", *columns], *([kind, *(str(counts[kind, name]) for name in columns)] for kind in KINDS)], findings


def _new_folder(folder: Path, name: str) -> Path:
    """A folder for a run, over the same data."""
    place = folder / name
    place.mkdir()
    (place / "data").symlink_to(folder / "data")
    return place


def _start(warm: WarmProcess, kind: str, place: Path) -> list[Running]:
    ranks, flags = KINDS[kind]
    words = [*TRAIN, "--train-iters", LAST, "--save-interval", 2, "--eval-interval", 5, "--save", "c", "--load", "c"]
    words += ["--distributed-timeout-minutes", 1, *flags]
    return warm.start_ranks(ranks, words, place) if ranks > 1 else [warm.start(words, place)]


def _uninterrupted(warm: WarmProcess, kind: str, folder: Path) -> Whole:
    place = _new_folder(folder, kind.replace(" ", "-").replace(",", ""))
    began = time.monotonic()
    ended = [finish_within(each, _PATIENCE_SECONDS) for each in _start(warm, kind, place)]
    assert all(each is not None and each.code == 0 for each in ended), ended
    return Whole(place, time.monotonic() - began)


def _kill(
    warm: WarmProcess, kind: str, place: Path, seconds: float, chance: random.Random, findings: list[str]
) -> bool:
    """Start a run and kill one of its ranks at a random moment; returns whether it was still running."""
    ranks = _start(warm, kind, place)
    victim = chance.choice(ranks)
    time.sleep(chance.uniform(0, 1.05 * seconds))
    killed = not has_ended(victim)
    if killed:
        victim.send(signal.SIGKILL)
    for each in ranks:  # the others end by themselves
        if finish_within(each, _PATIENCE_SECONDS) is None:
            findings.append(f"{kind}, {place.name}: a rank hung after the kill: {last_lines(each.text)}")
    return killed


def _compare(warm: WarmProcess, kind: str, place: Path, whole: Whole) -> str | None:
    """Run to the end; returns in what it differs from the uninterrupted run."""
    for each in _start(warm, kind, place):
        ended = finish_within(each, _PATIENCE_SECONDS)
        if ended is None or ended.code != 0:
            return f"the restart {'hung' if ended is None else f'ended with {ended.code}'}: {last_lines(each.text)}"
    ours, theirs = place / "c", whole.folder / "c"
    try:
        assert_same(state_of(theirs, LAST), state_of(ours, LAST))
    except AssertionError as error:
        return f"another state {error}"
    if curve_of(theirs) != curve_of(ours):
        return "other losses"
    names = [sorted(path.name for path in save.iterdir()) for save in (theirs, ours)]
    return f"other files: {names[1]} instead of {names[0]}" if names[0] != names[1] else None
