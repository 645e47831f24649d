"""Text files to .bin/.idx pairs, on several processes, with the same bytes for any number of them.

This process reads chunks and writes tokens in their order; workers in between turn chunks into tokens. Imports no
torch. Nothing has a final name before all of it is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megalith.config import TokenizerConfig
from megalith.data import sources
from megalith.data.encoding import EncodedChunk, EncodeSettings, encode_chunk
from megalith.data.indexed import IndexedWriter, smallest_dtype
from megalith.data.workers import encode_in_processes
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.build import tokenizer_violations

_CHUNKS_PER_WORKER = 16  # with less to do, starting a process costs more than it brings


@dataclass(frozen=True)
class PreprocessOptions:
    """What to turn into tokens, and how.

    Attributes:
        input: text file, one JSON object per line or plain text.
        output_prefix: beginning of the output paths; `_{key}_document.bin` and `.idx` are added.
        tokenizer: the tokenizer.
        json_keys: keys of the JSON objects; each makes a dataset.
        append_eod: end each document with the end-of-document id.
        workers: processes that encode; the output is the same for any number.
        input_format: jsonl, txt, or auto to go by the ending of the file name.
        document_separator: what separates the documents of a txt; None finds out (`sources.find_separator`).
        chunk_bytes: how much text a worker gets at once.
        max_document_bytes: the longest line or document that is taken into memory.
    """

    input: str
    output_prefix: str
    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    input_format: str = "auto"
    document_separator: str | None = None
    chunk_bytes: int = 1 << 19
    max_document_bytes: int = 1 << 26

    def output_prefixes(self) -> dict[str, str]:
        """Key to the prefix of its dataset."""
        return {key: f"{self.output_prefix}_{key}_document" for key in self.json_keys}


@dataclass(frozen=True)
class PreprocessReport:
    """What was done.

    Attributes:
        prefixes: key to the prefix of its dataset.
        num_documents: documents, empty ones included.
        num_tokens: key to the number of tokens.
        num_bytes: bytes of text read.
        seconds: duration.
        workers: processes that encoded.
        separator: what separated the documents of a txt.
    """

    prefixes: dict[str, str]
    num_documents: int
    num_tokens: dict[str, int]
    num_bytes: int
    seconds: float
    workers: int
    separator: str | None = None


class Progress(Protocol):
    """What wants to know how far the work is."""

    def opening(self, path: str) -> None:
        """The input is about to be opened."""

    def started(self, seconds: float, settings: EncodeSettings, workers: int) -> None:
        """Tokenizer and workers are there, `seconds` after the call."""

    def advanced(self, documents: int, bytes_done: int, bytes_total: int, seconds: float) -> None:
        """So much has been written, `seconds` after the call."""

    def finished(self, documents: int, bytes_done: int, seconds: float) -> None:
        """All text is encoded; the files get their names next."""


class Silence:
    """Progress that nobody watches."""

    def opening(self, path: str) -> None: ...

    def started(self, seconds: float, settings: EncodeSettings, workers: int) -> None: ...

    def advanced(self, documents: int, bytes_done: int, bytes_total: int, seconds: float) -> None: ...

    def finished(self, documents: int, bytes_done: int, seconds: float) -> None: ...


def preprocess(options: PreprocessOptions, progress: Progress | None = None) -> PreprocessReport:
    """Encode a text file and write one dataset for each key.

    Raises:
        ConfigError: options that cannot work, all of them at once.
        DataError: a damaged tokenizer, a bad line (with its number), no document, a full disk.
        MegalithError: a worker process died.
    """
    violations = find_violations(options)
    if violations:
        raise ConfigError(violations)
    start = time.perf_counter()
    watcher = progress or Silence()
    watcher.opening(options.input)
    settings, workers = _settings(options), useful_workers(options)
    tokenizer = build_tokenizer(options.tokenizer)
    Path(options.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    watcher.started(time.perf_counter() - start, settings, workers)
    prefixes = options.output_prefixes()
    with ExitStack() as stack:
        dtype = smallest_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes.values()]
        chunks = stack.enter_context(closing(_encode(options, settings, tokenizer, workers)))
        done = _Position(options.input, settings.input_format, Path(options.input).stat().st_size)
        _write_all(chunks, writers, done, watcher, start)
        for writer in writers:
            writer.finalize()
    return PreprocessReport(
        prefixes=prefixes,
        num_documents=done.documents,
        num_tokens={key: writer.num_tokens for key, writer in zip(prefixes, writers, strict=True)},
        num_bytes=done.bytes,
        seconds=time.perf_counter() - start,
        workers=workers,
        separator=settings.separator,
    )


def _write_all(
    chunks: Iterable[EncodedChunk], writers: list[IndexedWriter], done: _Position, watcher: Progress, start: float
) -> None:
    """Append all chunks, one writer for each key."""
    for chunk in chunks:
        done.pass_over(chunk)
        for writer, encoded in zip(writers, chunk.by_key, strict=True):
            writer.add_documents(encoded.tokens, encoded.lengths, encoded.sequences_per_document)
        watcher.advanced(done.documents, done.bytes, done.total_bytes, time.perf_counter() - start)
    if not done.documents:
        raise DataError(f"{done.path} holds no document")
    watcher.finished(done.documents, done.bytes, time.perf_counter() - start)


def find_violations(options: PreprocessOptions) -> list[str]:
    """What keeps these options from working, as far as it shows without reading the text."""
    violations = tokenizer_violations(options.tokenizer)
    files = {"--vocab-file": options.tokenizer.vocab_file, "--merge-file": options.tokenizer.merge_file}
    for flag, file in {"--input": options.input, **files}.items():
        if file and not Path(file).is_file():
            violations.append(f"{flag} {file}: {'is a folder' if Path(file).is_dir() else 'no such file'}")
        elif file and not os.access(file, os.R_OK):
            violations.append(f"{flag} {file}: no permission to read it")
    violations += _format_violations(options)
    if options.workers < 1:
        violations.append(f"--workers {options.workers} is below 1")
    if options.max_document_bytes < 1 or options.chunk_bytes < 1:
        violations.append("--max-document-bytes and the chunk size are at least 1")
    folder = Path(options.output_prefix).absolute().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        violations.append(f"--output-prefix {options.output_prefix}: the folder {existing} cannot be written")
    return violations


def _format_violations(options: PreprocessOptions) -> list[str]:
    violations = []
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        violations.append(f"--json-keys {' '.join(options.json_keys)}: give at least one key, each once")
    violations += [
        f"--json-keys {key}: a key names a file, so it has no {os.sep}" for key in options.json_keys if os.sep in key
    ]
    if options.document_separator == "":
        violations.append("--document-separator is empty; leave it out to find the separator")
    if options.input_format not in ("auto", sources.JSONL, sources.TXT):
        violations.append(f"--input-format {options.input_format}: known are auto, jsonl and txt")
    elif os.access(options.input, os.R_OK) and Path(options.input).is_file():
        found = _input_format(options)
        if Path(options.input).stat().st_size == 0:
            violations.append(f"--input {options.input}: the file is empty")
        elif found is None:
            violations.append(
                f"--input {options.input}: neither .jsonl, .json nor .txt, and no JSON at its beginning; say so with "
                f"--input-format if it is one of them (compressed files, csv and parquet need the complete data path, "
                f"not in this version: unpack or convert them)"
            )
        elif found == sources.TXT and options.json_keys != ("text",):
            violations.append(f"--json-keys {' '.join(options.json_keys)}: the input is plain text, which has no keys")
    return violations


def _input_format(options: PreprocessOptions) -> str | None:
    return sources.format_of(Path(options.input)) if options.input_format == "auto" else options.input_format


def _settings(options: PreprocessOptions) -> EncodeSettings:
    input_format = _input_format(options)
    assert input_format is not None
    separator = options.document_separator
    if input_format == sources.TXT and separator is None:
        separator = sources.find_separator(Path(options.input))
    return EncodeSettings(options.tokenizer, input_format, options.json_keys, separator, options.append_eod)


def useful_workers(options: PreprocessOptions) -> int:
    """Processes worth starting: not more than asked for, than there are cores, and than there is work for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work = Path(options.input).stat().st_size // (options.chunk_bytes * _CHUNKS_PER_WORKER)
    return max(1, min(options.workers, cores, work))


@dataclass
class _Position:
    """How far the input has been written; turns the first bad document into an error with its place."""

    path: str
    input_format: str
    total_bytes: int
    documents: int = 0
    bytes: int = 0
    units: int = 0

    def pass_over(self, chunk: EncodedChunk) -> None:
        if chunk.problem is not None:
            number, reason = chunk.problem
            unit = "line" if self.input_format == sources.JSONL else "document"
            raise DataError(f"{self.path}, {unit} {self.units + number + 1}: {reason}")
        self.documents += chunk.num_documents
        self.bytes += chunk.num_bytes
        self.units += chunk.num_units


def _encode(
    options: PreprocessOptions, settings: EncodeSettings, tokenizer: Tokenizer, workers: int
) -> Generator[EncodedChunk, None, None]:
    """The chunks of the input in order, encoded."""
    chunks = sources.read_chunks(
        Path(options.input),
        settings.separator_bytes,
        chunk_bytes=options.chunk_bytes,
        max_document_bytes=options.max_document_bytes,
    )
    if workers == 1:
        for chunk in chunks:
            yield encode_chunk(settings, tokenizer, chunk)
        return
    yield from encode_in_processes(settings, chunks, workers)
