"""Options of a preprocessing run, their validation, and the listener for its progress."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from megalith.config import TokenizerConfig
from megalith.data.encoding import LOSS_MASKS, SentenceSettings
from megalith.data.indexed import LOSS_MASK
from megalith.data.shares import Share
from megalith.data.sources import FORMATS, STDIN, SourceOptions, SourcePlan, find_sources
from megalith.errors import DataError
from megalith.tokenizers.build import tokenizer_violations


@dataclass(frozen=True)
class ProgressSnapshot:
    """Progress of a run; `..._before` counts the work of an earlier run, `disk` bytes of the input."""

    documents: int
    bytes: int
    disk: int
    disk_total: int
    seconds: float
    documents_before: int = 0
    bytes_before: int = 0
    disk_before: int = 0


class ProgressListener:
    """Callbacks of a run; override those of interest."""

    def note(self, text: str) -> None:
        """Handle a message about the inputs or the run that the user should see."""

    def opening(self, path: str, about: str) -> None:
        """Handle the start of a source; `about` describes its format."""

    def started(self, seconds: float, workers: int) -> None:
        """Handle the end of start-up: tokenizer and workers are ready, `seconds` after the call."""

    def advanced(self, snapshot: ProgressSnapshot) -> None:
        """Handle a written chunk."""

    def skipped(self, place: str, reason: str, count: int) -> None:
        """Handle a document that is left out because it cannot be read; `count` such documents so far."""

    def finished(self, snapshot: ProgressSnapshot) -> None:
        """Handle the end of encoding; the files are renamed next."""


@dataclass(frozen=True)
class PreprocessOptions:
    """Inputs, output and settings of a preprocessing run.

    Attributes:
        output_prefix: beginning of the output paths; `_{key}_document.bin` and `.idx` are added.
        source: how the inputs are read; each of its keys makes a dataset.
        append_eod: end each document with the end-of-document id.
        chat_template: file of a Jinja template that makes text of messages, or `tokenizer` for the tokenizer's.
        loss_mask: what of a dialogue is learnt, one of `LOSS_MASKS`; a second dataset holds the mask. None for none.
        seq_length: of the training; a dialogue that takes more is a bad document. None for any length.
        as_in_megatron: what Megatron does with a line under --sft: a system message begins another dialogue.
        sentences: how texts are split into sentences, None to leave them whole; with it output names end in `sentence`.
        workers: processes that encode; the output is the same for any number.
        partitions: Megatron's partitions; above 1 they change the order of the documents, and their files are kept.
        keep_sequential: make partitions contiguous, so that the order is kept.
        share: part of the input that this process takes.
        skip_bad: skip unreadable documents instead of stopping at the first.
        restart: start from the beginning even if an unfinished run could be continued.
        journal_interval: seconds between journal writes. They flush the output meanwhile, so that little is left for
            the end.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig
    source: SourceOptions = SourceOptions()
    append_eod: bool = False
    chat_template: str | None = None
    loss_mask: str | None = None
    seq_length: int | None = None
    as_in_megatron: bool = False
    sentences: SentenceSettings | None = None
    workers: int = 1
    partitions: int = 1
    keep_sequential: bool = False
    share: Share = Share()
    skip_bad: bool = False
    restart: bool = False
    journal_interval: float = 1.0

    @property
    def stem(self) -> str:
        """Return the output prefix with the suffix of the share."""
        return self.output_prefix + self.share.suffix

    @property
    def run_stem(self) -> str:
        """Return the beginning of the names of a run's journal and list of skipped documents.

        That is `stem`, or the prefix of the first dataset if this is not `text_document`: runs of the same `stem` with
        other keys have their own.
        """
        first = next(iter(self.output_prefixes().values()))
        return self.stem if first == f"{self.stem}_text_document" else first

    @property
    def named_tokenizer(self) -> TokenizerConfig:
        """Return the tokenizer with the file of its vocabulary, which is yet to be made if it is not `tokenizer`."""
        tokenizer = self.tokenizer
        if tokenizer.tokenizer_type != "CharacterTokenizer" or tokenizer.vocab_file:
            return tokenizer
        return replace(tokenizer, vocab_file=f"{self.output_prefix}_vocab.json")

    def output_prefixes(self, partition: str = "") -> dict[str, str]:
        """Return the prefix of the dataset of each key, or of one of its partitions, and of its loss mask."""
        level = "sentence" if self.sentences else "document"
        prefixes = {key: f"{self.stem}{partition}_{key}_{level}" for key in self.source.keys}
        masks = {key + LOSS_MASK: prefix + LOSS_MASK for key, prefix in prefixes.items() if self.loss_mask is not None}
        return prefixes | masks


def find_violations(options: PreprocessOptions, *, files: bool = True) -> list[str]:
    """Return why these options cannot work, as far as can be told without reading all of the text.

    Without `files` no file is looked at: those of a script may lie on another machine.
    """
    if not files:
        return _value_violations(options)
    return option_violations(options) + plan_sources(options).violations


def plan_sources(options: PreprocessOptions) -> SourcePlan:
    """Find and open the inputs."""
    source = options.source
    if not options.inputs or _source_violations(source):
        return SourcePlan()
    return find_sources(options.inputs, source)


def option_violations(options: PreprocessOptions) -> list[str]:
    """Return why these options cannot work, apart from the inputs."""
    violations = _value_violations(options)
    for name, file in options.tokenizer.named_files.items():
        flag = "--" + name.replace("_", "-")
        if name not in options.tokenizer.taken:
            continue  # it is not read
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
        violations.append(f"--output-prefix {options.output_prefix}: the folder {existing} is not writable")
    return violations


def _value_violations(options: PreprocessOptions) -> list[str]:
    """Return why these options cannot work whatever files exist."""
    tokenizer = options.named_tokenizer
    violations = tokenizer_violations(tokenizer) + _source_violations(options.source)
    if tokenizer is not options.tokenizer and options.share.count > 1:
        violations.append(
            f"--vocab-file is missing: a share of the input ({options.share.reason}) lacks some characters; make "
            "the vocabulary with --share 1/1 first"
        )
    if str(STDIN) in options.inputs:
        violations += _stdin_violations(options, makes_vocabulary=tokenizer is not options.tokenizer)
    if options.chat_template is not None:
        others = {"--split-sentences": options.sentences, "--json-keys with several keys": len(options.source.keys) > 1}
        others["making the --vocab-file"] = tokenizer is not options.tokenizer
        violations += [
            f"--chat-template {options.chat_template} cannot be combined with {other}"
            for other, given in others.items()
            if given
        ]
    elif options.loss_mask is not None:
        violations.append(f"--loss-mask {options.loss_mask} needs --chat-template")
    if options.loss_mask not in (None, *LOSS_MASKS):
        violations.append(f"--loss-mask {options.loss_mask}: known are {', '.join(LOSS_MASKS)}")
    if options.seq_length is not None and options.loss_mask is None:
        violations.append(f"--seq-length {options.seq_length} needs --loss-mask")
    if options.workers < 1:
        violations.append(f"--workers {options.workers} is below 1")
    if options.partitions < 1:
        violations.append(f"--partitions {options.partitions} is below 1")
    if options.partitions > 1 and options.share.count > 1:
        violations.append(
            f"--partitions {options.partitions} cannot be combined with a share of the input ({options.share.reason}), "
            "which keeps the order of its documents; leave out --partitions"
        )
    return violations


def _stdin_violations(options: PreprocessOptions, *, makes_vocabulary: bool) -> list[str]:
    """Return what needs the size of the input, or a second reading."""
    problems = {
        "other inputs beside it": len(options.inputs) > 1,
        f"a share of the input ({options.share.reason})": options.share.count > 1,
        "--keep-sequential-samples with --partitions": options.partitions > 1 and options.keep_sequential,
        "making the --vocab-file": makes_vocabulary,
    }
    reason = "standard input is read once and its size is unknown; write it to a file and give its path"
    return [
        f"--input -: {problem} cannot be combined with it: {reason}" for problem, found in problems.items() if found
    ]


def _source_violations(source: SourceOptions) -> list[str]:
    violations = []
    keys = " ".join(source.keys)
    if not source.keys or len(set(source.keys)) < len(source.keys):
        violations.append(f"--json-keys {keys}: give at least one key, each once")
    violations += [
        f"--json-keys {key}: a key is part of a file name, so it has no {os.sep}"
        for key in source.keys
        if os.sep in key
    ]
    if source.text_column is not None and len(source.keys) > 1:
        violations.append(f"--text-column {source.text_column}: one column cannot serve several --json-keys ({keys})")
    if source.document_separator == "":
        violations.append("--document-separator is empty; leave it out to detect the separator")
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
