"""A folder that appears whole or not at all: built under another name, made durable, then renamed.

Names beginning with a dot belong to savers: `.saving-iter_0000010.<place>.<pid>.<born>` is being built, and
`.replaced-iter_0000010...` was moved aside by a rename in progress, and `.removing-iter_0000010...` is being deleted.
What a dead saver left is cleared by the next.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megalith.checkpoint import manifest
from megalith.checkpoint.owner import Owner, holds_claim
from megalith.errors import CheckpointError

_SAVING = ".saving-"
_REPLACED = ".replaced-"
_REMOVING = ".removing-"
_log = logging.getLogger("megalith.checkpoint")


def no_point(_: str) -> None:
    """The default for `on_point`: nothing happens at the named points of a save."""


def _suffix(owner: Owner) -> str:
    return f".{owner.place}.{owner.pid}.{owner.born}"


def _left_by_the_dead(parent: Path, prefix: str) -> list[Path]:
    """What savers that are gone left under a prefix.

    Of this system that can be asked. Of another it is known only while this process holds the claim of the folder:
    a container that is started again is another system, so leftovers would pile up otherwise.
    """
    alone, me = holds_claim(parent), Owner.this_process()
    found = []
    for path in parent.glob(f"{prefix}*"):
        owner = _owner_of(path, me.host)
        if owner is not None and owner != me and (owner.is_dead() or alone):
            found.append(path)
    return found


def _owner_of(path: Path, host: str) -> Owner | None:
    parts = path.name.rsplit(".", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return Owner(host, place=parts[1], pid=int(parts[2]), born=parts[3])


@dataclass(frozen=True)
class Building:
    """A folder under construction and the place that it is meant for."""

    path: Path
    final: Path

    def commit(self) -> None:
        """Make the folder durable and move it to its place; what stood there is removed afterwards.

        A crash between the two renames leaves the old folder under its `.replaced-` name, from where
        `put_back_replaced` recovers it.
        """
        sync_folder(self.path)
        parent = self.final.parent
        aside = parent / f"{_REPLACED}{self.final.name}{_suffix(Owner.this_process())}"
        if self.final.exists():
            self.final.rename(aside)
        try:
            self.path.rename(self.final)
        except OSError:
            if aside.exists():
                aside.rename(self.final)
            raise
        sync_folder(parent)
        if aside.exists():
            shutil.rmtree(aside)

    def abandon(self) -> None:
        """Remove the folder, unless it is in its place."""
        shutil.rmtree(self.path, ignore_errors=True)


def begin_building(final: Path) -> Building:
    """Make an empty folder beside `final`; the caller commits or abandons it.

    Raises:
        NewerFormatError: a checkpoint of a later version is in that place.
    """
    manifest.refuse_newer(final)
    path = final.parent / f"{_SAVING}{final.name}{_suffix(Owner.this_process())}"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return Building(path, final)


@contextmanager
def building(final: Path) -> Iterator[Building]:
    """Make an empty folder beside `final`; it is removed on any error, and stays on none until `commit`."""
    new = begin_building(final)
    try:
        yield new
    except BaseException:
        new.abandon()
        raise


def set_aside(folder: Path) -> Path:
    """Give a folder that is to be deleted a name that nobody takes for a checkpoint; returns where it is now.

    Deleting it where it stands would show half a checkpoint if this process died meanwhile.
    """
    aside = folder.parent / f"{_REMOVING}{folder.name}{_suffix(Owner.this_process())}"
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    return aside


def delete(asides: Iterable[Path]) -> None:
    """Delete what was set aside; what cannot be deleted is said in the log, and is the next saver's to clear."""
    for aside in asides:
        try:
            shutil.rmtree(aside)
        except OSError as error:
            _log.warning("%s cannot be deleted: %s", aside, error)


def clear_leftovers(parent: Path) -> None:
    """Remove what savers that are gone left in a save folder."""
    put_back_replaced(parent)
    for prefix in (_SAVING, _REPLACED, _REMOVING):
        for path in _left_by_the_dead(parent, prefix):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, or the temporary file of a tracker."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader finds the old or the new content, never a mixture."""
    temporary = path.parent / f"{_SAVING}{path.name}{_suffix(Owner.this_process())}"
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


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def naming_full_disk(folder: Path, needed: int) -> Iterator[None]:
    """Translate what a full or unwritable disk raises into a CheckpointError with the numbers.

    Args:
        folder: where the files go.
        needed: bytes that are about to be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(_full(folder, needed, free_bytes(folder), error.strerror or "disk full")) from error
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse before the first byte if the file system has less room than is needed."""
    available = free_bytes(folder)
    if available < needed:
        raise CheckpointError(_full(folder, needed, available, "not enough free space"))


def _full(folder: Path, needed: int, available: int, reason: str) -> str:
    return (
        f"the checkpoint does not fit in {folder} ({reason}): it needs {needed} bytes ({needed / 2**30:.2f} GiB), "
        f"{available} bytes ({available / 2**30:.2f} GiB) are free; nothing was left there, and earlier checkpoints "
        "are untouched; free some space or save elsewhere with --save"
    )
