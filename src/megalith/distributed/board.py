"""Where every rank writes what it is doing, for all others to read, even when it can say nothing any more.

`FolderBoard` for the ranks of one machine: a file in memory for each rank, which survives it. `StoreBoard` for several
machines: the store of the run, written by a thread at every beat. Documents (failures, stacks, the cause) lie beside.
Nothing here needs torch, so that the supervisor of a run can read too.
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
_ROOM = 2**20  # a page for each status and document of a hundred ranks; containers have 64 MiB for all they run
STORE_SECONDS = 2.0
"""How long a store may take to answer."""
_PREFIX, _IN_USE = "megalith-", "in-use"
_SECONDS_TO_MARK = 60.0


@dataclass(frozen=True)
class Identity:
    """Which process a rank is."""

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
"""Points of a step -> where that is, in words. Points that are not here belong to a save."""

MESSAGE = "message"
"""In place of a collective: a message between two ranks, of which the other is then the axis."""


@dataclass(frozen=True)
class Status:
    """What a rank does."""

    step: int = 0  # the step under way
    phase: str = "start"  # the last point that it passed (`PHASES`)
    waits: bool = False  # whether it waits for other ranks
    # its last collective, over which ranks, and which one that was of all it called
    operation: str = "-"
    axis: str = "-"
    count: int = 0
    since: float = 0.0  # `time.monotonic()` of its last change, seconds; comparable on one machine
    beat: int = 0  # number of the beat at which a `StoreBoard` got it

    @property
    def place(self) -> str:
        """Step and phase in words."""
        where = PHASES.get(self.phase, "while saving")
        return f"at step {self.step} {where}" if self.step else where

    @property
    def doing(self) -> str:
        """Step and phase, and what it waits for."""
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
        """The inverse of `encode`; None for a line that is not there, or is just being written."""
        try:
            step, phase, waits, operation, axis, count, since, beat = line.decode().split(" ")
            return cls(int(step), phase, waits == "1", operation, axis, int(count), float(since), int(beat))
        except ValueError:
            return None


class BoardGone(Exception):
    """The store does not answer: whoever holds it is dead or stopped."""


class FolderBoard:
    """Statuses by rank and documents by name in a folder of this machine, best one in memory; without a rank, to read.

    `of_size` ranks share it and see to its removal; None where someone else does, or `supervised_size` ranks if their
    supervisor is dead.
    """

    immediate = True  # `post` is so cheap that every change may be posted

    def __init__(
        self, folder: Path, rank: int | None = None, *, of_size: int | None = None, supervised_size: int = 0
    ) -> None:
        self.folder, self._rank, self._of_size = folder, rank, of_size
        self._supervised_size = supervised_size
        self._own: mmap.mmap | None = None
        # A lock for as long as this process lives; the kernel releases it however the process ends.
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
        """The last status of a rank, empty if there is none."""
        with suppress(OSError):
            return (self.folder / f"rank-{rank}").read_bytes().partition(b"\0")[0]
        return b""

    def write(self, name: str, text: str) -> bool:
        """Write a document unless there is one of this name; returns whether it was written."""
        draft = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            draft.write_text(text, encoding="utf-8")
            os.link(draft, self.folder / name)  # whole or not at all, and the first one wins
        except OSError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, name: str) -> str | None:
        """A document, None if there is none."""
        with suppress(OSError):
            return (self.folder / name).read_text(encoding="utf-8")
        return None

    def remove(self) -> None:
        """Leave nothing behind; no rank needs the board any more."""
        if self._of_size is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, *, failed: bool) -> None:
        """This rank is done; leave nothing behind as soon as all others are."""
        supervisor_is_gone = os.getppid() != int(os.environ.get("MEGALITH_SUPERVISOR") or os.getppid())
        if self._of_size is None and self._supervised_size and supervisor_is_gone:
            self._of_size = self._supervised_size
        if self._rank != 0 and not failed:
            return
        # After a failure rank 0 may be dead and the last one removes the board. No one waits then: the connections of a
        # process close when it ends, and the others hear of it by that.
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
    """The same in the store of the run; BoardGone, after two seconds, from a store that does not answer."""

    immediate = False

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def post(self, status: bytes) -> None:
        _soon(lambda: self._store.set(f"board/rank-{self._rank}", status.decode()))

    def status(self, rank: int) -> bytes:
        return (self.read(f"rank-{rank}") or "").encode()

    def write(self, name: str, text: str) -> bool:
        def write() -> bool:
            is_first = self._store.add(f"board/{name}/first", 1) == 1
            if is_first:
                self._store.set(f"board/{name}", text)
            return is_first

        return _soon(write)

    def read(self, name: str) -> str | None:
        return _soon(
            lambda: self._store.get(f"board/{name}").decode() if self._store.check([f"board/{name}"]) else None
        )

    def remove(self) -> None:
        """Nothing to do: the store ends with the run."""

    def close(self, *, failed: bool) -> None:
        """Nothing to do either."""


Board = FolderBoard | StoreBoard


def in_thread(act: Callable[[], T], name: str) -> Future[T]:
    """Run `act` in a thread that no end of the program waits for."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _soon(call: Callable[[], T]) -> T:
    """The result of a call that may never return; BoardGone if it fails or takes too long."""
    try:
        return in_thread(call, "board").result(STORE_SECONDS)
    except Exception as error:
        raise BoardGone from error


def to_stderr(text: str) -> None:
    """Print what whoever started the run must read, if there is anyone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_identity(board: Board, identity: Identity) -> None:
    board.write(f"who-{identity.rank}", json.dumps(asdict(identity)))


def read_identity(board: Board, rank: int) -> Identity:
    """Which process a rank is; host "?" if it did not say so."""
    text = board.read(f"who-{rank}")
    return Identity(**json.loads(text)) if text else Identity(rank, "?", 0)


def process_state(pid: int) -> str:
    """What the kernel says of a process of this machine: "R", "S", "D", "T" (stopped), "Z" (dead), "" (gone)."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].strip()[0]
    return "" if Path("/proc/self").exists() else "?"


def open_board(rank: int, size: int, store: Store | None, *, one_host: bool) -> Board:
    """The board of a run: the supervisor's, one in memory on one machine, or the store of the run."""
    given = os.environ.get("MEGALITH_BOARD")
    if given:
        return FolderBoard(Path(given), rank, supervised_size=size)
    assert store is not None, "one process alone has a board only under a supervisor"
    if not one_host:
        return StoreBoard(store, rank)
    if rank == 0:
        store.set("board", make_folder())
    return FolderBoard(Path(store.get("board").decode()), rank, of_size=size)


def make_folder() -> str:
    """Return a new private folder, in memory where there is room; what killed processes have left there is removed."""
    _remove_abandoned()
    roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM
    return tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY if roomy else None)


def _remove_abandoned() -> None:
    """Remove the boards of this user that no living process uses; a new one gets time to be marked.

    One that its process did not live to mark is marked here, so that only one start removes it.
    """
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _SECONDS_TO_MARK:
                continue
            with (folder / _IN_USE).open("a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
