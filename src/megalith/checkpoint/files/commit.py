"""A folder that appears whole or not at all: built under another name, made durable, then renamed.

Names beginning with a dot belong to savers: `.saving-iter_0000010.<place>.<pid>.<born>` is being built, and
`.replaced-iter_0000010...` was moved aside by a rename in progress, and `.removing-iter_0000010...` is being deleted.
What a dead saver left is cleared by the next.

A run that has claimed the save folder keeps these in a workspace, `.claimed-run.<place>.<pid>.<born>`, and whatever it
shows or takes away is one rename out of the workspace or into it. Who takes the folder over empties and removes the
workspace of the one before: should that one only have been frozen, between a check and a rename even, the rename
fails. So no process replaces or deletes files of a later owner.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megalith.checkpoint.files import manifest
from megalith.checkpoint.store.owner import Owner, check_claim, claim, holds_claim
from megalith.errors import CheckpointError

_SAVING = ".saving-"
_REPLACED = ".replaced-"
_REMOVING = ".removing-"
_CLAIMED = ".claimed-"
_ROUNDS = 100  # a frozen saver that wakes up may add something while its workspace is being emptied
_VISIBILITY_TIMEOUT_SECONDS = 10.0  # network file systems cache missing entries for some seconds
_UNTOUCHED = "nothing was left there, and earlier checkpoints are untouched"
_ELSEWHERE = "write to another folder (--save of a run, the destination of megalith checkpoint)"
_log = logging.getLogger("megalith.checkpoint")


def ignore_stage(_: str) -> None:
    """Do nothing: the default of `on_stage`, which is called at the stages of a save."""


def _suffix(owner: Owner) -> str:
    return f".{owner.place}.{owner.pid}.{owner.born}"


def workspace_of(parent: Path) -> Path:
    """Return the hidden folder for the unfinished files of this process in a save folder that it has locked."""
    return parent / f"{_CLAIMED}run{_suffix(Owner.this_process())}"


def _aside(path: Path, prefix: str, *, claimed: bool) -> Path:
    """Return the hidden name that a file or folder has before it gets its name, or after it lost it."""
    room = workspace_of(path.parent) if claimed else path.parent
    return room / f"{prefix}{path.name}{_suffix(Owner.this_process())}"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a save folder for this process, alone, while the context lasts; arguments and errors as of `owner.claim`."""
    with claim(folder):
        workspace = workspace_of(folder)
        try:
            workspace.mkdir(exist_ok=True)
            left = clear_leftovers(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be used for saving: {error.strerror or error}") from error
        if left:
            raise CheckpointError(f"{folder} cannot be used for saving: {left[0]} of a former run cannot be removed")
        try:
            yield
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def _left_by_the_dead(parent: Path, prefix: str) -> list[Path]:
    """Return what savers that ended left under a prefix, in the save folder and in their workspaces.

    Of this system that can be asked. Of another it is known only while this process holds the claim of the folder:
    a container that is started again is another system, so leftovers would pile up otherwise.
    """
    alone, me = holds_claim(parent), Owner.this_process()
    found = []
    for pattern in (f"{prefix}*", f"{_CLAIMED}*/{prefix}*"):
        for path in parent.glob(pattern):
            owner = _owner_of(path if path.parent == parent else path.parent, me.host)
            if owner is not None and owner != me and (owner.is_dead() or alone):
                found.append(path)
    return found


def _owner_of(path: Path, host: str) -> Owner | None:
    parts = path.name.rsplit(".", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return Owner(host, place=parts[1], pid=int(parts[2]), born=parts[3])


@dataclass(frozen=True)
class TempFolder:
    """Folder under a temporary name and the path that `commit` renames it to."""

    path: Path  # temporary path
    final: Path  # path after `commit`
    claimed: bool = False  # whether this process holds the lock on the parent of `final`

    def commit(self) -> None:
        """Make the folder durable and move it to its place; what stood there is removed afterwards.

        A crash between the two renames leaves the old folder under its `.replaced-` name, from where
        `put_back_replaced` recovers it.
        """
        sync_folder(self.path)
        parent = self.final.parent
        aside = _aside(self.final, _REPLACED, claimed=self.claimed)
        try:
            if self.final.exists():
                self.final.rename(aside)
            self.path.rename(self.final)
        except BaseException:  # Ctrl-C too: the end of the claim removes the workspace with the replaced folder
            if aside.exists() and not self.final.exists():
                with contextlib.suppress(OSError):  # a later owner has put it back
                    aside.rename(self.final)
            raise
        sync_folder(parent)
        if aside.exists():
            shutil.rmtree(aside)

    def abandon(self) -> None:
        """Remove the folder, unless it is in its place."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_temp_folder(final: Path, *, claimed: bool = False) -> TempFolder:
    """Make an empty folder to commit or abandon; a NewerFormatError if a later version wrote what is in its place."""
    manifest.refuse_newer(final)
    path = _aside(final, _SAVING, claimed=claimed)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=not claimed)
    return TempFolder(path, final, claimed)


@contextmanager
def temp_folder(final: Path, needed: int) -> Iterator[TempFolder]:
    """Make an empty folder for `final`, of `needed` bytes; it is removed on any error, and hidden before `commit`."""
    parent = final.parent
    with reporting_disk_full(parent, needed):
        parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(parent)
        check_space(parent, needed)
        new = make_temp_folder(final, claimed=holds_claim(parent))
        try:
            yield new
        except BaseException:
            new.abandon()
            raise


def set_aside(folder: Path, *, claimed: bool = False) -> Path:
    """Rename a folder before its deletion, so that no reader takes it for a checkpoint; return its new path.

    Deleting it where it stands would show half a checkpoint if this process died meanwhile.
    """
    aside = _aside(folder, _REMOVING, claimed=claimed)
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    return aside


def delete(asides: Iterable[Path]) -> None:
    """Delete replaced folders; log those that cannot be deleted, which the next save removes."""
    for aside in asides:
        try:
            shutil.rmtree(aside)
        except FileNotFoundError:
            pass  # the end of the run has removed it
        except OSError as error:
            _log.warning("%s cannot be deleted: %s", aside, error)


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove what savers that are gone left in a save folder; returns the workspaces of theirs that still exist."""
    left: list[Path] = []
    for _ in range(_ROUNDS):
        put_back_replaced(parent)
        for prefix in (_SAVING, _REPLACED, _REMOVING):
            for path in _left_by_the_dead(parent, prefix):
                _remove(parent, path)
        if not (left := [path for path in _left_by_the_dead(parent, _CLAIMED) if path.parent == parent]):
            break
        for workspace in left:
            for path in workspace.iterdir():
                if not path.name.startswith(_REPLACED):
                    _remove(parent, path)
            with contextlib.suppress(OSError):  # not empty: its owner lives, and has added something
                workspace.rmdir()
    return left


def _remove(parent: Path, path: Path) -> None:
    """Remove a folder, or the temporary file of a tracker; its owner, should it live, must not show half of it."""
    workspace = workspace_of(parent)
    room = workspace if workspace.is_dir() else parent
    aside = room / f"{_REMOVING}{path.name.strip('.').partition('.')[0]}{_suffix(Owner.this_process())}"
    with contextlib.suppress(OSError):
        path.rename(aside)
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def put_back_replaced(parent: Path) -> None:
    """Undo the first rename of a replacement whose saver died before the second."""
    for aside in _left_by_the_dead(parent, _REPLACED):
        final = parent / aside.name.removeprefix(_REPLACED).rsplit(".", 3)[0]
        if not final.exists():
            with contextlib.suppress(OSError):  # a read-only folder stays as it is
                aside.rename(final)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes, *, claimed: bool = False) -> None:
    """Replace a small file so that a reader finds the old or the new content, never a mixture."""
    temporary = _aside(path, _SAVING, claimed=claimed)
    temporary.unlink(missing_ok=True)
    write_durably(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def wait_until_seen(path: Path, size: int = 0) -> None:
    """Wait until a folder or a file of `size` bytes that another rank made, on another host perhaps, is seen here."""
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
    while not (path.exists() and path.stat().st_size >= size):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} was made by another rank and is not seen here: with several hosts, --save must name a folder "
                "of a file system that all of them share"
            )
        time.sleep(0.05)


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that this user may still write to the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def reporting_disk_full(folder: Path, needed: int, *, claimed: bool = False) -> Iterator[None]:
    """Translate what a full or unwritable disk raises into a CheckpointError with the numbers; `needed` is in bytes."""
    try:
        yield
    except OSError as error:
        if claimed:
            check_claim(folder, workspace_of(folder))
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(_refused(folder, needed, error)) from error
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def _refused(folder: Path, needed: int, error: OSError) -> str:
    """Describe which limit of the disk was met: space, number of files, the user's quota or the size of a file."""
    reason = error.strerror or "disk full"
    if error.errno == errno.EFBIG:
        soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = "the largest file that it can hold" if soft == resource.RLIM_INFINITY else f"{soft} bytes (ulimit -f)"
        return (
            f"a file of the checkpoint is larger than {folder} takes ({reason}): {limit}; {_UNTOUCHED}; raise the "
            f"limit or {_ELSEWHERE}"
        )
    status = os.statvfs(folder)
    if error.errno == errno.ENOSPC and status.f_files and not status.f_favail:
        return (
            f"the checkpoint does not fit in {folder} ({reason}): all {status.f_files} inodes of the file system are "
            f"used, though {free_bytes(folder)} bytes are free; {_UNTOUCHED}; delete files there, many small ones "
            f"above all, or {_ELSEWHERE}"
        )
    return _full(folder, needed, free_bytes(folder), reason)


def check_space(folder: Path, needed: int) -> None:
    """Refuse before the first byte if the file system has less room than is needed."""
    available = free_bytes(folder)
    if available < needed:
        raise CheckpointError(_full(folder, needed, available, "not enough free space"))


def _full(folder: Path, needed: int, available: int, reason: str) -> str:
    return (
        f"the checkpoint does not fit in {folder} ({reason}): it needs {needed} bytes ({needed / 2**30:.2f} GiB), "
        f"{available} bytes ({available / 2**30:.2f} GiB) are free; {_UNTOUCHED}; free some "
        f"space or {_ELSEWHERE}"
    )
