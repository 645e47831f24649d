"""Who writes here: the identity of a process, its liveness, and the lock of a save folder.

Two runs that save into one folder would delete each other's work, so a run claims the folder first. A claim is a
small JSON file. Its owner is known to be dead when the process is gone (same machine), or when the file has not been
touched for a while although its owner touches it every few seconds (another machine); clocks are not compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megalith.checkpoint.source import refuse_model_folder
from megalith.errors import CheckpointError

LOCK_FILE = ".megalith-lock"
HEARTBEAT_SECONDS = 10.0
_SILENT_BEATS = 3
_GUARD_SECONDS = 5.0


@dataclass(frozen=True)
class Owner:
    """A process, known across machines and after its number has been given to another.

    Attributes:
        host: machine name, for people.
        place: identifies the running system and its process numbering (boot and PID namespace).
        pid: process number.
        born: start of the process in the system's own ticks; "" where the system does not tell.
    """

    host: str
    place: str
    pid: int
    born: str

    @staticmethod
    def this_process() -> Owner:
        pid = os.getpid()
        return Owner(socket.gethostname(), _place(), pid, _born(pid))

    def is_here(self) -> bool:
        """Whether its liveness can be asked of this system."""
        return self.place == _place()

    def is_dead(self) -> bool:
        """True only if certain: same system, and the process is gone or its number belongs to another."""
        return self.is_here() and not _alive(self.pid, self.born)


def _place() -> str:
    """Host, boot and PID namespace: two containers on one host number their processes separately."""
    parts = [socket.gethostname()]
    for source in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):  # no /proc outside Linux
            parts.append(source())
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def _born(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    state, start_time = fields[0], fields[19]
    return "" if state in "ZX" else start_time


def _alive(pid: int, born: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and another user's
    return not born or _born(pid) == born


def holds_claim(folder: Path) -> bool:
    """Whether this process has claimed a save folder: then whatever another process left there is left for good."""
    try:
        held = _Claim.parse((folder / LOCK_FILE).read_text("utf-8", "replace"))
    except OSError:
        return False
    return held is not None and held.owner == Owner.this_process()


@dataclass(frozen=True)
class _Claim:
    """The content of the lock file."""

    owner: Owner
    token: str
    since: str

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> _Claim | None:
        """None for an empty or torn file: its writer died within a few microseconds of making it."""
        try:
            body = json.loads(text)
            return _Claim(Owner(**body["owner"]), body["token"], body["since"])
        except (ValueError, KeyError, TypeError):
            return None


@contextmanager
def claim(folder: Path, *, heartbeat: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Hold the save folder for this process while the context lasts.

    Args:
        folder: the save folder; made if missing.
        heartbeat: seconds between signs of life.

    Raises:
        CheckpointError: another run holds it (the message names process, machine and age), it is not writable, or it
            is the folder of a Hugging Face model.
    """
    refuse_model_folder(folder)
    path = folder / LOCK_FILE
    mine = _Claim(Owner.this_process(), uuid.uuid4().hex, time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(path, mine, heartbeat)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be used for saving: {error.strerror or error}") from error
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, stop, heartbeat), name="save-folder-heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        _drop(path, mine)


def _take(path: Path, mine: _Claim, heartbeat: float) -> None:
    with _guarded(path) as fd:
        held = _Claim.parse(os.pread(fd, 65536, 0).decode("utf-8", "replace"))
        if held is not None and _is_live(path, held, heartbeat):
            age = time.time() - os.fstat(fd).st_mtime
            raise CheckpointError(
                f"{path.parent} is being saved to by another run: process {held.owner.pid} on {held.owner.host}, "
                f"since {held.since}, last sign of life {max(age, 0):.0f} s ago; stop that run or give another --save"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, mine.text().encode(), 0)
        os.fsync(fd)


def _is_live(path: Path, held: _Claim, heartbeat: float) -> bool:
    if held.owner.is_here():
        return not held.owner.is_dead()
    # Another machine: watch for its next sign of life. Opening the file makes network file systems look again.
    before = _touched(path)
    for _ in range(_SILENT_BEATS):
        time.sleep(heartbeat)
        if _touched(path) != before:
            return True
    return False


def _touched(path: Path) -> int:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


@contextmanager
def _guarded(path: Path) -> Iterator[int]:
    """The lock file, open, and with no other process between reading and writing it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _exclusive(fd)
            current = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
            if current:  # else the previous owner removed it in between
                yield fd
                return
        finally:
            os.close(fd)  # releases the guard


def _exclusive(fd: int) -> None:
    deadline = time.monotonic() + _GUARD_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return  # a file system without locks: two runs that start in the same instant are not told apart
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _beat(path: Path, stop: threading.Event, heartbeat: float) -> None:
    while not stop.wait(heartbeat):
        with contextlib.suppress(OSError):  # a full or briefly unreachable disk must not end the run
            os.utime(path)


def _drop(path: Path, mine: _Claim) -> None:
    with contextlib.suppress(OSError), _guarded(path) as fd:
        held = _Claim.parse(os.pread(fd, 65536, 0).decode("utf-8", "replace"))
        if held is None or held.token == mine.token:
            path.unlink()
