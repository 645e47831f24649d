"""What a preprocessing run is asked for, what keeps it from working, and who hears how far it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megalith.config import TokenizerConfig
from megalith.data.encoding import SentenceSettings
from megalith.data.shares import Share
from megalith.data.sources import FORMATS, Plan, SourceOptions, find_sources
from megalith.errors import DataError
from megalith.tokenizers.build import tokenizer_violations


@dataclass(frozen=True)
class Standing:
    """How far a run is, and what an earlier run had done (`..._before`); `disk` counts bytes of the input."""

    documents: int
    bytes: int
    disk: int
    disk_total: int
    seconds: float
    documents_before: int = 0
    bytes_before: int = 0
    disk_before: int = 0


class Progress:
    """A listener to a run, which overrides what it wants to hear."""

    def note(self, text: str) -> None:
        """Something about the inputs or the run that the user should hear."""

    def opening(self, path: str, about: str) -> None:
        """A source is about to be read; what it was found to be."""

    def started(self, seconds: float, workers: int) -> None:
        """Tokenizer and workers are there, `seconds` after the call."""

    def advanced(self, standing: Standing) -> None:
        """A chunk has been written."""

    def skipped(self, place: str, reason: str, count: int) -> None:
        """A document cannot be read and is left out; the how many-th it is."""

    def finished(self, standing: Standing) -> None:
        """All text is encoded; the files get their names next."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What to turn into tokens, and how.

    Attributes:
        output_prefix: beginning of the output paths; `_{key}_document.bin` and `.idx` are added.
        source: how the inputs are read; its keys each make a dataset.
        append_eod: end each document with the end-of-document id.
        sentences: how texts are split into sentences, None to leave them whole; the level in the names is then
            `sentence`.
        workers: processes that encode; the output is the same for any number.
        partitions: Megatron's partitions; above 1 they change the order of the documents, and their files stay.
        keep_sequential: let partitions be contiguous, so that the order stays.
        share: the part of the input that this process takes.
        skip_bad: leave documents out that cannot be read, instead of stopping at the first.
        restart: begin anew even where an unfinished run could be gone on with.
        seconds_between_notes: how often it is noted how far the run is; the disk takes what is written meanwhile, so
            that little is left for the end.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig
    source: SourceOptions = SourceOptions()
    append_eod: bool = False
    sentences: SentenceSettings | None = None
    workers: int = 1
    partitions: int = 1
    keep_sequential: bool = False
    share: Share = Share()
    skip_bad: bool = False
    restart: bool = False
    seconds_between_notes: float = 1.0

    @property
    def stem(self) -> str:
        """The output prefix with the ending of the share."""
        return self.output_prefix + self.share.ending

    def output_prefixes(self, partition: str = "") -> dict[str, str]:
        """Key to the prefix of its dataset, or of one of its partitions."""
        level = "sentence" if self.sentences else "document"
        return {key: f"{self.stem}{partition}_{key}_{level}" for key in self.source.keys}


def find_violations(options: PreprocessOptions, *, files: bool = True) -> list[str]:
    """What keeps these options from working, as far as it shows without reading all of the text.

    Without `files` no file is looked at: those of a script may lie on another machine.
    """
    if not files:
        return _value_violations(options)
    return option_violations(options) + plan_sources(options).violations


def plan_sources(options: PreprocessOptions) -> Plan:
    """Find and open the inputs."""
    source = options.source
    if not options.inputs or _source_violations(source):
        return Plan()
    return find_sources(options.inputs, source)


def option_violations(options: PreprocessOptions) -> list[str]:
    """What keeps these options from working, the inputs aside."""
    violations = _value_violations(options)
    for name, file in options.tokenizer.named_files.items():
        flag = "--" + name.replace("_", "-")
        if not Path(file).is_file():
            violations.append(f"{flag} {file}: {'is a folder' if Path(file).is_dir() else 'no such file'}")
        elif not os.access(file, os.R_OK):
            violations.append(f"{flag} {file}: no permission to read it")
    if options.sentences is not None:
        try:
            options.sentences.splitter()
        except DataError as error:
            violations.append(str(error))
    folder = Path(options.output_prefix).absolute().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        violations.append(f"--output-prefix {options.output_prefix}: the folder {existing} cannot be written")
    return violations


def _value_violations(options: PreprocessOptions) -> list[str]:
    """What keeps these options from working, whatever files there are."""
    violations = tokenizer_violations(options.tokenizer) + _source_violations(options.source)
    if options.workers < 1:
        violations.append(f"--workers {options.workers} is below 1")
    if options.partitions < 1:
        violations.append(f"--partitions {options.partitions} is below 1")
    if options.partitions > 1 and options.share.count > 1:
        violations.append(
            f"--partitions {options.partitions} together with a share of the input ({options.share.reason}): each "
            "share keeps the order of its documents; leave out --partitions"
        )
    return violations


def _source_violations(source: SourceOptions) -> list[str]:
    violations = []
    keys = " ".join(source.keys)
    if not source.keys or len(set(source.keys)) < len(source.keys):
        violations.append(f"--json-keys {keys}: give at least one key, each once")
    violations += [
        f"--json-keys {key}: a key names a file, so it has no {os.sep}" for key in source.keys if os.sep in key
    ]
    if source.text_column is not None and len(source.keys) > 1:
        violations.append(f"--text-column {source.text_column}: one column cannot be several keys ({keys})")
    if source.document_separator == "":
        violations.append("--document-separator is empty; leave it out to find the separator")
    if source.document_separator is not None and source.one_document_per_file:
        violations.append("--document-separator and --one-document-per-file contradict each other; leave out one")
    if source.input_format not in ("auto", *FORMATS):
        violations.append(f"--input-format {source.input_format}: known are auto, {', '.join(FORMATS)}")
    if source.csv_header not in ("auto", "yes", "no"):
        violations.append(f"--csv-header {source.csv_header}: known are auto, yes and no")
    if source.csv_delimiter is not None and len(source.csv_delimiter) != 1:
        violations.append(f"--csv-delimiter {source.csv_delimiter!r} is not one character")
    for flag, value in (
        ("--max-document-bytes", source.limits.max_document_bytes),
        ("--max-expansion", source.limits.max_expansion),
        ("the chunk size", source.limits.chunk_bytes),
    ):
        if value < 1:
            violations.append(f"{flag} {value} is below 1")
    return violations
