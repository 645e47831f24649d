"""One save by all the ranks of a run into one folder: prepare, begin, write, commit.

    every rank          encodes its content and plans its files                        pre_save
    rank 0              clears leftovers, checks the space, makes the folder under a temporary name
    every rank          writes and hashes its files in it                              mid_save (pre_commit)
                        (where files are shared: lays them out; writes; completes and hashes them)
    rank 0              .metadata, common.pt, ..., manifest.json; rename; tracker      pre_commit, mid_commit
    every rank                                                                         post_commit

After each row all ranks synchronize; if any rank failed, all raise and rank 0 removes the folder (`rank_group`). A rank
that is killed has the same effect, as the next synchronization fails; if it dies after writing its files, rank 0 still
commits.

`run` does all of it at once. An asynchronous save (`PendingSave`) calls the collective methods (`begin`, `run_write`,
`finish_commit`) between two steps, and `write` and `commit`, which are not collective, in threads, so checkpoint
threads never issue collectives concurrently with training. Its ranks commit at the end of a later step:

    every rank       begins to copy its tensors; the folder is made                                between two steps
    every rank       copies, writes and hashes its files                                           in threads
    every rank       waits for its copies (`wait_for_copies`)                              before the tensors change
    every rank       sends what it wrote to the others                                             between two steps
    rank 0           .metadata, common.pt, ..., manifest.json; rename; tracker                     in a thread
    every rank       learns that the save is complete                                              between two steps

The caller agrees that all ranks are done with a stage (`train.consensus`); then all call `advance`. At most one save is
in progress.
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
    TempFolder,
    check_space,
    clear_leftovers,
    make_temp_folder,
    reporting_disk_full,
    wait_until_seen,
    workspace_of,
)
from megalith.checkpoint.files.dcp import RankWriteResult
from megalith.checkpoint.files.folder import TorchDistWriter
from megalith.checkpoint.files.hashing import WritingCancelled
from megalith.checkpoint.rank_group import RankGroup
from megalith.checkpoint.sources.source import check_save_folder
from megalith.checkpoint.store.owner import check_claim
from megalith.checkpoint.store.staging import Staging
from megalith.checkpoint.writers.per_rank import PerRankWriter
from megalith.distributed.board import run_in_thread
from megalith.errors import CheckpointError
from megalith.progress import task

MakeWriter = Callable[[CheckpointContent, Mapping[str, bytes], int], TorchDistWriter | PerRankWriter]
"""Makes a writer of the content, the extra files and the rank."""


@dataclass(frozen=True)
class SaveReport:
    """Size and durations of a completed save."""

    seconds: float  # from start to commit
    bytes: int  # of all files of all ranks
    path: Path  # the checkpoint folder
    stall_seconds: float  # how long training stood still; 0 of an asynchronous save, whose caller measures it
    write_seconds: float  # of the slowest rank
    waited_seconds: float = 0.0  # the part of the stall in which `advance` waited for the threads; 0 if synchronous


@dataclass(eq=False)
class CheckpointSave:
    """One save by all ranks. `run`, `begin`, `run_write` and `finish_commit` are collective."""

    ranks: RankGroup  # the ranks that save
    final: Path  # path of the committed folder
    content: CheckpointContent  # chunks that this rank writes; the common state is used on rank 0 only
    extra_files: Mapping[str, bytes]  # files that rank 0 adds, name -> bytes
    manifest_fields: Mapping[str, Any]  # entries of the manifest besides sizes and hashes
    on_stage: Callable[[str], None]  # called with the name of each stage on this rank; tests inject faults here
    update_tracker: Callable[[], None]  # called on rank 0 after the commit; also deletes superseded checkpoints
    staging: Staging | None  # host memory for copies of the tensors (asynchronous saves)
    make_writer: MakeWriter  # makes the writer of the format
    claimed: bool = False  # whether this run holds the lock on the save folder (`store.owner`)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        self._writer: TorchDistWriter | PerRankWriter
        self._temp_folder: TempFolder | None = None
        self._temp_folder_name = ""
        self._total_bytes = 0

    def run(self) -> SaveReport:
        """Save synchronously. After a CheckpointError, on any rank, earlier checkpoints are untouched."""
        self.begin()
        with task("saving the checkpoint", self._writer.nbytes, "B", counts="bytes written"):
            results = self.run_write(self.write)
            if isinstance(writer := self._writer, PerRankWriter):
                results = self.run_write(lambda: self._write_checksums(writer))
            report = self.finish_commit(lambda: self.commit(results), results)
        return replace(report, stall_seconds=report.seconds)

    def begin(self) -> None:
        """Plan what each rank writes, and make the folder. Collective."""
        parts = self.ranks.run_on_all(self._prepare)
        self._total_bytes = sum(nbytes for _, nbytes in parts)
        with self._abandoned_on_failure():
            self._temp_folder_name = self.ranks.run_on_first(lambda: self._begin([plan for plan, _ in parts]))
            if isinstance(writer := self._writer, PerRankWriter):
                self.ranks.run_on_all(lambda: self._preallocate(writer))
        if self.staging is not None:
            self.staging.begin()

    def run_write(self, write: Callable[[], RankWriteResult]) -> list[RankWriteResult]:
        """Call `write` on every rank and return the results by rank. Collective."""
        with self._abandoned_on_failure():
            return self.ranks.run_on_all(write)

    def finish_commit(self, commit: Callable[[], int], results: Sequence[RankWriteResult]) -> SaveReport:
        """Call `commit` on every rank and report the save. Collective."""
        with self._abandoned_on_failure():
            sizes = self.ranks.run_on_all(commit)
        self.on_stage("post_commit")
        seconds = time.perf_counter() - self._started
        return SaveReport(seconds, sizes[0], self.final, 0.0, max(part.seconds for part in results))

    def wait_for_copies(self) -> None:
        """Wait until the tensors are copied and may change."""
        if self.staging is not None:
            self.staging.wait_for_copies()

    def cancel(self) -> None:
        """Make a `write` that runs in another thread end soon."""
        self._writer.cancel()

    def abandon(self) -> None:
        """Remove the folder unless it was committed."""
        if self._temp_folder is not None:
            self._temp_folder.abandon()

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
        self._writer = self.make_writer(self.content, self.extra_files, self.ranks.axis.index)
        self.on_stage("pre_save")
        return self._writer.plan, self._writer.nbytes

    def _begin(self, plans: Sequence[Any]) -> str:
        """Make the folder and return its name, since the save folder may have another path on other hosts."""
        self._writer.merge(plans)
        parent = self.final.parent
        with reporting_disk_full(parent, self._total_bytes, claimed=self.claimed):
            check_save_folder(parent)
            self._check_claim()
            if not self.claimed:
                parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(parent)
            check_space(parent, self._total_bytes)
            self._temp_folder = make_temp_folder(self.final, claimed=self.claimed)
        return str(self._temp_folder.path.relative_to(parent))

    def _check_claim(self) -> None:
        """Check that this run still holds the save folder; a run that took it over makes our pending renames fail."""
        if self.claimed:
            check_claim(self.final.parent, workspace_of(self.final.parent))

    def _preallocate(self, writer: PerRankWriter) -> None:
        with self._in_folder() as path:
            writer.preallocate(path)

    def write(self) -> RankWriteResult:
        """Write the files of this rank, or its part of them, durably. Not collective."""
        self.wait_for_copies()
        with self._in_folder() as path:
            result = self._writer.write(path)
            self.on_stage("mid_save")
            if not isinstance(self._writer, PerRankWriter):
                self._signal_pre_commit()
        return result

    def _write_checksums(self, writer: PerRankWriter) -> RankWriteResult:
        """Complete the files of this rank, in which others have written."""
        with self._in_folder() as path:
            sealed = writer.write_checksums(path)
            self._signal_pre_commit()
        return sealed

    def _signal_pre_commit(self) -> None:
        if not self.ranks.axis.is_first:
            self.on_stage("pre_commit")

    @contextmanager
    def _in_folder(self) -> Iterator[Path]:
        """Yield the folder when this rank sees it."""
        path = self.final.parent / self._temp_folder_name
        with reporting_disk_full(
            self.final.parent, self._total_bytes, claimed=self.claimed and self.ranks.axis.is_first
        ):
            wait_until_seen(path)
            yield path

    def commit(self, results: Sequence[RankWriteResult]) -> int:
        """Finish and rename the folder on rank 0, and return its bytes; 0 on other ranks. Not collective."""
        if not self.ranks.axis.is_first:
            self.on_stage("mid_commit")
            return 0
        assert self._temp_folder is not None
        path = self._temp_folder.path
        with reporting_disk_full(self.final.parent, self._total_bytes, claimed=self.claimed):
            for part in results[1:]:
                for name, record in part.records.items():
                    wait_until_seen(path / name, record.size)
            size = self._writer.finish(path, self.final.name, results, self.manifest_fields)
            self.on_stage("pre_commit")
            self._check_claim()
            self._temp_folder.commit()
            self.on_stage("mid_commit")
            self._check_claim()
            self.update_tracker()
        return size


_SECONDS_TO_STOP = 10.0
# Save threads keep normal priority: a descheduled low-priority thread would hold the GIL.
_THREAD_NAME = "checkpoint-save"


class PendingSave:
    """An asynchronous save: threads run the `write` (on each rank) and then the `commit` (on rank 0) of a save.

    The copies of its tensors stay valid until `advance` has returned for the first time.
    """

    def __init__(self, save: CheckpointSave) -> None:
        self._save = save
        self._writing = run_in_thread(save.write, _THREAD_NAME)
        self._results: list[RankWriteResult] = []
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

    def wait_for_copies(self) -> None:
        """Wait until the tensors are copied and may change."""
        self._save.wait_for_copies()

    def advance(self, *, failed: bool = False) -> SaveReport | None:
        """Enter the next stage, waiting for the threads that are busy. Collective.

        Returns the report after the last stage, None before. With `failed` another rank has failed, and writing ends.
        After a CheckpointError, on any rank, earlier checkpoints are untouched.
        """
        if failed:
            self._save.cancel()
        if self._committing is None:
            self._results = self._save.run_write(lambda: self._waited_for(self._writing, cancelled=failed))
            self._committing = run_in_thread(lambda: self._save.commit(self._results), _THREAD_NAME)
            return None
        committing = self._committing
        report = self._save.finish_commit(lambda: self._waited_for(committing), self._results)
        return replace(report, waited_seconds=self._waited)

    def _waited_for(self, work: Future[Any], *, cancelled: bool = False) -> Any:
        """Return the result of a thread, empty if it was cancelled: the rank that failed reports the error."""
        began = time.perf_counter()
        error = work.exception()
        self._waited += time.perf_counter() - began
        if cancelled and isinstance(error, WritingCancelled):
            return RankWriteResult([], {})
        if error is not None and not isinstance(error, Exception):
            raise CheckpointError(f"the thread that wrote the checkpoint ended: {error!r}") from error
        return work.result()

    def abandon(self) -> None:
        """Stop writing and remove what this rank can, unless the save was committed."""
        self._save.cancel()
        wait([self._work], _SECONDS_TO_STOP)
        self._save.abandon()
