"""`megalith preprocess` and tools/preprocess_data.py: data preparation with Megatron's flags and output."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalith.cli.arguments import CommandParser, closest_flag
from megalith.config import TokenizerConfig
from megalith.config.tokenizer_flags import add_import_flag, add_tokenizer_flags, read_tokenizer_flags
from megalith.config.values import local_name
from megalith.data.encoding import LOSS_MASKS, SentenceSettings
from megalith.data.preprocess import PreprocessOptions, PreprocessReport, find_violations, preprocess
from megalith.data.preprocess_options import ProgressListener, ProgressSnapshot
from megalith.data.shares import Share, read_share
from megalith.data.sources import END_OF_TEXT_SEPARATOR, FORMATS, UNKNOWN_SIZE, Limits, SourceOptions
from megalith.distributed.machine import usable_cores
from megalith.errors import ConfigError
from megalith.progress import Task, in_terminal, short, task
from megalith.train.streams import warn

_TOKENIZER_FLAGS = {  # and how many values each takes; the table of training's flags, which is long, has the reasons
    "--trust-remote-code": "0",
    "--tokenizer-metadata": "1",
    "--tokenizer-sentencepiece-legacy": "0",
    "--use-gigatoken": "0",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": "0",
    "--tokenizer-hf-no-use-fast": "0",
}
_MODEL_ONLY = "applies to the model; the data is the same for any value"
_NO_WORKER_SEARCH = "no search is needed: the default of --workers is the number of cores, the optimum"
_INTEGER_FLAGS = (
    "--workers",
    "--seq-length",
    "--partitions",
    "--log-interval",
    "--max-document-bytes",
    "--max-expansion",
)
_PUNKT_FLAGS = ("--keep-newlines", "--lang", "--punkt-parameters")
_MEGABYTE = 1024 * 1024
_SECONDS_BETWEEN_LINES = 1.0
_SHOWN_BAD_LINES = 10
_OBJECTS_BETWEEN_COLLECTIONS = 100_000  # Python's 700 walk the vocabulary again and again while it is read


@dataclass(frozen=True)
class OtherFlag:
    """Flag of Megatron that has no effect here, and why."""

    values: str  # number of arguments: "0", "1" or "+"
    reason: str  # message if it is used
    refused: bool = False  # whether it is an error, because ignoring it would change the result


OTHER_FLAGS = {
    "--dataset-impl": OtherFlag("1", "obsolete; datasets are always memory-mapped"),
    "--chunk-size": OtherFlag("1", "obsolete; work is divided by size"),
    "--legacy-tokenizer": OtherFlag("0", "the tokenizers give the same ids with and without it"),
    "--make-vocab-size-divisible-by": OtherFlag("1", _MODEL_ONLY),
    "--padded-vocab-size": OtherFlag("1", _MODEL_ONLY),
    "--no-pad-vocab-size": OtherFlag("0", "applies to the model; the data is the same with and without it"),
    "--find-optimal-num-workers": OtherFlag("0", _NO_WORKER_SEARCH, refused=True),
    "--workers-to-check": OtherFlag("+", _NO_WORKER_SEARCH, refused=True),
    "--max-documents": OtherFlag("1", f"belongs to --find-optimal-num-workers; {_NO_WORKER_SEARCH}", refused=True),
    "--performance-dir": OtherFlag("1", f"belongs to --find-optimal-num-workers; {_NO_WORKER_SEARCH}", refused=True),
}


def _training_flag(name: str) -> OtherFlag:
    """Return a tokenizer flag with the note or refusal that it has in training."""
    from megalith.config.known import known_flags

    known = known_flags()[name]
    return OtherFlag(known.arity, known.why or known.refusal, refused=not known.why)


def make_parser() -> CommandParser:
    """Build the parser. Numbers stay strings, so that `parse` reports all invalid ones at once."""
    parser = CommandParser(
        prog="megalith preprocess",
        description="Tokenize text to PREFIX_text_document.bin and .idx. The same command resumes a run that was "
        "killed. Under a launcher (RANK and WORLD_SIZE, a SLURM array) each process takes its share of the input; "
        "merge the shares with `megalith data merge --shares --output-prefix PREFIX`.",
        allow_abbrev=False,
    )
    _add_output(parser)
    _add_sources(parser)
    _add_sentences(parser)
    _add_run_flags(parser)
    add_import_flag(parser)
    add_tokenizer_flags(parser)
    for name, values in ({name: flag.values for name, flag in OTHER_FLAGS.items()} | _TOKENIZER_FLAGS).items():
        nargs: dict[str, Any] = {"action": "store_true"} if values == "0" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **(nargs or ({"nargs": "+"} if values == "+" else {})))
    return parser


def _add_output(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="files, folders, globs, - for standard input: jsonl, one JSON array, txt, csv, parquet, arrow, Hugging "
        "Face datasets; also compressed: .gz, .xz, .zst, .bz2; tar and zip of txt or json",
    )
    add("--output-prefix", type=local_name, metavar="PREFIX", help="prefix of the output paths")
    add("--json-keys", metavar="KEY", nargs="+", default=["text"], help="keys or columns, one dataset each (text)")
    add(
        "--chat-template",
        type=local_name,
        metavar="FILE",
        help="make text of messages (key messages): a Jinja chat template; chatml, llama3, mistral, plain, "
        "qwen3, identity, nemotron-h-aligned or nemotron-nano-v2; or the word tokenizer for its own",
    )
    add(
        "--loss-mask",
        nargs="?",
        const="assistant",
        choices=LOSS_MASKS,
        metavar="TURNS",
        help="for fine-tuning: also write PREFIX_messages_document_loss_mask, which tokens of a dialogue are learnt: "
        "assistant (default), last (its last message) or all; without --chat-template: the tokenizer's",
    )
    add("--seq-length", metavar="N", help="with --loss-mask: a dialogue of over N + 1 tokens is a bad line")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")


def _add_sources(parser: CommandParser) -> None:
    add = parser.add_argument_group("input format").add_argument
    add(
        "--input-format",
        default="auto",
        metavar="FORMAT",
        help=f"auto (default), {', '.join(FORMATS)} (json: an array)",
    )
    add("--encoding", default="auto", metavar="NAME", help="such as utf-8, gb18030, utf-16 (default: auto)")
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"separator of the documents in a txt, \n is a line break (default: "
        f"{END_OF_TEXT_SEPARATOR} if the file has any, else blank lines)",
    )
    add("--one-document-per-file", action="store_true", help="treat each txt as one document, blank lines included")
    add("--text-column", metavar="COLUMN", help="text column of a table, by name or number from 1")
    add("--csv-header", default="auto", metavar="WHETHER", help="first row has column names: yes, no or auto (default)")
    add("--csv-delimiter", metavar="CHAR", help=r"separator of the cells of a csv, \t is a tab (default: detected)")
    add("--dataset-split", default="train", metavar="NAME", help="split of a dataset with several (default: train)")
    add(
        "--max-document-bytes",
        metavar="N",
        default=str(Limits.max_document_bytes),
        help="of a line or document (default: 64 MiB)",
    )
    add(
        "--max-expansion",
        metavar="N",
        default=str(Limits.max_expansion),
        help=f"maximum ratio of decompressed to compressed size (default: {Limits.max_expansion})",
    )


def _add_sentences(parser: CommandParser) -> None:
    add = parser.add_argument_group("sentences (for BERT and T5)").add_argument
    add("--split-sentences", action="store_true", help="split documents into sentences: PREFIX_text_sentence")
    add(
        "--sentence-splitter",
        choices=("punkt", "marks"),
        help="punkt (default): nltk's, needs its data for the language; marks: by punctuation only, also for Chinese",
    )
    add("--keep-newlines", action="store_true", help="keep line breaks after a sentence as part of it")
    add("--lang", metavar="LANGUAGE", help="nltk's name of the language (default: english)")
    add(
        "--punkt-parameters",
        metavar="FILE",
        help="punkt parameters: JSON file or folder of nltk's punkt_tab (default: from nltk's data folders)",
    )


def _add_run_flags(parser: CommandParser) -> None:
    add = parser.add_argument_group("execution").add_argument
    add("--workers", metavar="N", help="worker processes, at most one per core (default); no effect on the output")
    add("--bad-lines", default="stop", metavar="POLICY", help="on unreadable input: stop (default), or skip and list")
    add("--share", metavar="K/N", help="share of the input for this process (default: from the launcher)")
    add("--restart", action="store_true", help="start over instead of resuming an unfinished run")
    add("--partitions", metavar="N", default="1", help="distribute documents as Megatron does, changing their order")
    add("--keep-sequential-samples", action="store_true", help="with --partitions: keep the order of the documents")
    add("--log-interval", metavar="N", default="1000", help="documents between progress lines (default: 1000)")


class CommandLine(NamedTuple):
    """Parsed command line."""

    options: PreprocessOptions
    log_interval: int
    notes: list[str]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None, *, files: bool = True) -> CommandLine:
    """Parse a command line; `environ` may hold the launcher's share and NLTK_DATA. ConfigError lists all errors."""
    environ = os.environ if environ is None else environ
    parser = make_parser()
    given, unknown = parser.parse_known_args([_with_hyphens(word) for word in argv])
    violations = [
        _unknown(word, parser) for word in unknown if word.startswith("--") or not unknown[0].startswith("--")
    ]
    notes: list[str] = []
    for name in (*OTHER_FLAGS, *_TOKENIZER_FLAGS):
        if getattr(given, _dest(name)) not in (None, False):
            flag = OTHER_FLAGS.get(name) or _training_flag(name)
            (violations if flag.refused else notes).append(f"{name}: {flag.reason}")
    numbers = {name: _positive_int(name, getattr(given, _dest(name)), violations) for name in _INTEGER_FLAGS}
    if given.bad_lines not in ("stop", "skip"):
        violations.append(f"--bad-lines {given.bad_lines}: give stop or skip")
    violations += [f"{name} is missing" for name in ("--input", "--output-prefix") if not getattr(given, _dest(name))]
    if given.loss_mask is not None and given.chat_template is None:
        given.chat_template = "tokenizer"
    if given.chat_template is not None and given.json_keys is parser.get_default("json_keys"):
        given.json_keys = ["messages"]
    tokenizer = TokenizerConfig(**read_tokenizer_flags(given, violations))
    options = PreprocessOptions(
        inputs=tuple(given.input or ()),
        output_prefix=given.output_prefix or "",
        tokenizer=tokenizer,
        source=_source(given, numbers),
        append_eod=given.append_eod,
        chat_template=given.chat_template,
        loss_mask=given.loss_mask,
        seq_length=numbers["--seq-length"],
        sentences=_sentences(given, environ, notes),
        workers=numbers["--workers"] or usable_cores(),
        partitions=numbers["--partitions"] or 1,
        keep_sequential=given.keep_sequential_samples,
        share=_share(given.share, environ, violations),
        skip_bad=given.bad_lines == "skip",
        restart=given.restart,
    )
    violations += find_violations(options, files=files)
    if violations:
        raise ConfigError(violations)
    notes += _notes(options, given)
    return CommandLine(options, numbers["--log-interval"] or 1, notes)


def run(argv: Sequence[str]) -> int:
    """Preprocess and print the summary."""
    if not argv or "-h" in argv or "--help" in argv:
        print(make_parser().format_help(), end="")
        return 0
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    command = parse(argv)
    progress = ConsoleProgress(command.log_interval)
    for note in command.notes:
        progress.note(note)
    with closing(progress):
        report = preprocess(command.options, progress)
    print(summary(report))
    share = command.options.share
    if share.count > 1:
        print(
            f"This was share {share.number + 1} of {share.count}. When all are complete: "
            f"megalith data merge --shares --output-prefix {shlex.quote(str(command.options.output_prefix))}"
        )
    return 0


def _source(given: argparse.Namespace, numbers: Mapping[str, int | None]) -> SourceOptions:
    limits = Limits(
        max_document_bytes=numbers["--max-document-bytes"] or Limits.max_document_bytes,
        max_expansion=numbers["--max-expansion"] or Limits.max_expansion,
    )
    return SourceOptions(
        keys=tuple(given.json_keys),
        input_format=given.input_format,
        encoding=given.encoding,
        document_separator=_unescape(given.document_separator),
        one_document_per_file=given.one_document_per_file,
        text_column=given.text_column,
        csv_header=given.csv_header,
        csv_delimiter=_unescape(given.csv_delimiter),
        dataset_split=given.dataset_split,
        limits=limits,
    )


def _sentences(given: argparse.Namespace, environ: Mapping[str, str], notes: list[str]) -> SentenceSettings | None:
    if given.split_sentences:
        folders = tuple(filter(None, environ.get("NLTK_DATA", "").split(os.pathsep)))
        by_marks = given.sentence_splitter == "marks"
        if by_marks:
            _note_unused(given, _PUNKT_FLAGS, "with --sentence-splitter marks", notes)
        language = given.lang or "english"
        return SentenceSettings(language, given.keep_newlines, given.punkt_parameters, folders, by_marks)
    _note_unused(given, ("--sentence-splitter", *_PUNKT_FLAGS), "without --split-sentences", notes)
    return None


def _note_unused(given: argparse.Namespace, flags: Sequence[str], why: str, notes: list[str]) -> None:
    notes += [f"{name}: has no effect {why}" for name in flags if getattr(given, _dest(name))]


def _share(text: str | None, environ: Mapping[str, str], violations: list[str]) -> Share:
    try:
        return read_share(text, environ)
    except ConfigError as error:
        violations += error.violations
        return Share()


def _notes(options: PreprocessOptions, given: argparse.Namespace) -> list[str]:
    kind = options.tokenizer.tokenizer_type
    notes = [
        f"{flag} {value} has no effect with --tokenizer-type {kind}" for flag, value in options.tokenizer.unread.items()
    ]
    if options.share.count > 1:
        notes.append(
            f"share {options.share.number + 1} of {options.share.count} of the input ({options.share.reason}); "
            "--share 1/1 processes all of it"
        )
    if options.partitions > 1:
        kept = "" if options.keep_sequential else " and the documents are reordered"
        notes.append(
            f"--partitions {options.partitions}: no faster here{kept}; the partitions' files "
            f"({options.output_prefix}_0_... and on) are kept, as in Megatron, and can be removed"
        )
    elif options.keep_sequential:
        notes.append("--keep-sequential-samples has no effect without --partitions: the order is always kept")
    if options.tokenizer.tokenizer_type.startswith("Bert") and options.sentences is None:
        notes.append("Are you sure you don't want to split sentences? (--split-sentences)")
    return notes


def _with_hyphens(word: str) -> str:
    """Return a flag with hyphens for underscores; both spellings are in use."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unescape(text: str | None) -> str | None:
    if text is None:
        return None
    return text.replace(r"\r", "\r").replace(r"\n", "\n").replace(r"\t", "\t")


def _unknown(word: str, parser: CommandParser) -> str:
    guess = closest_flag(word, parser)
    hint = f"; did you mean {guess}?" if guess else ""
    return f"unknown {'flag' if word.startswith('-') else 'word'} {word}{hint}"


def _positive_int(flag: str, text: str | None, violations: list[str]) -> int | None:
    """Return a positive integer, or None after adding a violation."""
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        violations.append(f"{flag} {text} is not an integer")
        return None
    if number < 1:
        violations.append(f"{flag} {text} is below 1")
        return None
    return number


class ConsoleProgress(ProgressListener):
    """Progress on the console: inputs and start-up on stdout; on stderr a bar, outside a terminal Megatron's lines."""

    def __init__(self, log_interval: int) -> None:
        self._interval, self._workers = log_interval, 1
        self._bar: Task | None = None  # None outside a terminal
        self._shown = ExitStack()
        self._next_line_at = _SECONDS_BETWEEN_LINES
        self._last_documents = 0

    def note(self, text: str) -> None:
        warn(f"note: {text}")

    def opening(self, path: str, about: str) -> None:
        print(f"Opening {path}", flush=True)
        print(f"  {about}", flush=True)

    def started(self, seconds: float, workers: int) -> None:
        print(f"Time to startup: {seconds}", flush=True)
        self._workers = workers

    def advanced(self, snapshot: ProgressSnapshot) -> None:
        if self._bar is None and in_terminal():  # not before the workers are forked: it has a thread
            total = None if snapshot.disk_total == UNKNOWN_SIZE else snapshot.disk_total
            before = snapshot.disk_before
            self._bar = self._shown.enter_context(task("encoding", total, "B", done=before))
        if self._bar is not None:
            self._bar.reach(snapshot.disk, self._speed(snapshot))
            return
        if snapshot.documents - self._last_documents >= self._interval and snapshot.seconds >= self._next_line_at:
            self._next_line_at = snapshot.seconds + _SECONDS_BETWEEN_LINES
            self._last_documents = snapshot.documents
            warn(f"{_progress_line(snapshot)} {_remaining(snapshot)}")

    def skipped(self, place: str, reason: str, count: int) -> None:
        if count <= _SHOWN_BAD_LINES:
            warn(f"left out: {place}: {reason}")
        elif count == _SHOWN_BAD_LINES + 1:
            warn("left out: more, listed in the file that the last lines name")

    def finished(self, snapshot: ProgressSnapshot) -> None:
        self.close()
        warn(_progress_line(snapshot))

    def close(self) -> None:
        """Remove the bar. Safe to call again."""
        self._shown.close()

    def _speed(self, snapshot: ProgressSnapshot) -> str:
        """Return the text that each of the workers encodes in a second, where there are several."""
        done = (snapshot.bytes - snapshot.bytes_before) / snapshot.seconds
        return f"{self._workers} x {short(done / self._workers)}B/s" if self._workers > 1 else ""


def summary(report: PreprocessReport) -> str:
    """Return the lines that report the written files, documents left out, and speed."""
    lines = [
        f"Wrote {prefix}.bin and .idx: {report.num_documents} documents, {report.num_tokens[key]} tokens"
        for key, prefix in report.prefixes.items()
    ]
    if report.num_skipped:
        lines.append(f"Left out {report.num_skipped} unreadable documents: {report.skipped_list}")
    speed = report.num_bytes / report.seconds / _MEGABYTE
    written = f"{speed:.1f} MB/s, {report.workers} processes"
    if report.num_new_tokens:
        written += f", {report.num_bytes / report.num_new_tokens:.2f} bytes of text per token"
    lines.append(f"{report.num_bytes} bytes in {report.seconds:.1f} s ({written})")
    return "\n".join(lines)


def _progress_line(snapshot: ProgressSnapshot) -> str:
    """Return Megatron's progress line; speeds count the work of this process only."""
    documents = snapshot.documents - snapshot.documents_before
    speed = (snapshot.bytes - snapshot.bytes_before) / snapshot.seconds / _MEGABYTE
    return f"Processed {snapshot.documents} documents ({documents / snapshot.seconds} docs/s, {speed} MB/s)."


def _remaining(snapshot: ProgressSnapshot) -> str:
    if snapshot.disk_total == UNKNOWN_SIZE:
        return f"{snapshot.disk} bytes read"
    done = snapshot.disk - snapshot.disk_before
    seconds = snapshot.seconds * (snapshot.disk_total - snapshot.disk) / max(1, done)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{snapshot.disk / max(1, snapshot.disk_total):.1%} done, {hours}:{minutes:02}:{rest:02} left"
