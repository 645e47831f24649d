"""Ownership of a save folder: the identity of a process, its liveness, and the lock.

Two runs that save into one folder would delete each other's work, so a run claims the folder first. A claim is a
small JSON file, on which its owner holds a `flock` for as long as it lives: the kernel releases it when the process
ends, however that happens, and keeps it for one that is frozen. Where that says nothing (another machine, a file system
without locks) an owner is taken for dead when the file has not been touched for a while although its owner touches it
every few seconds; clocks are not compared. An owner that was only frozen may wake up after that, so what it then does
must not harm: see `commit`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from megalith.checkpoint.sources.source import check_save_folder
from megalith.errors import CheckpointError

LOCK_FILE = ".megalith-lock"
HEARTBEAT_SECONDS = 10.0
_SILENT_BEATS = 3
_LEASE_BEATS = 12  # a file server keeps the locks of a machine that is gone for a minute or two
_GUARD_SECONDS = 5.0
_log = logging.getLogger("megalith.checkpoint")


@dataclass(frozen=True)
class Owner:
    """Process, identified across machines and after its number has been given to another."""

    host: str = field(compare=False)  # machine name, for people
    place: str  # identifies the running system and its process numbering (boot and PID namespace)
    pid: int  # process number
    born: str  # start of the process in the system's own ticks; "" where the system does not tell

    @staticmethod
    def this_process() -> Owner:
        pid = os.getpid()
        return Owner(socket.gethostname(), _place(), pid, _born(pid))

    def is_here(self) -> bool:
        """Return whether this system can tell if the process is alive."""
        return self.place == _place()

    def is_dead(self) -> bool:
        """Return True only if certain: same system, and the process is gone or its number belongs to another."""
        return self.is_here() and not _alive(self.pid, self.born)


@cache
def _place() -> str:
    """Return a hash of host, boot and PID namespace: two containers on one host number processes separately.

    Taken once, as a machine may be given another name (by DHCP) while the run holds a claim.
    """
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
    """Return whether this process has claimed a save folder: then what any other process left there is garbage."""
    held = _claim_of(folder)
    return held is not None and held.owner == Owner.this_process()


def check_claim(folder: Path, workspace: Path) -> None:
    """Check that this process, which claimed a save folder, still has it.

    Otherwise another run took it over, and with it removed `workspace`, or it was renamed or removed, or cannot be
    read: a CheckpointError, after which nothing may be saved any more.
    """
    held = _claim_of(folder)
    if held is not None and held.owner != Owner.this_process():
        raise CheckpointError(
            f"{folder} was taken over by another run while this one gave no sign of life: process {held.owner.pid} on "
            f"{held.owner.host}, since {held.since}; this run saves nothing more and ends"
        )
    try:
        if workspace.is_dir():
            return
        is_there = folder.is_dir()
    except OSError as error:  # a file server that does not answer, or a stale handle
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    if is_there:
        what = "was taken over by another run, which has ended since, or put in the place of the folder of this run"
    else:
        what = "was renamed or removed while this run was saving into it"
    raise CheckpointError(f"{folder} {what}; this run saves nothing more and ends")


def _claim_of(folder: Path) -> _Claim | None:
    try:
        return _Claim.parse((folder / LOCK_FILE).read_text("utf-8", "replace"))
    except OSError:
        return None


@dataclass(frozen=True)
class _Claim:
    """The content of the lock file."""

    owner: Owner  # whose it is
    token: str  # unique to this claim
    since: str  # when it was made, for people
    domain: str = ""  # the system and file system on which the owner holds a lock on the file; "" where it holds none

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> _Claim | None:
        """Parse a claim; None for an empty or torn file: its writer died within a few microseconds of making it."""
        try:
            body = json.loads(text)
            return _Claim(Owner(**body["owner"]), body["token"], body["since"], body.get("domain", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the save folder for this process while the context lasts, with a sign of life every HEARTBEAT_SECONDS.

    A CheckpointError if another run holds it (the message names process, machine and age) or it cannot be used.
    """
    check_save_folder(folder)
    path = folder / LOCK_FILE
    mine = _Claim(Owner.this_process(), uuid.uuid4().hex, time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(path, mine)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be used for saving: {error.strerror or error}") from error
    # A lock is released when the last copy of the open file is closed; a child must not keep that of a killed run.
    os.register_at_fork(after_in_child=lock.release)
    if not lock.enforced:
        _log.warning("%s: the file system has no locks; another run in it is known by its signs of life only", folder)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, mine, stop), name="save-folder-heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        with contextlib.suppress(OSError):
            if _has(path, mine):
                path.unlink()
        lock.release()


class _Lock:
    """The lock file, made if missing, open, and locked as far as the file system can."""

    def __init__(self, path: Path) -> None:
        self._fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)]
        self.taken = self.enforced = False
        try:
            self.taken = _flock(self.fd)
            self.enforced = self.taken and not _locks_twice(path)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                self.release()
                raise
            self.taken = True  # two runs that start in the same instant are not told apart

    @property
    def fd(self) -> int:
        return self._fds[0]

    @property
    def domain(self) -> str:
        """System and file system that the lock holds in; "" where it holds in none."""
        return f"{_boot()}.{os.fstat(self.fd).st_dev}" if self.enforced else ""

    def is_of(self, path: Path) -> bool:
        """Return whether the path still leads to the locked file."""
        return path.exists() and os.path.samestat(os.fstat(self.fd), path.stat())

    def read(self) -> _Claim | None:
        return _Claim.parse(os.pread(self.fd, 65536, 0).decode("utf-8", "replace"))

    def write(self, claim: _Claim) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, claim.text().encode(), 0)
        os.fsync(self.fd)

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _flock(fd: int) -> bool:
    """Take the lock if it is free; raise an OSError if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _locks_twice(path: Path) -> bool:
    """Return whether a locked file can be locked again: some file systems accept locks and keep none."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _flock(fd)
    finally:
        os.close(fd)


def _boot() -> str:
    """Return a hash that identifies the running kernel, in any container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = socket.gethostname()
    return hashlib.blake2b(boot.encode(), digest_size=8).hexdigest()


def _take(path: Path, mine: _Claim) -> _Lock:
    """Lock the file and write the claim into it."""
    began = time.monotonic()
    while True:
        lock = _Lock(path)
        try:
            held = lock.read()
            if lock.taken:
                refused = held is not None and _is_live(path, held, lock)
            else:
                refused = _is_refused(path, held, lock, time.monotonic() - began)
            if not lock.is_of(path):  # its owner has ended and removed it
                lock.release()
                continue
            if refused:
                raise _refusal(path, held)
            if lock.taken:
                lock.write(replace(mine, domain=lock.domain))
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()
        time.sleep(0.05)


def _is_live(path: Path, held: _Claim, lock: _Lock) -> bool:
    """Return whether the owner of a claim may be alive, although the lock could be taken here."""
    if held.owner.is_here():
        return not held.owner.is_dead()
    if held.domain and held.domain == lock.domain:
        return False  # it was in another container of this machine
    return _beats(path)


def _is_refused(path: Path, held: _Claim | None, lock: _Lock, waited: float) -> bool:
    """Return whether to stop waiting for a lock that another process has, or has just released by removing the file."""
    if lock.taken:
        return False
    if held is None or held.owner.is_dead():
        return waited > _GUARD_SECONDS  # its owner is about to write it, or to remove it
    here = held.owner.is_here() or held.domain == f"{_boot()}.{os.fstat(lock.fd).st_dev}"
    return here or _beats(path) or waited > _LEASE_BEATS * HEARTBEAT_SECONDS


def _refusal(path: Path, held: _Claim | None) -> CheckpointError:
    try:
        age = max(time.time() - path.stat().st_mtime, 0)
    except OSError:
        age = 0
    who = "a process that does not say its name"
    if held is not None:
        who = f"process {held.owner.pid} on {held.owner.host}, since {held.since}, last sign of life {age:.0f} s ago"
    return CheckpointError(
        f"{path.parent} is being saved to by another run: {who}; stop that run or give another folder (--save of a "
        f"run, the destination of megalith checkpoint; if it is certainly gone: remove {path})"
    )


def _beats(path: Path) -> bool:
    """Watch for the owner's next heartbeat. Opening the file makes network file systems look again."""
    before = _touched(path)
    for _ in range(_SILENT_BEATS):
        time.sleep(HEARTBEAT_SECONDS)
        if _touched(path) != before:
            return True
    return False


def _touched(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:  # its owner has ended
        return 0


def _beat(path: Path, mine: _Claim, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):  # a full or briefly unreachable disk must not end the run
            if _has(path, mine):  # else it would give signs of life for the one that took it over
                os.utime(path)


def _has(path: Path, mine: _Claim) -> bool:
    """Return whether the file holds this claim."""
    held = _Claim.parse(path.read_text("utf-8", "replace"))
    return held is None or held.token == mine.token
