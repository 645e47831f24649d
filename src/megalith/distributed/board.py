"""Status board: every rank publishes its status, which the others can read even if the rank hangs or has died.

`FolderBoard` serves the ranks of one machine: a file in memory per rank, which outlives the process. `StoreBoard`
serves several machines: the store of the run, written by a thread at every heartbeat. Both also hold documents
(failures, stacks, the cause). This module does not import torch, so that the supervisor can use it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_SIZE = 256
_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 2**20  # pages for statuses and documents of a hundred ranks; containers have 64 MiB in total
STORE_SECONDS = 2.0
"""Seconds that the store may take to answer."""
_PREFIX, _IN_USE = "megalith-", "in-use"
_MIN_AGE_SECONDS = 60.0


@dataclass(frozen=True)
class Identity:
    """Rank, host and process id of one process."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


PHASES = {
    "start": "during start-up",
    "data": "while reading data",
    "fwd": "in forward",
    "bwd": "in backward",
    "opt": "in the optimizer step",
    "eval": "in an evaluation",
    "load": "while loading",
    "serve": "while serving",
    "left": "after its last step",
    "failed": "after a failure",
}
"""Point of a step -> description. Points that are not listed belong to a save."""

MESSAGE = "message"
"""`Status.operation` while waiting for a message of another rank, which `Status.axis` then names."""


@dataclass(frozen=True)
class Status:
    """State of a rank: step, phase, and the collective that it waits for."""

    step: int = 0  # current step
    phase: str = "start"  # last point passed (`PHASES`)
    waits: bool = False  # whether the rank waits for others
    # last collective, its axis, and how many collectives the rank has called
    operation: str = "-"
    axis: str = "-"
    count: int = 0
    since: float = 0.0  # `time.monotonic()` of the last change, seconds; comparable on one machine
    beat: int = 0  # number of the heartbeat that published it to a `StoreBoard`

    @property
    def place(self) -> str:
        """Return step and phase in words."""
        where = PHASES.get(self.phase, "while saving")
        return f"at step {self.step} {where}" if self.step else where

    @property
    def activity(self) -> str:
        """Return step, phase and what the rank waits for, in words."""
        if not self.waits:
            return self.place
        if self.operation == MESSAGE:
            return f"{self.place}, waiting for a message of rank {self.axis}"
        return f"{self.place}, waiting in {self.operation} over {self.axis} (collective {self.count})"

    def encode(self) -> bytes:
        return (
            f"{self.step} {self.phase} {self.waits:d} {self.operation} {self.axis} {self.count} {self.since:.3f} "
            f"{self.beat}\n"
        ).encode()

    @classmethod
    def decode(cls, line: bytes) -> Status | None:
        """Parse what `encode` returned; None if the line is missing or incomplete."""
        try:
            step, phase, waits, operation, axis, count, since, beat = line.decode().split(" ")
            return cls(int(step), phase, waits == "1", operation, axis, int(count), float(since), int(beat))
        except ValueError:
            return None


class BoardUnavailable(Exception):
    """Raised if the store does not answer: the process that holds it is dead or stopped."""


class FolderBoard:
    """Status board of one machine: a folder, if possible in memory, with a status per rank and named documents.

    Args:
        rank: None for a reader.
        of_size: number of ranks that share the folder and delete it at the end; None if the supervisor deletes it.
        supervised_size: number of ranks that delete it if their supervisor has died.
    """

    immediate = True  # `post` is cheap enough to post every change

    def __init__(
        self, folder: Path, rank: int | None = None, *, of_size: int | None = None, supervised_size: int = 0
    ) -> None:
        self.folder, self._rank, self._of_size = folder, rank, of_size
        self._supervised_size = supervised_size
        self._own: mmap.mmap | None = None
        # Lock for the lifetime of this process; the kernel releases it when the process ends, in any way.
        self._in_use = (folder / _IN_USE).open("a", encoding="utf-8")
        fcntl.flock(self._in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if rank is not None:
            path = folder / f"rank-{rank}"
            path.write_bytes(b"\0" * _SIZE)
            with path.open("r+b") as file:
                self._own = mmap.mmap(file.fileno(), _SIZE)

    def post(self, status: bytes) -> None:
        """Replace the status of this rank; at most 200 bytes."""
        assert self._own is not None
        self._own[: len(status) + 1] = status + b"\0"

    def status(self, rank: int) -> bytes:
        """Return the last status of a rank; empty if there is none."""
        with suppress(OSError):
            return (self.folder / f"rank-{rank}").read_bytes().partition(b"\0")[0]
        return b""

    def write(self, name: str, text: str) -> bool:
        """Write a document unless one of this name exists; return whether it was written."""
        draft = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            draft.write_text(text, encoding="utf-8")
            os.link(draft, self.folder / name)  # atomic, and the first writer wins
        except OSError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, name: str) -> str | None:
        """Return a document; None if it does not exist."""
        with suppress(OSError):
            return (self.folder / name).read_text(encoding="utf-8")
        return None

    def remove(self) -> None:
        """Delete the folder if this object owns it; no rank needs the board any more."""
        if self._of_size is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, *, failed: bool) -> None:
        """End this rank's use of the board; rank 0 deletes it once all ranks have ended."""
        supervisor_is_gone = os.getppid() != int(os.environ.get("MEGALITH_SUPERVISOR") or os.getppid())
        if self._of_size is None and self._supervised_size and supervisor_is_gone:
            self._of_size = self._supervised_size
        if self._rank != 0 and not failed:
            return
        # After a failure rank 0 may be dead, and the last rank to end removes the board. No rank waits in that case:
        # its connections close when it ends, which the others notice.
        deadline = time.monotonic() + (0.0 if failed else 5.0)
        while read := any(self._is_read_by(rank) for rank in range(self._of_size or 0)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not (failed and read):
            self.remove()

    def _is_read_by(self, rank: int) -> bool:
        status = Status.decode(self.status(rank))
        ended = status is not None and status.phase in ("left", "failed")
        return not ended and process_state(read_identity(self, rank).pid) not in ("", "Z")


class StoreBoard:
    """Status board in the store of the run; BoardUnavailable if the store does not answer within two seconds."""

    immediate = False

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def post(self, status: bytes) -> None:
        _with_timeout(lambda: self._store.set(f"board/rank-{self._rank}", status.decode()))

    def status(self, rank: int) -> bytes:
        return (self.read(f"rank-{rank}") or "").encode()

    def write(self, name: str, text: str) -> bool:
        def write() -> bool:
            is_first = self._store.add(f"board/{name}/first", 1) == 1
            if is_first:
                self._store.set(f"board/{name}", text)
            return is_first

        return _with_timeout(write)

    def read(self, name: str) -> str | None:
        return _with_timeout(
            lambda: self._store.get(f"board/{name}").decode() if self._store.check([f"board/{name}"]) else None
        )

    def remove(self) -> None:
        """Do nothing: the store ends with the run."""

    def close(self, *, failed: bool) -> None:
        """Do nothing: the store ends with the run."""


Board = FolderBoard | StoreBoard


def run_in_thread(act: Callable[[], T], name: str) -> Future[T]:
    """Run `act` in a daemon thread, which does not delay the exit of the process."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _with_timeout(call: Callable[[], T]) -> T:
    """Return the result of a call that may block; BoardUnavailable if it fails or takes over `STORE_SECONDS`."""
    try:
        return run_in_thread(call, "board").result(STORE_SECONDS)
    except Exception as error:
        raise BoardUnavailable from error


def to_stderr(text: str) -> None:
    """Print to stderr; ignore errors of a closed stream."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_identity(board: Board, identity: Identity) -> None:
    """Publish the identity of a rank."""
    board.write(f"who-{identity.rank}", json.dumps(asdict(identity)))


def read_identity(board: Board, rank: int) -> Identity:
    """Return the identity of a rank; host "?" if the rank has not published it."""
    text = board.read(f"who-{rank}")
    return Identity(**json.loads(text)) if text else Identity(rank, "?", 0)


def process_state(pid: int) -> str:
    """Return the kernel's state of a local process: "R", "S", "D", "T" (stopped), "Z" (zombie) or "" (no process)."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].strip()[0]
    return "" if Path("/proc/self").exists() else "?"


def open_board(rank: int, size: int, store: Store | None, *, one_host: bool) -> Board:
    """Open the board of a run: the supervisor's folder, a folder in memory on one machine, or else the store."""
    given = os.environ.get("MEGALITH_BOARD")
    if given:
        return FolderBoard(Path(given), rank, supervised_size=size)
    assert store is not None, "a single process has a board only under a supervisor"
    if not one_host:
        return StoreBoard(store, rank)
    if rank == 0:
        store.set("board", make_board_folder())
    return FolderBoard(Path(store.get("board").decode()), rank, of_size=size)


def make_board_folder() -> str:
    """Create a private folder, in memory if there is room; remove those that killed processes have left there."""
    _remove_abandoned()
    has_room = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MIN_FREE_BYTES
    return tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY if has_room else None)


def _remove_abandoned() -> None:
    """Remove this user's boards that no living process uses, unless they are younger than 60 s.

    A board whose process died before it took the lock is locked here, so that only one start removes it.
    """
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _MIN_AGE_SECONDS:
                continue
            with (folder / _IN_USE).open("a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
