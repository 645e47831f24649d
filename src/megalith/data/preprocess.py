"""Text of any kind to .bin/.idx pairs, on several processes, with the same bytes for any number of them.

This process finds where chunks lie, and where their tokens belong as soon as it is known how many come before; workers
turn chunks into tokens and write them.
Imports no torch. Nothing has a final name before all of it is written, and a run that is killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from megalith.data.encoding import ChunkEncoder, EncodeSettings
from megalith.data.indexed import smallest_dtype
from megalith.data.output import Journal, Output, Partitions, SkippedList, State
from megalith.data.preprocess_options import (
    PreprocessOptions,
    Progress,
    Standing,
    find_violations,
    option_violations,
    plan_sources,
)
from megalith.data.shares import Located, chunks_of_share
from megalith.data.sources import Source
from megalith.data.workers import Encoders, Processes, ThisProcess, Turn
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.card import write_card
from megalith.tokenizers.fast_bpe import is_fast

__all__ = ["PreprocessOptions", "PreprocessReport", "find_violations", "preprocess", "useful_workers"]

# With fewer, starting a process costs more than it brings.
_CHUNKS_PER_WORKER = 16
_CHUNKS_PER_FAST_WORKER = 96
_PAUSE = 1  # between two notes of how far the run is, in times of what the last took the disk


@dataclass(frozen=True)
class PreprocessReport:
    """What was done.

    Attributes:
        skipped_list: where each of them is named, None if there are none.
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


def preprocess(options: PreprocessOptions, progress: Progress | None = None) -> PreprocessReport:
    """Encode texts and write one dataset for each key.

    Raises:
        ConfigError: options that cannot work, all of them at once.
        DataError: a damaged tokenizer, a bad document (with its place), no document, a full disk.
        MegalithError: a worker process died.
    """
    start = time.perf_counter()
    watcher = progress or Progress()
    plan = plan_sources(options)
    violations = option_violations(options) + plan.violations
    if violations:
        raise ConfigError(violations)
    for note in plan.notes:
        watcher.note(note)
    return _Run(options, plan.sources, watcher, start).run()


def useful_workers(options: PreprocessOptions, sources: list[Source]) -> int:
    """Processes worth starting: not more than asked for, than there are cores, and than there is work for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    low, high = options.share.bounds(sum(source.disk_bytes for source in sources))
    fast = is_fast(options.tokenizer.tokenizer_type) and options.sentences is None
    chunks = _CHUNKS_PER_FAST_WORKER if fast else _CHUNKS_PER_WORKER
    work = (high - low) // (options.source.limits.chunk_bytes * chunks)
    return max(1, min(options.workers, cores, work))


class _Run:
    """One run, from its sources to the report."""

    def __init__(self, options: PreprocessOptions, sources: list[Source], watcher: Progress, start: float) -> None:
        self.options, self.sources, self.watcher, self._start = options, sources, watcher, start
        self._workers = useful_workers(options, sources)
        self._before = [0, *accumulate(source.disk_bytes for source in sources)]
        self._low, self._high = options.share.bounds(self._before[-1])
        self.opened = next((at for at, end in enumerate(self._before[1:]) if end > self._low), 0)

    def run(self) -> PreprocessReport:
        first = self.sources[self.opened]
        self.watcher.opening(str(first.path), first.about)
        Path(self.options.stem).parent.mkdir(parents=True, exist_ok=True)
        # Workers load the tokenizer while this process does.
        encoders = Processes(self._encode_settings(), self._workers) if self._workers > 1 else None
        finished = False
        try:
            tokenizer = build_tokenizer(self.options.tokenizer)
            used = encoders or ThisProcess(ChunkEncoder(self._encode_settings(), tokenizer))
            report = self._written(tokenizer, used)
            finished = True
        finally:
            if encoders is not None:
                encoders.close(finished=finished)
        return report

    def _written(self, tokenizer: Tokenizer, encoders: Encoders) -> PreprocessReport:
        options = self.options
        journal = Journal(options.stem, self._settings(tokenizer))
        begun = self._begun(journal)
        self.watcher.started(time.perf_counter() - self._start, self._workers)
        skipped_path = Path(options.stem + "_skipped.txt")
        with (
            self._output(tokenizer, begun) as output,
            closing(SkippedList(skipped_path, begun.skipped_bytes)) as skipped,
            closing(_Writing(self, output, skipped, journal, begun)) as writing,
        ):
            try:
                if not begun.encoded:
                    chunks = chunks_of_share(self.sources, options.share, (begun.source, begun.place))
                    writing.write_all(encoders.turns(chunks, output.token_files()), encoders)
                num_tokens = output.finish()
            except BaseException:
                writing.leave()
                raise
        prefixes = options.output_prefixes()
        for prefix in prefixes.values():
            write_card(prefix, tokenizer.card())
        journal.remove()
        state = writing.state
        for key, count in num_tokens.items():
            if not count and options.share.count == 1:
                self.watcher.note(
                    f"{prefixes[key]} has no token: {state.documents} documents, all of them empty. Nothing can be "
                    "trained on it"
                )
        return PreprocessReport(
            prefixes=prefixes,
            num_documents=state.documents,
            num_skipped=state.skipped,
            skipped_list=str(skipped_path) if state.skipped else None,
            num_tokens=num_tokens,
            num_bytes=state.bytes - begun.bytes,
            num_new_tokens=writing.num_tokens,
            seconds=time.perf_counter() - self._start,
            workers=self._workers,
        )

    def standing(self, state: State, begun: State) -> Standing:
        """How far the run is, for the listener."""
        return Standing(
            documents=state.documents,
            bytes=state.bytes,
            disk=state.disk,
            disk_total=self._high - self._low,
            seconds=time.perf_counter() - self._start,
            documents_before=begun.documents,
            bytes_before=begun.bytes,
            disk_before=begun.disk,
        )

    def disk(self, located: Located) -> int:
        """Bytes of this share up to the end of a chunk."""
        return min(located.disk, self._high) - self._low

    def inputs(self) -> str:
        """The inputs, for a message."""
        names = [str(source.path) for source in self.sources]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")

    def _begun(self, journal: Journal) -> State:
        """Where an unfinished run stopped; the beginning where there is none that can be gone on with."""
        if self.options.restart:
            journal.remove()
            return State()
        state, note = journal.read()
        if state is not None and not Output.is_there(state.written):
            state, note = None, f"the partial files of the unfinished run {journal.path} are gone: starting anew"
        if note:
            self.watcher.note(note)
        if state is None:
            return State()
        self.watcher.note(
            f"going on with the unfinished run of {self.options.stem}: {state.documents} documents are there "
            "(--restart begins anew)"
        )
        return state

    def _output(self, tokenizer: Tokenizer, begun: State) -> Output:
        options = self.options
        size = None
        if options.partitions > 1 and options.keep_sequential:
            size = -(-sum(_count(source) for source in self.sources) // options.partitions)
        numbered = [options.output_prefixes(f"_{number}") for number in range(options.partitions)]
        return Output(
            options.output_prefixes(),
            Partitions(options.partitions, size),
            smallest_dtype(tokenizer.vocab_size),
            begun.written,
            {key: [prefixes[key] for prefixes in numbered] for key in options.source.keys},
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
        )

    def _settings(self, tokenizer: Tokenizer) -> dict[str, str]:
        """All that decides the output, by the name that a user knows it by."""
        options = self.options
        files = [(source.path.absolute(), source.path.stat()) for source in self.sources]
        return {
            "input": "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files),
            "reading of the input": "\n".join(f"{source.about} {options.source}" for source in self.sources),
            "tokenizer": json.dumps(tokenizer.card(), sort_keys=True),
            "--append-eod": str(options.append_eod),
            "splitting into sentences": str(options.sentences),
            "--partitions": f"{options.partitions} {options.keep_sequential}",
            "share": f"{options.share.number} of {options.share.count}",
        }


class _Writing:
    """Chunks into an output, with the journal of it and what is said on the way."""

    def __init__(self, run: _Run, output: Output, skipped: SkippedList, journal: Journal, begun: State) -> None:
        self._run, self._output, self._skipped, self._journal, self._begun = run, output, skipped, journal, begun
        self.state = begun
        self.num_tokens = 0
        self._noted = begun != State()
        self._next_note = time.perf_counter() + run.options.seconds_between_notes
        self._thread = ThreadPoolExecutor(1, "journal")  # the disk takes what is noted while more is encoded
        self._noting: Future[float] | None = None

    def write_all(self, turns: Iterator[Turn], encoders: Encoders) -> None:
        """Append all chunks. Raises DataError for a bad document, or if there is none at all."""
        for turn in turns:
            self._write(turn)
            if self._is_due():
                encoders.settle()
                self._note()
        encoders.settle()
        state = self.state
        if not state.documents and self._run.options.share.count == 1:
            left_out = f" that can be read; {state.skipped} were left out" if state.skipped else ""
            raise DataError(f"{self._run.inputs()} holds no document{left_out}")
        self._run.watcher.finished(self._run.standing(state, self._begun))
        self._wait_for_note()
        if self._noted:
            self._note(encoded=True)
            self._wait_for_note()

    def leave(self) -> None:
        """An error ends the run: what is noted stays for the next one, the rest goes."""
        self._thread.shutdown()
        if self._noted:
            self._output.keep()
            self._run.watcher.note(
                f"what was encoded is kept in {self._journal.path} and the files it names; the same command goes on "
                "from there"
            )
        elif not self._begun.skipped_bytes:
            self._skipped.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, turn: Turn) -> None:
        run, state, located, chunk = self._run, self.state, turn.located, turn.report
        source = run.sources[located.source]
        if located.source != run.opened:
            run.opened = located.source
            run.watcher.opening(str(source.path), source.about)
        units = state.units if (located.source, located.chunk.start) == (state.source, state.place) else located.units
        if chunk.problems and units is None:
            units = source.units_before(located.chunk.start)
        for count, (number, reason) in enumerate(chunk.problems, start=1):
            place = f"{source.path}, {source.unit} {(units or 0) + number + 1}"
            if not run.options.skip_bad:
                raise DataError(f"{place}: {reason}")
            self._skipped.add(place, reason)
            run.watcher.skipped(place, reason, state.skipped + count)
        turn.write(self._output.place(chunk, state.documents))
        self.num_tokens += sum(int(structure.lengths.sum(dtype=np.int64)) for structure in chunk.by_key)
        self.state = State(
            source=located.source,
            place=located.chunk.end,
            units=None if units is None else units + chunk.num_units,
            documents=state.documents + chunk.num_documents,
            bytes=state.bytes + chunk.num_bytes,
            disk=run.disk(located),
            skipped=state.skipped + len(chunk.problems),
            skipped_bytes=self._skipped.num_bytes,
        )
        run.watcher.advanced(run.standing(self.state, self._begun))

    def _is_due(self) -> bool:
        """Whether to note how far the run is. Waits for the last note, so that two are never more than that apart."""
        if time.perf_counter() < self._next_note:
            return False
        self._next_note = self._wait_for_note()
        return time.perf_counter() >= self._next_note

    def _note(self, *, encoded: bool = False) -> None:
        """Have everything brought to the disk, and then how far it is; all that is placed must be written.

        What is written meanwhile does no harm, as the journal says how much counts.
        """
        state = replace(self.state, written=self._output.written(), encoded=encoded)
        self._noting = self._thread.submit(self._bring_to_disk, state)
        self._next_note = time.perf_counter() + self._run.options.seconds_between_notes

    def _bring_to_disk(self, state: State) -> float:
        """Returns when the next note may be made at the earliest."""
        start = time.perf_counter()
        self._skipped.flush()
        self._output.flush()
        self._journal.write(state)
        self._noted = True
        end = time.perf_counter()
        return end + _PAUSE * (end - start)

    def _wait_for_note(self) -> float:
        """Until the last note is on the disk; returns what `_bring_to_disk` did, or 0. Raises what it raises."""
        noting, self._noting = self._noting, None
        return 0.0 if noting is None else noting.result()


def _count(source: Source) -> int:
    """Units of a source."""
    total = 0
    for chunk in source.chunks():
        if chunk.num_units is None:
            return source.units_before(source.disk_bytes) or 0
        total += chunk.num_units
    return total
