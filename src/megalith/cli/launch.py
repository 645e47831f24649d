"""`megalith train --nproc N`: launcher and supervisor of the ranks on this machine.

The configuration is checked before any process starts. The last line of a failed run names the first cause. With
`--max-restarts M` a failed run is restarted from its newest checkpoint up to M times, unless it fails in the same way
twice without a newer checkpoint.
"""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megalith.cli.importing import collections_paused
from megalith.cli.threads import divide_cores, limit_spinning, suppress_native_traces
from megalith.config import RunConfig
from megalith.config.data_sources import data_sources
from megalith.distributed.supervise import Attempt, FailureCause, ForkedRank, Signals
from megalith.train.signals import STOP_SIGNALS
from megalith.train.streams import warn

Resume = Callable[[], tuple[int | None, list[str]]]
"""Returns the iteration of the newest checkpoint (None if there is none) and the arguments that resume from it."""


def starts_ranks(config: RunConfig) -> bool:
    """Return whether this process launches the ranks of the run instead of being one of them."""
    return config.launch.nproc is not None and "rank" not in config.given


@dataclass(frozen=True)
class _Failure:
    """FailureCause of a failed attempt, and the iteration of the newest checkpoint after it (None without one)."""

    cause: FailureCause
    saved: int | None

    def repeats(self, other: _Failure | None) -> bool:
        """Return whether this failure equals the `other` one and no newer checkpoint was saved between them."""
        if other is None or self.cause.external:
            return False
        same = (self.cause.kind, self.cause.step) == (other.cause.kind, other.cause.step)
        return same and self.saved == other.saved


def supervise(config: RunConfig, argv: Sequence[str], resume: Resume, run_rank: Callable[[Sequence[str]], int]) -> int:
    """Run all ranks until they end and return the exit code of the run; a forked rank returns that of `run_rank`.

    0: finished; 75: stopped by a signal after saving; 130: ended at once by a second signal; else the exit code of the
    first rank that failed (128 + n for signal n).
    """
    words, before, restarts = list(argv), _data_sizes(config), config.launch.max_restarts
    assert config.launch.nproc is not None
    previous: _Failure | None = None
    with Signals(STOP_SIGNALS) as signals:
        forks = _import_for_ranks(config)
        for number in range(restarts + 1):
            if signals.received:  # while nothing ran; a rank that has just started would die of it
                warn(f"{signals.received[0].name}: stopped before the ranks started")
                return 128 + signals.received[0].value
            command = None if forks and _has_one_thread() else _command(words)
            try:
                attempt = Attempt(command, config.launch.nproc, number, package_environment(), signals)
            except ForkedRank:
                break
            try:
                attempt.wait(signals, warn)
                if attempt.stopped is not None:
                    return attempt.stopped
                cause = attempt.cause()
            finally:
                attempt.board.remove()
            saved, words = resume()
            failed = _Failure(cause, saved)
            verdict = _why_no_restart(failed, previous, number, restarts)
            if attempt.signals and not verdict:
                verdict = "not restarted: a signal asked it to stop"
            if verdict:
                _print_outcome(failed, before, verdict, saved, words)
                return cause.exit_code
            warn(f"{cause.text}{_shrunk_files(before)}\nrestart {number + 1} of {restarts}, {_restart_point(saved)}")
            previous = failed
    return run_rank(words)


def _why_no_restart(failed: _Failure, previous: _Failure | None, number: int, restarts: int) -> str:
    """Return why no further attempt is made; "" if one is."""
    if restarts and failed.cause.permanent:
        return "not restarted: this error would occur again"
    if number == restarts:
        return f"all {restarts} restarts are used" if restarts else _NO_RESTARTS
    if failed.repeats(previous):
        return f"failed twice in the same way without a new checkpoint: no restart {number + 1} of {restarts}"
    return ""


def _print_outcome(
    failed: _Failure, before: dict[Path, int], verdict: str, saved: int | None, words: list[str]
) -> None:
    if verdict != _NO_RESTARTS:
        warn(verdict)
    is_repeated = failed.cause.permanent and not failed.cause.step  # a mistake that the same command makes again
    if saved is not None and not is_repeated:
        warn(f"iteration {saved} is saved; resume with:\n  {command_line(words)}")
    if failed.cause.text:
        warn(f"megalith train: {failed.cause.text}{_shrunk_files(before)}")


def _restart_point(saved: int | None) -> str:
    return "as the run was started: it saved nothing" if saved is None else f"from iteration {saved}"


_NO_RESTARTS = "not restarted"
_SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py")


def command_line(argv: Sequence[str]) -> str:
    """Return the shell command that repeats this one without the launcher."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        return shlex.join(["python", "-m", "megalith", "train", *argv])
    if program in _SCRIPTS:
        return shlex.join(["python", sys.argv[0], *argv])
    return shlex.join(["megalith", "train", *argv])


def _command(words: Sequence[str]) -> list[str]:
    """Return the command of a rank: this process's own, or `python -m megalith` if another program called `main`."""
    program = Path(sys.argv[0])
    if program.name in _SCRIPTS:
        return [sys.executable, str(program), *words]
    if program.name == "megalith" and program.is_file():  # with -m, modules of the working folder would come first
        return [sys.executable, str(program), "train", *words]
    if not _is_ours(program):
        warn(f"{program} does not run on the ranks: each of them runs `python -m megalith train`")
    return [sys.executable, "-m", "megalith", "train", *words]


_IMPORTED_BY_RANKS = (
    *("megalith.assemble.ranks", "megalith.assemble.training", "megalith.cli.train_hooks", "megalith.cli.train_start"),
    "megalith.train.metrics",
)
_GPU_FILES = ("dev/nvidia[0-9]*", "dev/dxg", "dev/kfd", "proc/driver/nvidia/gpus/*")


def _import_for_ranks(config: RunConfig) -> bool:
    """Import what ranks import, for forks of this process to share; return False where ranks cannot be forks.

    CUDA cannot be used in a fork of a process that has asked for its devices, and modules of a user (`--import`) or
    another program than ours may rely on separate processes.
    """
    there_may_be_gpus = any(True for pattern in _GPU_FILES for _ in Path("/").glob(pattern))
    on_cpu = config.train.device == "cpu" or not there_may_be_gpus
    if sys.platform != "linux" or not on_cpu or config.registry.imports or not _is_ours(Path(sys.argv[0])):
        return False
    ranks, given = config.launch.nproc or 1, dict(os.environ)
    launch = replace(config.launch, launcher="megalith", world_size=ranks, local_world_size=ranks)
    divide_cores(launch)  # OpenMP reads the variables when it is loaded
    limit_spinning(ranks)
    suppress_native_traces(launch)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which starts its threads when it is loaded
    with collections_paused(), suppress(ImportError):  # the ranks report it
        for name in (*_IMPORTED_BY_RANKS, *_imported_for(config)):
            importlib.import_module(name)
    os.environ.clear()
    os.environ.update(given)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, the pages of all objects
    return True


def _imported_for(config: RunConfig) -> list[str]:
    """Return the modules that take long to import and that this run needs."""
    names = ["megalith.checkpoint.store.saving"] if config.checkpoint.save or config.checkpoint.load else []
    return [*names, *(["megalith.parallel.fsdp"] if config.fully_sharded else [])]


def _has_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _is_ours(program: Path) -> bool:
    installed = program.name == "megalith" and program.is_file()
    return installed or program.name in _SCRIPTS or (program.parent.name, program.name) == ("megalith", "__main__.py")


def package_environment() -> Mapping[str, str]:
    """Return the environment of our processes, with PYTHONPATH such that they import the package of this one."""
    source = Path(__file__).resolve().parents[2]
    if source in [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]:
        return os.environ  # found without PYTHONPATH, where it would take precedence over the user's replacements
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))}


def _data_sizes(config: RunConfig) -> dict[Path, int]:
    """Return the size in bytes of each memory-mapped data file. A file that shrinks kills its readers by SIGBUS."""
    files = [Path(prefix + ending) for prefix in data_sources(config.data).prefixes for ending in (".bin", ".idx")]
    return {file: file.stat().st_size for file in files if file.is_file()}


def _shrunk_files(before: dict[Path, int]) -> str:
    """Return a message about the data files that are shorter than in `before`, starting with "; "; "" if none is."""
    found = []
    for file, size in before.items():
        now = file.stat().st_size if file.is_file() else 0
        if now < size:
            found.append(f"{file} has shrunk from {size} to {now} bytes while it was in use")
    return "".join(f"; {text}" for text in found)
