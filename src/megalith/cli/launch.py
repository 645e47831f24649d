"""`megalith train --nproc N`: starts the ranks of a run on this machine, looks after them, and says how it ended.

The configuration is checked before any process starts. The last words are the first cause. With `--max-restarts M` a
run that fails goes on from its last checkpoint, until it has done so M times or the same thing happens again without
a newer checkpoint.
"""

from __future__ import annotations

import os
import shlex
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.config import RunConfig
from megalith.config.data_sources import data_sources
from megalith.distributed.supervise import Attempt, Cause, Signals
from megalith.train.signals import STOP_SIGNALS
from megalith.train.streams import warn

Resume = Callable[[], tuple[int | None, list[str]]]
"""Iteration of the last checkpoint (None if there is none) and the words that go on from it."""


def starts_ranks(config: RunConfig) -> bool:
    """Whether this process is to start the ranks of the run, not to be one of them."""
    return config.launch.nproc is not None and "rank" not in config.given


@dataclass(frozen=True)
class _Failed:
    cause: Cause
    saved: int | None

    def repeats(self, other: _Failed | None) -> bool:
        """Whether the same fault has happened again though nothing more is saved."""
        if other is None or self.cause.from_outside:
            return False
        same = (self.cause.kind, self.cause.step) == (other.cause.kind, other.cause.step)
        return same and self.saved == other.saved


def supervise(config: RunConfig, argv: Sequence[str], resume: Resume) -> int:
    """Run all ranks to their end; returns the exit code of the run.

    0 finished, 75 stopped by a signal after saving, 130 left at once on a second signal, else that of the first rank
    that failed (128 + n for signal n).
    """
    words, before, restarts = list(argv), _data_sizes(config), config.launch.max_restarts
    assert config.launch.nproc is not None
    previous: _Failed | None = None
    with Signals(STOP_SIGNALS) as signals:
        for number in range(restarts + 1):
            attempt = Attempt(_command(words), config.launch.nproc, number, _environment(), signals)
            try:
                attempt.wait(signals, warn)
                if attempt.stopped is not None:
                    return attempt.stopped
                cause = attempt.cause()
            finally:
                attempt.board.remove()
            saved, words = resume()
            failed = _Failed(cause, saved)
            verdict = _verdict(failed, previous, number, restarts)
            if attempt.signals and not verdict:
                verdict = "not started again, as it was asked to stop"
            if verdict:
                _last_words(failed, before, verdict, saved, words)
                return cause.exit_code
            warn(f"{cause.text}{_shrunk(before)}\nrestart {number + 1} of {restarts}, {_from(saved)}")
            previous = failed
    raise AssertionError("the last attempt has a verdict")


def _verdict(failed: _Failed, previous: _Failed | None, number: int, restarts: int) -> str:
    """Why there is no further attempt; empty if there is one."""
    if restarts and failed.cause.hopeless:
        return "a restart cannot mend this"
    if number == restarts:
        return f"all {restarts} restarts are used up" if restarts else "not started again"
    if failed.repeats(previous):
        return f"the same happened twice and nothing was saved between: no use in restart {number + 1} of {restarts}"
    return ""


def _last_words(failed: _Failed, before: dict[Path, int], verdict: str, saved: int | None, words: list[str]) -> None:
    if verdict != "not started again":
        warn(verdict)
    if saved is not None:
        warn(f"iteration {saved} is saved; resume with:\n  {command_line(words)}")
    if failed.cause.text:
        warn(f"megalith train: {failed.cause.text}{_shrunk(before)}")


def _from(saved: int | None) -> str:
    return "from the beginning: nothing is saved" if saved is None else f"from iteration {saved}"


_SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py")


def command_line(argv: Sequence[str]) -> str:
    """The command as the user can type it again, without the launcher."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        return shlex.join(["python", "-m", "megalith", "train", *argv])
    if program in _SCRIPTS:
        return shlex.join(["python", sys.argv[0], *argv])
    return shlex.join(["megalith", "train", *argv])


def _command(words: Sequence[str]) -> list[str]:
    """Return the command of a rank: that of this process, or the module where another program has called `main`."""
    program = Path(sys.argv[0])
    if program.name in _SCRIPTS:
        return [sys.executable, str(program), *words]
    if program.name == "megalith" and program.is_file():  # with -m, modules of the working folder would come first
        return [sys.executable, str(program), "train", *words]
    if (program.parent.name, program.name) != ("megalith", "__main__.py"):
        warn(f"{program} is not run by the ranks: each of them is a `python -m megalith train`")
    return [sys.executable, "-m", "megalith", "train", *words]


def _environment() -> Mapping[str, str]:
    """Return the environment of the ranks, which find the package where this process has found it."""
    source = Path(__file__).resolve().parents[2]
    if source in [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]:
        return os.environ  # found there anyway; in PYTHONPATH it would hide what the user's own PYTHONPATH replaces
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))}


def _data_sizes(config: RunConfig) -> dict[Path, int]:
    """Sizes of the data files, which are mapped into memory: one that shrinks ends a process by SIGBUS."""
    files = [Path(prefix + ending) for prefix in data_sources(config.data).prefixes for ending in (".bin", ".idx")]
    return {file: file.stat().st_size for file in files if file.is_file()}


def _shrunk(before: dict[Path, int]) -> str:
    """Names data files that are shorter than at the start."""
    found = []
    for file, size in before.items():
        now = file.stat().st_size if file.is_file() else 0
        if now < size:
            found.append(f"{file} has shrunk from {size} to {now} bytes while it was in use")
    return "".join(f"; {text}" for text in found)
