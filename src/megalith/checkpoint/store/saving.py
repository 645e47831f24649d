"""One save by all the ranks of a run into one folder: prepare, begin, write, commit.

    every rank          encodes its content and plans its files                        pre_save
    the first           clears leftovers, checks the space, makes the folder under a temporary name
    every rank          writes and hashes its files in it                              mid_save (pre_commit)
                        (where files are shared: lays them out; writes; completes and hashes them)
    the first           .metadata, common.pt, ..., manifest.json; rename; tracker      pre_commit, mid_commit
    every rank                                                                         post_commit

Between two lines the ranks agree that the line succeeded everywhere (`rank_group`), so that an error of one is an error
of all, and the first rank then removes the folder. A rank that is killed breaks the next agreement, with the same
effect; killed after its files are complete it stops nobody, since the first rank needs it no more.

`run` does all of it at once. An asynchronous save (`PendingSave`) calls the collective methods (`begin`,
`gather_written`, `finish_commit`) between two steps, and `write` and `commit`, which need no other rank, in threads:
these never meet a collective of the training. Its ranks commit at the end of a later step:

    every rank       begins to copy its tensors; the folder is made                                between two steps
    every rank       copies, writes and hashes its files                                           in threads
    every rank       waits for its copies (`settle`)                                       before the tensors change
    all              tell each other what they wrote                                               between two steps
    the first        .metadata, common.pt, ..., manifest.json; rename; tracker                     in a thread
    all              hear that it is done                                                          between two steps

That all are done with a stage is agreed upon by the caller (`train.consensus`), and then all call `proceed`. At most
one save is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalith.checkpoint.content import CheckpointContent
from megalith.checkpoint.files.commit import (
    Building,
    begin_building,
    check_space,
    clear_leftovers,
    naming_full_disk,
    workspace_of,
)
from megalith.checkpoint.files.dcp import Written
from megalith.checkpoint.files.folder import TorchDistWriter
from megalith.checkpoint.files.hashing import WritingCancelled
from megalith.checkpoint.rank_group import RankGroup
from megalith.checkpoint.sources.source import refuse_model_folder
from megalith.checkpoint.store.owner import check_claim
from megalith.checkpoint.store.staging import Staging
from megalith.checkpoint.writers.per_rank import PerRankWriter
from megalith.distributed.board import run_in_thread
from megalith.errors import CheckpointError

MakeWriter = Callable[[CheckpointContent, Mapping[str, bytes], int], TorchDistWriter | PerRankWriter]
"""Makes a writer of the content, the further files and the rank."""
_SEEN_WITHIN_SECONDS = 10.0  # network file systems cache for some seconds what is not there


@dataclass(frozen=True)
class SaveReport:
    """Size and durations of a completed save."""

    seconds: float  # from start to commit
    bytes: int  # of all files of all ranks
    path: Path  # the checkpoint folder
    stall_seconds: float  # how long training stood still; the caller of an asynchronous save measures it
    write_seconds: float  # of the slowest rank
    waited_seconds: float = 0.0  # waiting for the threads of an asynchronous save


@dataclass(eq=False)
class Saving:
    """One save by all ranks: plan, write, commit. Every rank holds one of these and calls its methods together."""

    ranks: RankGroup  # the ranks that save
    final: Path  # path of the committed folder
    content: CheckpointContent  # chunks that this rank writes; the common state is used on the first rank only
    files: Mapping[str, bytes]  # further files of the first rank, name -> bytes
    facts: Mapping[str, Any]  # entries of the manifest besides sizes and hashes
    on_point: Callable[[str], None]  # called with the name of each stage on this rank; tests inject faults here
    publish: Callable[[], None]  # updates the tracker file; called on the first rank after the commit
    staging: Staging | None = None  # host memory for copies of the tensors (asynchronous saves)
    make_writer: MakeWriter = TorchDistWriter  # makes the writer of the format
    claimed: bool = False  # whether this run has claimed the folder that it saves into (`commit.claimed`)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        self._writer: TorchDistWriter | PerRankWriter
        self._new: Building | None = None
        self._name = ""
        self._needed = 0

    def run(self) -> SaveReport:
        """Save synchronously. After a CheckpointError, on any rank, earlier checkpoints are untouched."""
        self.begin()
        written = self.gather_written(self.write)
        if isinstance(writer := self._writer, PerRankWriter):
            written = self.gather_written(lambda: self._write_checksums(writer))
        report = self.finish_commit(lambda: self.commit(written), written)
        return replace(report, stall_seconds=report.seconds)

    def begin(self) -> None:
        """Plan what each rank writes, and make the folder; all ranks call it together."""
        parts = self.ranks.run_on_all(self._prepare)
        self._needed = sum(nbytes for _, nbytes in parts)
        with self._abandoned_on_failure():
            self._name = self.ranks.run_on_first(lambda: self._begin([plan for plan, _ in parts]))
            if isinstance(writer := self._writer, PerRankWriter):
                self.ranks.run_on_all(lambda: self._preallocate(writer))
        if self.staging is not None:
            self.staging.begin()

    def gather_written(self, write: Callable[[], Written]) -> list[Written]:
        """Call `write` on every rank and return what each has written. Collective."""
        with self._abandoned_on_failure():
            return self.ranks.run_on_all(write)

    def finish_commit(self, commit: Callable[[], int], written: Sequence[Written]) -> SaveReport:
        """Call `commit` on every rank and report the save. Collective."""
        with self._abandoned_on_failure():
            sizes = self.ranks.run_on_all(commit)
        self.on_point("post_commit")
        seconds = time.perf_counter() - self._started
        return SaveReport(seconds, sizes[0], self.final, 0.0, max(part.seconds for part in written))

    def settle(self) -> None:
        """Wait until the tensors may change."""
        if self.staging is not None:
            self.staging.settle()

    def cancel(self) -> None:
        """Make a `write` that runs in another thread end soon."""
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

    def _prepare(self) -> tuple[Any, int]:
        """Plan what this rank writes, and count its bytes."""
        if self.staging is not None:
            self.content = replace(self.content, chunks=self.staging.plan(self.content.chunks))
        self._writer = self.make_writer(self.content, self.files, self.ranks.axis.index)
        self.on_point("pre_save")
        return self._writer.plan, self._writer.nbytes

    def _begin(self, plans: Sequence[Any]) -> str:
        """Make the folder and return its name, since the save folder may have another path on other hosts."""
        self._writer.merge(plans)
        parent = self.final.parent
        with naming_full_disk(parent, self._needed, claimed=self.claimed):
            refuse_model_folder(parent)
            self._check_claim()
            if not self.claimed:
                parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(parent)
            check_space(parent, self._needed)
            self._new = begin_building(self.final, claimed=self.claimed)
        return str(self._new.path.relative_to(parent))

    def _check_claim(self) -> None:
        """Check that the folder is still this run's; whoever took it over makes the renames fail that are under way."""
        if self.claimed:
            check_claim(self.final.parent, workspace_of(self.final.parent))

    def _preallocate(self, writer: PerRankWriter) -> None:
        with self._in_folder() as path:
            writer.preallocate(path)

    def write(self) -> Written:
        """Write the files of this rank, or its part of them, durably; needs no other rank."""
        self.settle()
        with self._in_folder() as path:
            written = self._writer.write(path)
            self.on_point("mid_save")
            if not isinstance(self._writer, PerRankWriter):
                self._written()
        return written

    def _write_checksums(self, writer: PerRankWriter) -> Written:
        """Complete the files of this rank, in which others have written."""
        with self._in_folder() as path:
            sealed = writer.write_checksums(path)
            self._written()
        return sealed

    def _written(self) -> None:
        if not self.ranks.axis.is_first:
            self.on_point("pre_commit")

    @contextmanager
    def _in_folder(self) -> Iterator[Path]:
        """Yield the folder when this rank sees it."""
        path = self.final.parent / self._name
        with naming_full_disk(self.final.parent, self._needed, claimed=self.claimed and self.ranks.axis.is_first):
            _wait_for(path)
            yield path

    def commit(self, written: Sequence[Written]) -> int:
        """Put the folder in its place; the first rank does that, and needs no other. Returns its bytes, elsewhere 0."""
        if not self.ranks.axis.is_first:
            self.on_point("mid_commit")
            return 0
        assert self._new is not None
        path = self._new.path
        with naming_full_disk(self.final.parent, self._needed, claimed=self.claimed):
            for part in written[1:]:
                for name, record in part.records.items():
                    _wait_for(path / name, record.size)
            size = self._writer.finish(path, self.final.name, written, self.facts)
            self.on_point("pre_commit")
            self._check_claim()
            self._new.commit()
            self.on_point("mid_commit")
            self._check_claim()
            self.publish()
        return size


def _wait_for(path: Path, size: int = 0) -> None:
    """Wait until a folder or a file of `size` bytes that another rank made, on another host perhaps, is seen here."""
    deadline = time.monotonic() + _SEEN_WITHIN_SECONDS
    while not (path.exists() and path.stat().st_size >= size):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} was made by another rank and is not seen here: with several hosts, --save must name a folder "
                "of a file system that all of them share"
            )
        time.sleep(0.05)


_SECONDS_TO_STOP = 10.0
# Its threads have the priority of the others: a lower one would hold the interpreter for as long as the system gives it
# no processor.
_THREAD = "checkpoint-save"


class PendingSave:
    """A save whose tensors are being copied: threads write (on each rank) and then commit (on the first).

    The copies stay as they are until `proceed` has returned for the first time.
    """

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._writing = run_in_thread(saving.write, _THREAD)
        self._written: list[Written] = []
        self._committing: Future[int] | None = None
        self._waited = 0.0

    @property
    def busy(self) -> bool:
        """True while a thread of this rank writes or commits."""
        return not self._work.done()

    @property
    def failed(self) -> bool:
        """True where this rank could not do its part."""
        return self._work.done() and self._work.exception() is not None

    @property
    def _work(self) -> Future[Any]:
        return self._committing or self._writing

    def settle(self) -> None:
        """Wait until the tensors that are saved may change."""
        self._saving.settle()

    def proceed(self, *, failed: bool = False) -> SaveReport | None:
        """Enter the next stage, waiting for what is still busy; all ranks call it together.

        Returns what the save did after the last stage, None before. With `failed` another rank has failed, and writing
        ends. A CheckpointError, on whichever rank, leaves what was there before untouched.
        """
        if failed:
            self._saving.cancel()
        if self._committing is None:
            self._written = self._saving.gather_written(lambda: self._waited_for(self._writing, cancelled=failed))
            self._committing = run_in_thread(lambda: self._saving.commit(self._written), _THREAD)
            return None
        committing = self._committing
        report = self._saving.finish_commit(lambda: self._waited_for(committing), self._written)
        return replace(report, waited_seconds=self._waited)

    def _waited_for(self, work: Future[Any], *, cancelled: bool = False) -> Any:
        """Return the result of a thread, empty if it was cancelled: the rank that failed reports the error."""
        began = time.perf_counter()
        error = work.exception()
        self._waited += time.perf_counter() - began
        if cancelled and isinstance(error, WritingCancelled):
            return Written([], {})
        if error is not None and not isinstance(error, Exception):
            raise CheckpointError(f"the thread that wrote the checkpoint ended: {error!r}") from error
        return work.result()

    def abandon(self) -> None:
        """Stop writing and remove what was written, as far as this rank can; nothing if it was committed."""
        self._saving.cancel()
        wait([self._work], _SECONDS_TO_STOP)
        self._saving.abandon()
