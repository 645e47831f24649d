"""Save folders: saving, verifying, loading and deleting checkpoints by iteration.

A save is visible only when it is complete and durable; a load fills the given tensors in place and checks every file
against the manifest, files with tensors while it reads them. Neither ever changes an existing checkpoint. A damaged
checkpoint is reported and skipped in favour of the newest one that passes verification.

`Retention` decides which checkpoints stay, `locate` which folder a path on a command line means, `saving` how a save
proceeds.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import megalith
from megalith.checkpoint.content import CheckpointContent, LoadedContent
from megalith.checkpoint.files import manifest as manifests
from megalith.checkpoint.files.commit import (
    claimed,
    delete,
    ignore_stage,
    put_back_replaced,
    replace_durably,
    set_aside,
    wait_until_seen,
    workspace_of,
)
from megalith.checkpoint.files.hashing import Prefetch, require_file
from megalith.checkpoint.files.manifest import MANIFEST_FILE
from megalith.checkpoint.rank_group import RankGroup
from megalith.checkpoint.sources.source import TRACKER_FILE as TRACKER_FILE
from megalith.checkpoint.sources.source import Contents, damaged, is_huggingface, keys_of, no_save_folder
from megalith.checkpoint.store.owner import check_claim
from megalith.checkpoint.store.staging import Staging
from megalith.config.rules.file import ITERATION
from megalith.config.values import remote
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError, ConfigError, NewerFormatError
from megalith.layout import Layout
from megalith.progress import task

if TYPE_CHECKING:  # DCP takes long to import: it is imported when a checkpoint is written or read
    from megalith.checkpoint.files.folder import CheckpointFolder, PlannedLoad, Signature
    from megalith.checkpoint.store.saving import CheckpointSave, MakeWriter, PendingSave, SaveReport


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints that are kept beside the newest; all of them, by default.

    Attributes:
        keep_last: number of the newest complete checkpoints to keep, the newest included.
        retain_interval: iterations that are multiples of it are never deleted. Without `keep_last` every other
            checkpoint is deleted when the next one is saved, as Megatron's `--save-retain-interval` does.
        best: iteration that is never deleted.
    """

    keep_last: int | None = None
    retain_interval: int | None = None
    best: int | None = None

    def superseded(
        self, saved: int, before: int | None, existing: Sequence[int], is_complete: Callable[[int], bool]
    ) -> list[int]:
        """Return the iterations to delete; none after `saved`, and none if that is not complete.

        `before` is the iteration in the tracker file before the save. An incomplete checkpoint is not counted, and is
        deleted once `keep_last` newer complete ones exist.
        """
        if self.keep_last is None and self.retain_interval is None:
            return []
        older = sorted((iteration for iteration in existing if iteration < saved), reverse=True)
        if not older or not is_complete(saved):
            return []
        if self.keep_last is None:
            return [iteration for iteration in older if iteration == before and not self._is_retained(iteration)]
        kept, superseded = 1, []
        for iteration in older:
            if kept < self.keep_last:
                kept += is_complete(iteration)
            elif not self._is_retained(iteration):
                superseded.append(iteration)
        return superseded

    def _is_retained(self, iteration: int) -> bool:
        return iteration == self.best or (self.retain_interval is not None and iteration % self.retain_interval == 0)


KEEP_ALL = Retention()
_SHARED = "with several hosts, it must be on a file system that all of them share"


RELEASE = "release"
"""Text of Megatron's tracker file for a checkpoint without an iteration, and the name of its folder."""
SAVE_STAGES = ("pre_save", "mid_save", "pre_commit", "mid_commit", "post_commit")
"""Stages at which a save calls `on_stage`, on every rank: before the first byte; after the tensors were written; before
the rename; between the rename and the update of the tracker (only rank 0 does these); at the end."""

Result = TypeVar("Result")
NO_FILES: Mapping[str, bytes] = MappingProxyType({})

_log = logging.getLogger("megalith.checkpoint")


class DirectoryStore:
    """A save folder in Megatron's layout: `iter_%07d/`, of any format that can be read, and the tracker file.

    A checkpoint without an iteration has iteration 0 here, and only weights: Megatron's `release/` if the tracker names
    it, and a Hugging Face model folder, which is itself the checkpoint.

    Every rank calls the same methods in the same order and with the same iterations, each with its own content; an
    error on one rank is raised on all (`rank_group`). The first rank lists the folder for all. The chunks to save are
    each in the content of one rank only.

    Args:
        path: the save folder; it is made by the first save.
        ctx: the ranks that share it; this process alone by default.
        save_format: torch_dist or torch.
        claimed: this run has claimed the folder (`claim`): nothing is saved or deleted after another run took it over,
            or after the folder was renamed or removed.
    """

    def __init__(
        self,
        path: Path | str,
        ctx: ParallelContext | None = None,
        retention: Retention = KEEP_ALL,
        *,
        save_format: str = "torch_dist",
        claimed: bool = False,
    ) -> None:
        if problem := remote(str(path)):
            raise CheckpointError(f"{path}: {problem}")
        ctx = ctx or ParallelContext.solo()
        self.path, self._retention, self._claimed = Path(path), retention, claimed
        self._layout, self._ranks = ctx.layout, RankGroup(ctx.world)
        self._save_format = save_format
        self._sound: dict[int, Signature] = {}
        self._begun: dict[int, Signature] = {}  # verified except for the files that a load hashes
        self._fetching: Prefetch | None = None
        # The folder whose metadata was read last.
        self._opened: tuple[tuple[Path, Signature], CheckpointFolder] | None = None

    def folder(self, iteration: int) -> Path:
        """Return the path that the checkpoint of an iteration has or would have."""
        released = self._released() if iteration == 0 else None
        return released or self.path / f"iter_{iteration:07d}"

    def _released(self) -> Path | None:
        """Return the folder of weights without an iteration; None if there is none."""
        if is_huggingface(self.path):
            return self.path
        path = self.path / RELEASE
        return path if self._tracker_text() == RELEASE and path.is_dir() else None

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Claim the save folder for this run within the block, so that no second run saves into it.

        Every rank must see what the first one makes there, which a save would otherwise be the first to need.
        """
        self._ranks.run_on_first(self._refuse_newer)
        with ExitStack() as stack:
            self._ranks.run_on_first(lambda: stack.enter_context(claimed(self.path)))
            workspace = self._ranks.run_on_first(lambda: workspace_of(self.path).name)
            self._ranks.run_on_all(lambda: wait_until_seen(self.path / workspace))
            yield

    def _refuse_newer(self) -> None:
        """Refuse to save beside checkpoints of a later version, which this one could only replace, prune or ignore."""
        for iteration in self._iterations():
            try:
                manifests.refuse_newer(self.folder(iteration))
            except NewerFormatError as error:
                raise NewerFormatError(f"--save {self.path}: {error}") from error

    def save(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] = NO_FILES,
        best: int | None = None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> SaveReport:
        """Write a checkpoint and point the tracker to it, durably. An error leaves existing checkpoints unchanged.

        Args:
            iteration: its number; a checkpoint that has it already is replaced.
            manifest: JSON-serialisable facts about the run: configuration, tokenizer and data fingerprints.
            files: contents of additional files, by name.
            best: iteration that the retention never deletes.
            on_stage: called with each of `SAVE_STAGES`.
        """
        return self._saving(iteration, content, manifest, files, on_stage, best).run()

    def schedule(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        *,
        staging: Staging,
        files: Mapping[str, bytes] = NO_FILES,
        best: int | None = None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> PendingSave:
        """Begin an asynchronous `save`; tensors may change once `PendingSave.wait_for_copies` has returned.

        They are copied to the memory of `staging`. A thread calls `on_stage` with `mid_save` and, on other ranks than
        0, `pre_commit`. No other save may use `staging` until this one is committed or abandoned.
        """
        assert self._save_format == "torch_dist", "only torch_dist is written beside the training"
        from megalith.checkpoint.store.saving import PendingSave

        saving = self._saving(iteration, content, manifest, files, on_stage, best, staging)
        saving.begin()
        return PendingSave(saving)

    def _saving(
        self,
        iteration: int,
        content: CheckpointContent,
        manifest: Mapping[str, Any],
        files: Mapping[str, bytes],
        on_stage: Callable[[str], None],
        best: int | None,
        staging: Staging | None = None,
    ) -> CheckpointSave:
        from megalith.checkpoint.store.saving import CheckpointSave

        manifest_fields = {"iteration": iteration, **manifest_fields_of(self._layout), **manifest}
        retention = replace(self._retention, best=best)

        def update_tracker() -> None:
            before = self._latest()
            replace_durably(self.path / TRACKER_FILE, str(iteration).encode("ascii"), claimed=self._claimed)
            existing = self._iterations()
            # Only now: until the tracker names the new checkpoint, an older one is what a crash resumes from.
            superseded = retention.superseded(iteration, before, existing, self._is_complete)
            self._delete(superseded, in_background=staging is not None)

        self._sound.pop(iteration, None)
        what = (self.folder(iteration), content, files, manifest_fields, on_stage, update_tracker)
        return CheckpointSave(self._ranks, *what, staging, self._make_writer(), claimed=self._claimed)

    def _make_writer(self) -> MakeWriter:
        if self._save_format == "torch":
            from megalith.checkpoint.writers.per_rank import PerRankWriter

            return partial(PerRankWriter, layout=self._layout)
        from megalith.checkpoint.files.folder import TorchDistWriter

        return TorchDistWriter

    def _is_complete(self, iteration: int) -> bool:
        """Return whether every file of a checkpoint exists with its size; hashing them all would take too long."""
        try:
            folder = self._existing(iteration)
            body = folder.manifest()
            return not (folder.source.problems() if body is None else manifests.missing(folder.path, body))
        except (CheckpointError, OSError):
            return False

    def delete_after(self, iteration: int) -> None:
        """Delete the checkpoints of later iterations, which a run that resumed from an earlier one has left."""
        self._ranks.run_on_first(lambda: self._delete([other for other in self._iterations() if other > iteration]))

    def _delete(self, iterations: Sequence[int], *, in_background: bool = False) -> None:
        """Delete checkpoints except links, in a thread if `in_background`; log failures unless the claim was lost."""
        asides = []
        for iteration in iterations:
            folder = self.folder(iteration)
            if not folder.is_symlink():  # it points to a checkpoint of another folder, which is not this run's
                try:
                    manifests.refuse_newer(folder)
                    asides.append(set_aside(folder, claimed=self._claimed))
                except NewerFormatError as error:
                    _log.warning("%s", error)
                except OSError as error:
                    if self._claimed:
                        check_claim(self.path, workspace_of(self.path))
                    _log.warning("%s cannot be deleted: %s", folder, error.strerror or error)
        if in_background and asides:  # training does not wait until large files are removed
            threading.Thread(target=delete, args=(asides,), name="checkpoint-removal").start()
        else:
            delete(asides)

    def load(self, iteration: int, content: CheckpointContent, *, verify: bool = True) -> LoadedContent:
        """Fill the tensors of `content` in place; read its objects and the common state.

        With `verify` every file is compared with the manifest's hashes, unless it was verified before and has not
        changed; files with tensors are hashed while they are read.

        Raises:
            DamagedCheckpointError: a file has changed since the save; the tensors may be partly filled.
            CheckpointError: the checkpoint does not fit `content`; no tensor was changed.
        """
        if verify and (problems := self.verify(iteration, deferred=True)):
            raise damaged(self.folder(iteration), problems)
        requested = frozenset[str]().union(*self._ranks.run_on_all(lambda: keys_of(content)))
        planned: list[PlannedLoad] = []
        self._ranks.run_on_all(lambda: planned.append(self._existing(iteration).open(content, requested)))
        signature = self._ranks.run_on_first(lambda: self._existing(iteration).signature())
        if not verify or self._sound.get(iteration) == signature:
            return self._loaded(content, lambda: planned[0].load({}))
        rank, size = self._ranks.axis.index, self._ranks.axis.size
        self._stop_fetching()  # the load reads the same files now
        try:
            loaded = self._loaded(content, lambda: planned[0].load(self._existing(iteration).read_through(rank, size)))
        except Exception as error:
            problems = self.verify(iteration)  # every file, not only the first that was found
            if problems:
                raise damaged(self.folder(iteration), problems) from error
            raise
        self._sound[iteration] = signature
        return loaded

    def _loaded(self, content: CheckpointContent, load: Callable[[], LoadedContent]) -> LoadedContent:
        """Return the result of `load` on this rank if it succeeds on all; nothing is sent, as it may be large."""
        loaded: list[LoadedContent] = []
        with task("loading the checkpoint", content.nbytes, "B", counts="bytes read"):
            self._ranks.run_on_all(lambda: loaded.append(load()))
        self._opened = None  # not needed after a load
        return loaded[0]

    def on_first(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns on the first rank; all ranks call this."""
        return self._ranks.run_on_first(compute)

    def contents(self, iteration: int) -> Contents:
        """Return the table of contents of a checkpoint; no tensor is read."""
        return self._ranks.run_on_first(lambda: self._existing(iteration).source.contents())

    def common(self, iteration: int) -> dict[str, Any]:
        """Read the common state alone."""
        return self._ranks.run_on_first(lambda: self._existing(iteration).source.common())

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        """Read the manifest; None for a checkpoint of another program."""
        return self._ranks.run_on_first(lambda: self._existing(iteration).manifest())

    def iterations(self) -> list[int]:
        """Return the iterations of all checkpoints, ascending, damaged ones included."""
        return self._ranks.run_on_first(self._iterations)

    def latest(self) -> int | None:
        """Return the iteration in the tracker file; None if there is no file or no number in it."""
        return self._ranks.run_on_first(self._latest)

    def format(self, iteration: int) -> str:
        """Return the format of a checkpoint: torch_dist, torch or huggingface."""
        return self._ranks.run_on_first(lambda: self._existing(iteration).source.format)

    def weights_only(self, iteration: int) -> bool:
        """Return whether a checkpoint holds only weights to start from, without the state of a run."""
        return self._ranks.run_on_first(lambda: iteration == 0 and self._released() is not None)

    def verify(self, iteration: int, *, deferred: bool = False) -> list[str]:
        """List all problems of a checkpoint; empty if it passes. `deferred` as of `newest_verified`."""
        signature = self._ranks.run_on_first(lambda: self._existing(iteration).signature())
        if signature in (self._sound.get(iteration), self._begun.get(iteration) if deferred else None):
            return []  # verified before, and no file has changed since
        rank, size = self._ranks.axis.index, self._ranks.axis.size
        found = self._ranks.run_on_all(lambda: self._existing(iteration).problems(rank, size, deferred=deferred))
        problems = list(dict.fromkeys(problem for part in found for problem in part))
        if not problems:
            self._begun[iteration] = signature
            if not (deferred and self._ranks.run_on_first(lambda: self._existing(iteration).read_through())):
                self._sound[iteration] = signature
            else:
                self._fetch(iteration)
        return problems

    def _fetch(self, iteration: int) -> None:
        """Prefetch the files that the load will read."""
        self._stop_fetching()
        folder = self._existing(iteration)
        self._fetching = Prefetch(
            [folder.path / name for name in folder.read_through(self._ranks.axis.index, self._ranks.axis.size)]
        )

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.stop()
            self._fetching = None

    def newest_verified(self, *, deferred: bool = False) -> tuple[int | None, list[str]]:
        """Return the newest checkpoint that passes verification, or None, and warnings about those passed over.

        The tracker's is preferred, then the newest before it, then the others. With `deferred` files that a load reads
        are left for `load` to verify.

        Raises:
            NewerFormatError: a checkpoint of a later version would be skipped.
            CheckpointError: rank 0 sees no checkpoint and another rank does.
        """
        candidates, notes = self._ranks.run_on_first(self._candidates)
        if not candidates and any(self._ranks.run_on_all(self._iterations)):
            raise CheckpointError(f"{self.path} holds checkpoints on other ranks and none on rank 0; {_SHARED}")
        for iteration in candidates:
            problems = self.verify(iteration, deferred=deferred)
            if not problems:
                if self.manifest(iteration) is None and not self._ranks.run_on_first(lambda: is_huggingface(self.path)):
                    notes.append(f"{self.folder(iteration)} has no {MANIFEST_FILE}: taken without hashes")
                return iteration, notes
            notes += problems
        return None, notes

    def _candidates(self) -> tuple[list[int], list[str]]:
        """Return the iterations in the order of trial, and warnings about the tracker file."""
        put_back_replaced(self.path)
        existing, tracked = self._iterations(), self._latest()
        last = existing[-1] if tracked is None and existing else tracked or 0
        # Up to the tracker's from the newest, then those after it.
        ordered = sorted(existing, key=lambda iteration: (iteration > last, abs(iteration - last)))
        return ordered, self._tracker_notes(tracked, existing)

    def _iterations(self) -> list[int]:
        if not self.path.is_dir():
            return []
        named = ((path, ITERATION.fullmatch(path.name)) for path in self.path.iterdir())
        found = {int(match[1]) for path, match in named if match and path.is_dir()}
        return sorted(found | {0} if self._released() is not None else found)

    def _latest(self) -> int | None:
        if self._released() is not None:
            return 0
        text = self._tracker_text()
        return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None  # fits 64 bits

    def _tracker_text(self) -> str | None:
        try:
            require_file(self.path / TRACKER_FILE)
            return (self.path / TRACKER_FILE).read_text("ascii", "replace").strip()
        except OSError:
            return None

    def tracker_notes(self) -> list[str]:
        """Return warnings about a tracker file that disagrees with the existing checkpoints."""
        return self._ranks.run_on_first(lambda: self._tracker_notes(self._latest(), self._iterations()))

    def _tracker_notes(self, tracked: int | None, existing: Sequence[int]) -> list[str]:
        path, text = self.path / TRACKER_FILE, self._tracker_text()
        if self._released() is not None:
            return []
        if not existing and (what := no_save_folder(self.path)) is not None:
            return [f"{self.path} {what}"]
        if text is None:
            return [f"{path} is missing"] if existing else []
        if tracked is None:
            return [f"{path} holds {text[:40]!r} instead of an iteration"]
        if tracked not in existing:
            return [f"{path} points to iteration {tracked}, and {self.folder(tracked)} does not exist"]
        later = [self.folder(iteration).name for iteration in existing if iteration > tracked]
        verb = "is" if len(later) == 1 else "are"
        return [f"{path} says {tracked}; the later {', '.join(later)} {verb} left aside"] if later else []

    def _existing(self, iteration: int) -> CheckpointFolder:
        from megalith.checkpoint.files.folder import CheckpointFolder

        path = self.folder(iteration)
        if not path.is_dir():
            held = ", ".join(map(str, self._iterations())) or "none"
            remedy = "" if self._ranks.axis.is_first else f"; rank 0 sees it: {_SHARED}"
            raise CheckpointError(f"{path} does not exist; {self.path} holds the iterations: {held}{remedy}")
        folder = CheckpointFolder(path)
        signature = folder.signature()
        if self._opened is not None and self._opened[0] == (path, signature):
            return self._opened[1]
        if folder.source.format == "torch_dist":  # the files of other formats would stay mapped
            self._opened = (path, signature), folder
        return folder


def split_path(path: Path, iteration: int | None = None) -> tuple[Path, int | None]:
    """Return save folder and iteration of a path, which may be one of its `iter_*` folders; else `path` as it is.

    Raises:
        ConfigError: the path is the folder of another iteration than `iteration`.
    """
    resolved = path.resolve()
    match = ITERATION.fullmatch(resolved.name)
    if match is None:
        return path, iteration
    named = int(match[1])
    if iteration not in (None, named):
        raise ConfigError(
            f"{path} is the checkpoint of iteration {named}, and iteration {iteration} is asked for (--iteration, "
            f"--ckpt-step); give its save folder {resolved.parent}, or leave the flag out"
        )
    return resolved.parent, named


def manifest_fields_of(layout: Layout) -> dict[str, Any]:
    """Return the manifest's entries about the ranks that write, the time and the versions."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "megalith_version": megalith.__version__,
        "torch_version": str(torch.__version__),
        "layout": asdict(layout),
        "world_size": layout.world_size,
    }


def locate(path: Path, iteration: int | None = None) -> Path:
    """Return the checkpoint folder that a path on a command line means.

    A path is a save folder, one checkpoint folder in it (`iter_0000100`, `release`), a Hugging Face model folder, or a
    checkpoint folder that was copied under another name. In a save folder it is that of `iteration`, by default the
    tracker's, else the last. ConfigError if the path is a checkpoint folder of another iteration, or of none.
    """
    if not path.is_dir():
        raise CheckpointError(nothing_in(path))
    if is_checkpoint(path):
        if split_path(path, iteration)[0] == path and iteration:
            raise ConfigError(f"--iteration {iteration}: {path} is one checkpoint, no save folder; leave the flag out")
        return path
    store = DirectoryStore(path)
    existing = store.iterations()
    if not existing:
        raise CheckpointError(nothing_in(path))
    if iteration is None:
        latest = store.latest()
        iteration = latest if latest in existing else existing[-1]
    if iteration not in existing:
        held = ", ".join(map(str, existing))
        raise CheckpointError(f"{path} holds no iteration {iteration}; it holds {held}")
    return store.folder(iteration)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is one checkpoint rather than a folder of them."""
    released = path.resolve().name == RELEASE and not (path / TRACKER_FILE).exists()
    named = split_path(path)[1] is not None or released
    return named or is_huggingface(path) or (path / ".metadata").exists() or any(path.glob("mp_rank_*"))


def nothing_in(path: Path) -> str:
    """Describe the contents of a path without a checkpoint."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        return (
            f"{path} holds no checkpoint: it {found}; give a save folder, one iter_* folder in it, or a Hugging Face "
            "folder"
        )
    if (what := no_save_folder(path)) is not None:
        return f"{path} {what}"
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    found = ", ".join(entries[:6]) + (f" and {len(entries) - 6} more" if len(entries) > 6 else "")
    return (
        f"{path} holds no checkpoint: neither iter_0000000 or the like, nor mp_rank_* folders, nor .metadata, nor "
        f"config.json beside safetensors files; it holds {found or 'nothing'}"
    )
