"""One save by all the ranks of a run into one folder: prepare, begin, write, commit.

    every rank          encodes its content and plans its files                        pre_save
    the first           clears leftovers, checks the space, makes the folder under a temporary name
    every rank          writes and hashes its files in it                              mid_save (pre_commit)
                        (where files are shared: lays them out; writes; completes and hashes them)
    the first           .metadata, common.pt, ..., manifest.json; rename; tracker      pre_commit, mid_commit
    every rank                                                                         post_commit

Between two lines the ranks agree that the line succeeded everywhere (`crew`), so that an error of one is an error
of all, and the first rank then removes the folder. A rank that is killed breaks the next agreement, with the same
effect; killed after its files are complete it stops nobody, since the first rank needs it no more.

`run` does all of it at once. A save beside the training (`background`) calls `begin`, `gathered` and `agreed` between
two steps, and `write` and `commit`, which speak to no other rank, in threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalith.checkpoint.commit import (
    Building,
    begin_building,
    check_space,
    clear_leftovers,
    naming_full_disk,
    workspace_of,
)
from megalith.checkpoint.content import CheckpointContent
from megalith.checkpoint.crew import Crew
from megalith.checkpoint.dcp_writing import Written
from megalith.checkpoint.folder_writer import FolderWriter, MakeWriter, SharedFiles, TorchDistWriter
from megalith.checkpoint.owner import check_claim
from megalith.checkpoint.source import refuse_model_folder
from megalith.checkpoint.staging import Staging
from megalith.errors import CheckpointError

_SEEN_WITHIN_SECONDS = 10.0  # network file systems cache for some seconds what is not there


@dataclass(frozen=True)
class _Part:
    """What one rank is about to write."""

    plan: Any
    nbytes: int


@dataclass(frozen=True)
class Saved:
    """What a save wrote.

    Attributes:
        nbytes: of all the files but the manifest.
        write_seconds: how long the slowest rank wrote.
    """

    nbytes: int
    write_seconds: float


class Saving:
    """A save under way.

    Args:
        crew: the ranks that save.
        final: where the folder is to appear.
        content: what this rank writes; the common state counts on the first rank only.
        files: further files of the first rank, name -> bytes.
        facts: what the manifest says beside sizes and hashes.
        on_point: called with the points of the save on this rank.
        publish: points the tracker to the folder; called on the first rank when it is in its place.
        staging: for copies of the tensors, where these may change before they are written.
        writer: makes the writer of the format.
        claimed: whether this run has claimed the folder that it saves into (`commit.claimed`).
    """

    def __init__(
        self,
        crew: Crew,
        final: Path,
        content: CheckpointContent,
        files: Mapping[str, bytes],
        facts: Mapping[str, Any],
        on_point: Callable[[str], None],
        publish: Callable[[], None],
        staging: Staging | None = None,
        writer: MakeWriter = TorchDistWriter,
        *,
        claimed: bool = False,
    ) -> None:
        self._crew, self._final, self._facts = crew, final, facts
        self._content, self._files = content, files
        self._on_point, self._publish, self._staging = on_point, publish, staging
        self._make_writer, self._claimed = writer, claimed
        self._writer: FolderWriter
        self._new: Building | None = None
        self._name = ""
        self._needed = 0

    def run(self) -> Saved:
        """Save.

        Raises:
            CheckpointError: it could not be done, on whichever rank; what was there before is untouched.
        """
        self.begin()
        written = self.gathered(self.write)
        if (shared := self._writer.shared) is not None:
            written = self.gathered(lambda: self._seal(shared))
        return self.agreed(lambda: self.commit(written), written)

    def begin(self) -> None:
        """Plan what each rank writes, and make the folder; all ranks call it together.

        Raises:
            CheckpointError: as `run`.
        """
        parts = self._crew.all(self._prepare)
        self._needed = sum(part.nbytes for part in parts)
        with self._abandoned_on_failure():
            self._name = self._crew.first(lambda: self._begin([part.plan for part in parts]))
            if (shared := self._writer.shared) is not None:
                self._crew.all(lambda: self._lay_out(shared))
        if self._staging is not None:
            self._staging.begin()

    def gathered(self, write: Callable[[], Written]) -> list[Written]:
        """What all ranks have written; all call it together.

        Args:
            write: what gives this rank's part: `write`, or what that has given before.

        Raises:
            CheckpointError: as `run`; nothing is left of the folder.
        """
        with self._abandoned_on_failure():
            return self._crew.all(write)

    def agreed(self, commit: Callable[[], int], written: Sequence[Written]) -> Saved:
        """See that the folder is in its place; all ranks call it together.

        Args:
            commit: what commits on this rank: `commit`, or what that has given before.
            written: by all ranks.

        Raises:
            CheckpointError: as `run`; nothing is left of the folder.
        """
        with self._abandoned_on_failure():
            sizes = self._crew.all(commit)
        self._on_point("post_commit")
        return Saved(sizes[0], max(part.seconds for part in written))

    def settle(self) -> None:
        """Wait until the tensors may change."""
        if self._staging is not None:
            self._staging.settle()

    def cancel(self) -> None:
        """Have `write`, in whatever thread it is, end soon."""
        self._writer.cancel()

    def abandon(self) -> None:
        """Remove what was written, if it was not committed."""
        if self._new is not None:
            self._new.abandon()

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _prepare(self) -> _Part:
        if self._staging is not None:
            self._content = replace(self._content, chunks=self._staging.plan(self._content.chunks))
        self._writer = self._make_writer(self._content, self._files, self._crew.rank)
        self._on_point("pre_save")
        return _Part(self._writer.plan, self._writer.nbytes)

    def _begin(self, plans: Sequence[Any]) -> str:
        """Make the folder; its name, since other hosts may have the save folder elsewhere."""
        self._writer.merge(plans)
        parent = self._final.parent
        with naming_full_disk(parent, self._needed, claimed=self._claimed):
            refuse_model_folder(parent)
            self._check_claim()
            if not self._claimed:
                parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(parent)
            check_space(parent, self._needed)
            self._new = begin_building(self._final, claimed=self._claimed)
        return str(self._new.path.relative_to(parent))

    def _check_claim(self) -> None:
        """Check that the folder is still this run's; whoever took it over makes the renames fail that are under way.

        Raises:
            CheckpointError: it is not.
        """
        if self._claimed:
            check_claim(self._final.parent, workspace_of(self._final.parent))

    def _lay_out(self, shared: SharedFiles) -> None:
        with self._in_folder() as path:
            shared.lay_out(path)

    def write(self) -> Written:
        """Write the files of this rank, or its part of them, durably; needs no other rank.

        Raises:
            CheckpointError: the disk refused.
        """
        self.settle()
        with self._in_folder() as path:
            written = self._writer.write(path)
            self._on_point("mid_save")
            if self._writer.shared is None:
                self._written()
        return written

    def _seal(self, shared: SharedFiles) -> Written:
        """Complete the files of this rank, in which others have written."""
        with self._in_folder() as path:
            sealed = shared.seal(path)
            self._written()
        return sealed

    def _written(self) -> None:
        """This rank is done with its files."""
        if not self._crew.is_first:
            self._on_point("pre_commit")

    @contextmanager
    def _in_folder(self) -> Iterator[Path]:
        """The folder, when it is seen here.

        Raises:
            CheckpointError: the disk refused.
        """
        path = self._final.parent / self._name
        with naming_full_disk(self._final.parent, self._needed, claimed=self._claimed and self._crew.is_first):
            _wait_for(path)
            yield path

    def commit(self, written: Sequence[Written]) -> int:
        """Put the folder in its place; the first rank does that, and needs no other.

        Returns:
            The bytes of all the files but the manifest; on other ranks 0.

        Raises:
            CheckpointError: the disk refused.
        """
        if not self._crew.is_first:
            self._on_point("mid_commit")
            return 0
        assert self._new is not None
        path = self._new.path
        with naming_full_disk(self._final.parent, self._needed, claimed=self._claimed):
            for part in written[1:]:
                for name, record in part.records.items():
                    _wait_for(path / name, record.size)
            size = self._writer.finish(path, self._final.name, written, self._facts)
            self._on_point("pre_commit")
            self._check_claim()
            self._new.commit()
            self._on_point("mid_commit")
            self._check_claim()
            self._publish()
        return size


def _wait_for(path: Path, size: int = 0) -> None:
    """Wait until what another rank made, on another host perhaps, is seen here.

    Args:
        path: a folder or file.
        size: the bytes that it must have at least.

    Raises:
        CheckpointError: it does not appear.
    """
    deadline = time.monotonic() + _SEEN_WITHIN_SECONDS
    while not (path.exists() and path.stat().st_size >= size):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} was made by another rank and is not seen here: with several hosts, --save must name a folder "
                "of a file system that all of them share"
            )
        time.sleep(0.05)
