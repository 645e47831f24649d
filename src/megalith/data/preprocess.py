"""Preprocessing: text files to .bin/.idx pairs, on several processes, with output independent of their number.

The parent process finds the chunks and reserves where their tokens go; workers encode the chunks and write the tokens.
Imports no torch. Files get their final names when all of them are complete; a killed run can be continued.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megalith.data.characters import InputVocabulary
from megalith.data.encoding import ChunkEncoder, EncodeSettings
from megalith.data.indexed import MASK_FILES, TEMPLATE, remove_side_files, smallest_dtype
from megalith.data.output import Journal, OutputFiles, Partitions, RunState, SkippedList, skipped_path
from megalith.data.preprocess_options import (
    PreprocessOptions,
    ProgressListener,
    ProgressSnapshot,
    find_violations,
    option_violations,
    plan_sources,
)
from megalith.data.shares import LocatedChunk, chunks_of_share
from megalith.data.sources import STDIN, Source
from megalith.data.workers import Encoder, InProcessEncoder, PendingChunk, WorkerPool, can_fork
from megalith.distributed.machine import usable_cores
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.fingerprint import write_fingerprint

if TYPE_CHECKING:
    from megalith.tokenizers.chat_template import ChatTemplate

__all__ = ["PreprocessOptions", "PreprocessReport", "find_violations", "preprocess", "worker_count"]

_CHUNKS_PER_WORKER = 16  # with fewer, starting a process costs more than it saves
_JOURNAL_PAUSE = 1  # pause between journal writes, in units of the time of the last write


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a preprocessing run.

    Attributes:
        skipped_list: path of the list of skipped documents, None if there are none.
        num_bytes: bytes of text that this run encoded.
        num_new_tokens: tokens that this run wrote, of all keys.
    """

    prefixes: dict[str, str]
    num_documents: int
    num_skipped: int
    skipped_list: str | None
    num_tokens: dict[str, int]
    num_bytes: int
    num_new_tokens: int
    seconds: float
    workers: int


def preprocess(options: PreprocessOptions, progress: ProgressListener | None = None) -> PreprocessReport:
    """Encode texts and write one dataset for each key.

    Raises:
        ConfigError: options that cannot work, all of them at once.
        DataError: a damaged tokenizer, a bad document (with its place), no document, a full disk.
        MegalithError: a worker process died.
    """
    start = time.perf_counter()
    listener = progress or ProgressListener()
    plan = plan_sources(options)
    violations = option_violations(options) + plan.violations
    if violations:
        raise ConfigError(violations)
    for note in plan.notes:
        listener.note(note)
    with closing(InputVocabulary(options, plan.sources, listener)) as vocabulary:
        return _Run(options, plan.sources, vocabulary, listener, start).run()


def worker_count(options: PreprocessOptions, sources: list[Source]) -> int:
    """Return how many processes are worth starting: bounded by the request, the cores and the amount of text."""
    low, high = options.share.bounds(sum(source.disk_bytes for source in sources))
    work = (high - low) // (options.source.limits.chunk_bytes * _CHUNKS_PER_WORKER)
    return max(1, min(options.workers, usable_cores(), work))


class _Run:
    """State of one preprocessing run, from its sources to the report."""

    def __init__(
        self,
        options: PreprocessOptions,
        sources: list[Source],
        vocabulary: InputVocabulary,
        listener: ProgressListener,
        start: float,
    ) -> None:
        self.options = replace(options, tokenizer=vocabulary.tokenizer)
        self.sources, self.listener, self._vocabulary, self._start = sources, listener, vocabulary, start
        if any(source.path == STDIN for source in sources):
            self.options = replace(self.options, journal_interval=math.inf)  # nothing could be resumed
        self._workers = worker_count(options, sources)
        self._before = [0, *accumulate(source.disk_bytes for source in sources)]
        self._low, self._high = options.share.bounds(self._before[-1])
        self.current_source = next((at for at, end in enumerate(self._before[1:]) if end > self._low), 0)

    def run(self) -> PreprocessReport:
        first = self.sources[self.current_source]
        self.listener.opening(str(first.path), first.about)
        Path(self.options.stem).parent.mkdir(parents=True, exist_ok=True)
        settings, forks = self._encode_settings(), can_fork()
        pool, finished = None, False
        try:
            if self._workers > 1 and not forks:
                pool = WorkerPool(settings, self._workers)  # they load the tokenizer while this process does
            tokenizer = build_tokenizer(self.options.tokenizer)
            if pool is None:
                encoder = ChunkEncoder(settings, tokenizer)
                pool = WorkerPool(encoder, self._workers) if self._workers > 1 else None
            report = self._encode_and_write(tokenizer, pool or InProcessEncoder(encoder))
            finished = True
        finally:
            if pool is not None:
                pool.close(finished=finished)
        return report

    def _encode_and_write(self, tokenizer: Tokenizer, encoders: Encoder) -> PreprocessReport:
        options = self.options
        template = self._template(tokenizer)
        settings = self._resume_settings(tokenizer, template)
        journal = Journal(options.run_stem, settings)
        journal.take_over(options.stem)
        resumed = self._resume_state(journal)
        self.listener.started(time.perf_counter() - self._start, self._workers)
        with (
            self._output(tokenizer, resumed) as output,
            closing(SkippedList(skipped_path(options.run_stem), resumed.skipped_bytes)) as skipped,
            closing(_ChunkWriter(self, output, skipped, journal, resumed)) as writing,
        ):
            for path in journal.remove_outdated(options.stem, output.prefixes()):
                self.listener.note(f"the unfinished run of {path} wrote one of these datasets: it cannot be resumed")
            try:
                if not resumed.encoded:
                    chunks = chunks_of_share(self.sources, options.share, (resumed.source, resumed.place))
                    writing.write_all(encoders.encode_all(chunks, output.token_files()), encoders)
                num_tokens = output.finish()
                self._vocabulary.finish()
            except BaseException:
                writing.keep_or_discard()
                raise
        self._write_side_files(tokenizer, template, settings)
        journal.remove()
        prefixes, state = options.output_prefixes(), writing.state
        for key, count in num_tokens.items():
            if not count and options.share.count == 1:
                self.listener.note(
                    f"{prefixes[key]} has no token: {state.documents} documents, all of them empty. Nothing can be "
                    "trained on it"
                )
        return PreprocessReport(
            prefixes=prefixes,
            num_documents=state.documents,
            num_skipped=state.skipped,
            skipped_list=str(skipped.path) if state.skipped else None,
            num_tokens=num_tokens,
            num_bytes=state.bytes - resumed.bytes,
            num_new_tokens=writing.num_tokens,
            seconds=time.perf_counter() - self._start,
            workers=self._workers,
        )

    def _write_side_files(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, settings: Mapping[str, str]
    ) -> None:
        """Write what lies beside each pair, and remove what an earlier dataset of the prefix had and this one has not.

        The fingerprint of a share has a digest of each setting, for the merge.
        """
        options, run = self.options, None
        if options.share.count > 1:
            run = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in settings.items()}
            del run["share"]
        for key in options.source.keys:
            prefix = options.output_prefixes()[key]
            write_fingerprint(prefix, tokenizer.fingerprint(), run)
            if template is not None and options.loss_mask is not None:
                Path(prefix + TEMPLATE).write_text(template.source, encoding="utf-8")
            else:
                remove_side_files(prefix, TEMPLATE, *MASK_FILES)

    def snapshot(self, state: RunState, resumed: RunState) -> ProgressSnapshot:
        """Return the progress of the run for the listener."""
        return ProgressSnapshot(
            documents=state.documents,
            bytes=state.bytes,
            disk=state.disk,
            disk_total=self._high - self._low,
            seconds=time.perf_counter() - self._start,
            documents_before=resumed.documents,
            bytes_before=resumed.bytes,
            disk_before=resumed.disk,
        )

    def disk(self, located: LocatedChunk) -> int:
        """Return the bytes of this share up to the end of a chunk."""
        return min(located.disk, self._high) - self._low

    def inputs(self) -> str:
        """Return the names of the inputs for a message."""
        names = [str(source.path) for source in self.sources]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")

    def _resume_state(self, journal: Journal) -> RunState:
        """Return where an unfinished run stopped; the initial state if there is none to continue."""
        if self.options.restart:
            journal.remove()
            return RunState()
        state, note = journal.read()
        if state is not None and not OutputFiles.is_intact(state.written):
            state, note = (
                None,
                f"the partial files of the unfinished run {journal.path} are missing: starting from the beginning",
            )
        if note:
            self.listener.note(note)
        if state is None:
            return RunState()
        self.listener.note(
            f"resuming the unfinished run of {self.options.stem}: {state.documents} documents are written "
            "(--restart starts from the beginning)"
        )
        return state

    def _output(self, tokenizer: Tokenizer, resumed: RunState) -> OutputFiles:
        options = self.options
        size = None
        if options.partitions > 1 and options.keep_sequential:
            size = -(-sum(_count_units(source) for source in self.sources) // options.partitions)
        numbered = [options.output_prefixes(f"_{number}") for number in range(options.partitions)]
        prefixes = options.output_prefixes()
        dtypes = dict.fromkeys(prefixes, np.dtype(np.uint8))
        dtypes |= dict.fromkeys(options.source.keys, smallest_dtype(tokenizer.vocab_size))
        return OutputFiles(
            prefixes,
            Partitions(options.partitions, size),
            dtypes,
            resumed.written,
            {key: [part[key] for part in numbered] for key in prefixes},
        )

    def _encode_settings(self) -> EncodeSettings:
        options = self.options
        return EncodeSettings(
            options.tokenizer,
            options.source.keys,
            options.append_eod,
            options.sentences,
            options.skip_bad,
            (self._high - self._low) // self._workers,
            options.chat_template,
            options.loss_mask,
            options.seq_length,
            options.as_in_megatron,
        )

    def _template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat template, and say where a model would not learn to stop."""
        options = self.options
        if options.chat_template is None:
            return None
        from megalith.tokenizers.chat_template import ends_of_turn, find_template

        template = find_template(options.chat_template, tokenizer)
        if options.loss_mask is not None and not options.append_eod and not ends_of_turn(tokenizer, template):
            self.listener.note(
                f"--chat-template {options.chat_template} ends an answer with no special token of the tokenizer, by "
                "which a model would learn to stop; give --append-eod, or add its tokens to the tokenizer"
            )
        return template

    def _resume_settings(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, str]:
        """Return all settings that decide the output, under the names that a user knows."""
        options = self.options
        files = [(source.path.absolute(), source.path.stat()) for source in self.sources if source.path != STDIN]
        dialogues = {"--loss-mask": str(options.loss_mask), "--seq-length": str(options.seq_length)}
        return ({} if template is None else {"--chat-template": template.source, **dialogues}) | {
            "input": "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files),
            "reading of the input": "\n".join(f"{source.about} {options.source}" for source in self.sources),
            "tokenizer": json.dumps(tokenizer.fingerprint(), sort_keys=True),
            "--append-eod": str(options.append_eod),
            "splitting into sentences": str(options.sentences),
            "--partitions": f"{options.partitions} {options.keep_sequential}",
            "share": f"{options.share.number} of {options.share.count}",
        }


class _ChunkWriter:
    """Writer of encoded chunks, with the journal and the listener's messages."""

    def __init__(self, run: _Run, output: OutputFiles, skipped: SkippedList, journal: Journal, state: RunState) -> None:
        self._run, self._output, self._skipped, self._journal, self._resumed = run, output, skipped, journal, state
        self.state = state
        self.num_tokens = 0
        self._has_journal = state != RunState()
        self._next_journal = time.perf_counter() + run.options.journal_interval
        self._thread = ThreadPoolExecutor(1, "journal")  # flushes in the background while encoding continues
        self._journal_write: Future[float] | None = None

    def write_all(self, pending_chunks: Iterator[PendingChunk], encoders: Encoder) -> None:
        """Write all chunks in order. Raises DataError for a bad document, or if there is none at all."""
        for pending_chunk in pending_chunks:
            self._write(pending_chunk)
            if self._journal_is_due():
                encoders.wait_until_written()
                self._write_journal()
        encoders.wait_until_written()
        state = self.state
        if not state.documents and self._run.options.share.count == 1:
            unreadable = f" that can be read; {state.skipped} were skipped" if state.skipped else ""
            raise DataError(f"{self._run.inputs()} holds no document{unreadable}")
        self._run.listener.finished(self._run.snapshot(state, self._resumed))
        self._wait_for_journal()
        if self._has_journal:
            self._write_journal(encoded=True)
            self._wait_for_journal()

    def keep_or_discard(self) -> None:
        """Handle an error of the run: keep the files for a later run if the journal covers them, else remove them."""
        self._thread.shutdown()
        if self._has_journal:
            self._output.keep()
            self._run.listener.note(
                f"the encoded documents are kept in {self._journal.path} and the files it names; the same command "
                "resumes from there"
            )
        elif not self._resumed.skipped_bytes:
            self._skipped.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, pending_chunk: PendingChunk) -> None:
        run, state, located, chunk = self._run, self.state, pending_chunk.located, pending_chunk.report
        source = run.sources[located.source]
        if located.source != run.current_source:
            run.current_source = located.source
            run.listener.opening(str(source.path), source.about)
        units = state.units if (located.source, located.chunk.start) == (state.source, state.place) else located.units
        if chunk.problems and units is None:
            units = source.units_before(located.chunk.start)
        for count, (number, reason) in enumerate(chunk.problems, start=1):
            place = f"{source.path}, {source.unit} {(units or 0) + number + 1}"
            if not run.options.skip_bad:
                raise DataError(f"{place}: {reason}")
            self._skipped.add(place, reason)
            run.listener.skipped(place, reason, state.skipped + count)
        pending_chunk.write(self._output.reserve(chunk, state.documents))
        by_key = chunk.by_key[: len(run.options.source.keys)]  # without the loss mask
        self.num_tokens += sum(int(structure.lengths.sum(dtype=np.int64)) for structure in by_key)
        self.state = RunState(
            source=located.source,
            place=located.chunk.end,
            units=None if units is None else units + chunk.num_units,
            documents=state.documents + chunk.num_documents,
            bytes=state.bytes + chunk.num_bytes,
            disk=run.disk(located),
            skipped=state.skipped + len(chunk.problems),
            skipped_bytes=self._skipped.num_bytes,
        )
        run.listener.advanced(run.snapshot(self.state, self._resumed))

    def _journal_is_due(self) -> bool:
        """Return whether to write the journal. Waits for the previous write, so that at most one is pending."""
        if time.perf_counter() < self._next_journal:
            return False
        self._next_journal = self._wait_for_journal()
        return time.perf_counter() >= self._next_journal

    def _write_journal(self, *, encoded: bool = False) -> None:
        """Write the journal in the background. Every reserved chunk must be written.

        Tokens written meanwhile are harmless: the journal says how many bytes count.
        """
        state = replace(self.state, written=self._output.written(), encoded=encoded)
        self._journal_write = self._thread.submit(self._flush, state)
        self._next_journal = time.perf_counter() + self._run.options.journal_interval

    def _flush(self, state: RunState) -> float:
        """Flush the files, then write the journal; return the earliest time of the next journal."""
        start = time.perf_counter()
        self._skipped.flush()
        self._output.flush()
        self._journal.write(state)
        self._has_journal = True
        end = time.perf_counter()
        return end + _JOURNAL_PAUSE * (end - start)

    def _wait_for_journal(self) -> float:
        """Wait for a pending journal; return what `_flush` returned, or 0. Raises what `_flush` raised."""
        noting, self._journal_write = self._journal_write, None
        return 0.0 if noting is None else noting.result()


def _count_units(source: Source) -> int:
    """Count the units (lines, documents, rows) of a source."""
    total = 0
    for chunk in source.chunks():
        if chunk.num_units is None:
            return source.units_before(source.disk_bytes) or 0
        total += chunk.num_units
    return total
