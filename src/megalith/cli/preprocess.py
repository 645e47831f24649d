"""`megalith preprocess` and tools/preprocess_data.py: Megatron's command line for preparing data, and its output."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalith.cli.arguments import CommandParser, closest_flag
from megalith.config import TokenizerConfig
from megalith.config.known import known_flags
from megalith.config.tokenizer_flags import add_import_flag, add_tokenizer_flags, read_tokenizer_flags
from megalith.config.values import local_name
from megalith.data.encoding import SentenceSettings
from megalith.data.preprocess import PreprocessOptions, PreprocessReport, find_violations, preprocess
from megalith.data.preprocess_options import Progress, Standing
from megalith.data.shares import Share, read_share
from megalith.data.sources import END_OF_TEXT_SEPARATOR, FORMATS, Limits, SourceOptions
from megalith.errors import ConfigError
from megalith.train.streams import warn

_OF_THE_TOKENIZER = (
    *("--trust-remote-code", "--tokenizer-metadata", "--tokenizer-sentencepiece-legacy", "--use-gigatoken"),
    *("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", "--tokenizer-hf-no-use-fast"),
)
_OF_THE_MODEL = "concerns the model; the data is the same for any value"
_MEASURE = "nothing to find: without --workers all cores work, and more processes than cores bring nothing"
_NUMBERS = ("--workers", "--partitions", "--log-interval", "--max-document-bytes", "--max-expansion")
_OF_PUNKT = ("--keep-newlines", "--lang", "--punkt-parameters")
_MEGABYTE = 1024 * 1024
_SECONDS_BETWEEN_LINES = 1.0
_SHOWN_BAD_LINES = 10


@dataclass(frozen=True)
class OtherFlag:
    """A flag of Megatron that has no effect here, and why."""

    values: str  # how many words follow it: "0", "1" or "+"
    reason: str  # what to say when it is used
    refused: bool = False  # whether it stops the command, because ignoring it would change what is done


def _as_in_training(name: str) -> OtherFlag:
    """A flag of the tokenizer that says the same here as in training, for the reason that is given there."""
    known = known_flags()[name]
    return OtherFlag(known.arity, known.why or known.refusal, refused=not known.why)


OTHER_FLAGS = {
    "--dataset-impl": OtherFlag("1", "obsolete; datasets are always memory-mapped"),
    "--chunk-size": OtherFlag("1", "obsolete; the work is cut by size"),
    "--legacy-tokenizer": OtherFlag("0", "the tokenizers give the same ids with and without it"),
    "--make-vocab-size-divisible-by": OtherFlag("1", _OF_THE_MODEL),
    "--padded-vocab-size": OtherFlag("1", _OF_THE_MODEL),
    "--no-pad-vocab-size": OtherFlag("0", "concerns the model; the data is the same with and without it"),
    "--find-optimal-num-workers": OtherFlag("0", _MEASURE, refused=True),
    "--workers-to-check": OtherFlag("+", _MEASURE, refused=True),
    "--max-documents": OtherFlag("1", f"belongs to --find-optimal-num-workers; {_MEASURE}", refused=True),
    "--performance-dir": OtherFlag("1", f"belongs to --find-optimal-num-workers; {_MEASURE}", refused=True),
    **{name: _as_in_training(name) for name in _OF_THE_TOKENIZER},
}


def make_parser() -> CommandParser:
    """The parser; numbers come out as words, so that all that is wrong with them is said at once."""
    parser = CommandParser(
        prog="megalith preprocess",
        description="Turn text into tokens: PREFIX_text_document.bin and .idx. A run that was killed goes on where it "
        "was when the same command is given again. Under a launcher (RANK and WORLD_SIZE, a SLURM array) each process "
        "takes its share, and `megalith data merge --shares --output-prefix PREFIX` ends it.",
        allow_abbrev=False,
    )
    _add_output(parser)
    _add_sources(parser)
    _add_sentences(parser)
    _add_course(parser)
    add_import_flag(parser)
    add_tokenizer_flags(parser)
    for name, flag in OTHER_FLAGS.items():
        nargs: dict[str, Any] = {"action": "store_true"} if flag.values == "0" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **(nargs or ({"nargs": "+"} if flag.values == "+" else {})))
    return parser


def _add_output(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="files, folders and globs: jsonl, one JSON array, txt, csv, parquet, arrow, datasets of Hugging Face; "
        "also .gz, .xz, .zst, .bz2",
    )
    add("--output-prefix", type=local_name, metavar="PREFIX", help="beginning of the output paths")
    add("--json-keys", metavar="KEY", nargs="+", default=["text"], help="keys or columns, a dataset for each (text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")


def _add_sources(parser: CommandParser) -> None:
    add = parser.add_argument_group("what the input is (found out where it is not said)").add_argument
    add("--input-format", default="auto", metavar="FORMAT", help=f"auto, {', '.join(FORMATS)} (json is one array)")
    add("--encoding", default="auto", metavar="NAME", help="such as utf-8, gb18030, utf-16")
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"what separates the documents of a txt, \n is a line break; by default "
        f"{END_OF_TEXT_SEPARATOR} if the file has any, else blank lines",
    )
    add("--one-document-per-file", action="store_true", help="each txt is one document, blank lines included")
    add("--text-column", metavar="COLUMN", help="column of a table with the text, by name or by number from 1")
    add("--csv-header", default="auto", metavar="WHETHER", help="yes, no or auto: whether the first row names columns")
    add("--csv-delimiter", metavar="CHAR", help=r"between the cells of a csv; \t is a tabulator")
    add("--dataset-split", default="train", metavar="NAME", help="split of a dataset folder that has several (train)")
    add(
        "--max-document-bytes",
        metavar="N",
        default=str(Limits.max_document_bytes),
        help="longest line or document that is taken (64 MiB)",
    )
    add(
        "--max-expansion",
        metavar="N",
        default=str(Limits.max_expansion),
        help=f"how many times its size a compressed file may hold ({Limits.max_expansion})",
    )


def _add_sentences(parser: CommandParser) -> None:
    add = parser.add_argument_group("sentences (for BERT and T5)").add_argument
    add("--split-sentences", action="store_true", help="split documents into sentences: PREFIX_text_sentence")
    add(
        "--sentence-splitter",
        choices=("punkt", "marks"),
        help="punkt (default) is nltk's and needs its data of the language; marks goes by punctuation alone, for "
        "Chinese too, and needs nothing",
    )
    add("--keep-newlines", action="store_true", help="line breaks behind a sentence are part of it")
    add("--lang", metavar="LANGUAGE", help="language, as nltk names it (english)")
    add(
        "--punkt-parameters",
        metavar="FILE",
        help="what is known of the language: JSON, or a folder of nltk's punkt_tab; nltk's own place by default",
    )


def _add_course(parser: CommandParser) -> None:
    add = parser.add_argument_group("how it is done").add_argument
    add("--workers", metavar="N", help="processes, not more than the machine has cores (all); the output is the same")
    add("--bad-lines", default="stop", metavar="POLICY", help="stop (default) at the first, or skip and list them")
    add("--share", metavar="K/N", help="part of the input that this process takes, where no launcher says it")
    add("--restart", action="store_true", help="begin anew even where an unfinished run could be gone on with")
    add("--partitions", metavar="N", default="1", help="deal documents out as Megatron does, which changes their order")
    add("--keep-sequential-samples", action="store_true", help="partitions that keep the order of the documents")
    add("--log-interval", metavar="N", default="1000", help="documents between progress lines, one a second (1000)")


class CommandLine(NamedTuple):
    """A command line, understood."""

    options: PreprocessOptions
    log_interval: int
    notes: list[str]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None, *, files: bool = True) -> CommandLine:
    """Parse a command line; `environ` may hold the launcher's share and NLTK_DATA. Raise every violation at once."""
    environ = os.environ if environ is None else environ
    parser = make_parser()
    given, unknown = parser.parse_known_args([_hyphened(word) for word in argv])
    violations = [
        _unknown(word, parser) for word in unknown if word.startswith("--") or not unknown[0].startswith("--")
    ]
    notes: list[str] = []
    for name, flag in OTHER_FLAGS.items():
        value = getattr(given, _dest(name))
        if value not in (None, False):
            (violations if flag.refused else notes).append(f"{name}: {flag.reason}")
    numbers = {name: _number(name, getattr(given, _dest(name)), violations) for name in _NUMBERS}
    if given.bad_lines not in ("stop", "skip"):
        violations.append(f"--bad-lines {given.bad_lines}: known are stop and skip")
    violations += [f"{name} is missing" for name in ("--input", "--output-prefix") if not getattr(given, _dest(name))]
    tokenizer = TokenizerConfig(**read_tokenizer_flags(given, violations))
    options = PreprocessOptions(
        inputs=tuple(given.input or ()),
        output_prefix=given.output_prefix or "",
        tokenizer=tokenizer,
        source=_source(given, numbers),
        append_eod=given.append_eod,
        sentences=_sentences(given, environ, notes),
        workers=numbers["--workers"] or os.cpu_count() or 1,
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
    """Preprocess as the command line says."""
    if not argv or "-h" in argv or "--help" in argv:
        print(make_parser().format_help(), end="")
        return 0
    command = parse(argv)
    progress = ConsoleProgress(command.log_interval)
    for note in command.notes:
        progress.note(note)
    report = preprocess(command.options, progress)
    print(summary(report))
    share = command.options.share
    if share.count > 1:
        print(
            f"This was share {share.number + 1} of {share.count}. When all are there: "
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
        document_separator=_unescaped(given.document_separator),
        one_document_per_file=given.one_document_per_file,
        text_column=given.text_column,
        csv_header=given.csv_header,
        csv_delimiter=_unescaped(given.csv_delimiter),
        dataset_split=given.dataset_split,
        limits=limits,
    )


def _sentences(given: argparse.Namespace, environ: Mapping[str, str], notes: list[str]) -> SentenceSettings | None:
    if given.split_sentences:
        folders = tuple(filter(None, environ.get("NLTK_DATA", "").split(os.pathsep)))
        by_marks = given.sentence_splitter == "marks"
        if by_marks:
            _note_idle(given, _OF_PUNKT, "with --sentence-splitter marks", notes)
        language = given.lang or "english"
        return SentenceSettings(language, given.keep_newlines, given.punkt_parameters, folders, by_marks)
    _note_idle(given, ("--sentence-splitter", *_OF_PUNKT), "without --split-sentences", notes)
    return None


def _note_idle(given: argparse.Namespace, flags: Sequence[str], why: str, notes: list[str]) -> None:
    notes += [f"{name}: has no effect {why}" for name in flags if getattr(given, _dest(name))]


def _share(text: str | None, environ: Mapping[str, str], violations: list[str]) -> Share:
    try:
        return read_share(text, environ)
    except ConfigError as error:
        violations += error.violations
        return Share()


def _notes(options: PreprocessOptions, given: argparse.Namespace) -> list[str]:
    notes = []
    if options.share.count > 1:
        notes.append(
            f"share {options.share.number + 1} of {options.share.count} of the input ({options.share.reason}); "
            "--share 1/1 takes all of it"
        )
    if options.partitions > 1:
        kept = "" if options.keep_sequential else ", and the order of the documents becomes that of the partitions"
        notes.append(
            f"--partitions {options.partitions}: nothing is faster by it here{kept}; the files of the partitions "
            f"({options.output_prefix}_0_... and on) stay, as with Megatron, and can be removed"
        )
    elif options.keep_sequential:
        notes.append("--keep-sequential-samples: the order of the input is always kept without --partitions")
    if options.tokenizer.tokenizer_type.startswith("Bert") and options.sentences is None:
        notes.append("Are you sure you don't want to split sentences? (--split-sentences)")
    return notes


def _hyphened(word: str) -> str:
    """A flag with its underscores as hyphens; both spellings are in use."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unescaped(text: str | None) -> str | None:
    if text is None:
        return None
    return text.replace(r"\r", "\r").replace(r"\n", "\n").replace(r"\t", "\t")


def _unknown(word: str, parser: CommandParser) -> str:
    guess = closest_flag(word, parser)
    hint = f"; did you mean {guess}?" if guess else ""
    return f"unknown {'flag' if word.startswith('-') else 'word'} {word}{hint}"


def _number(flag: str, text: str | None, violations: list[str]) -> int | None:
    """A whole number above zero; None, with a violation where there is something else."""
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        violations.append(f"{flag} {text} is not a whole number")
        return None
    if number < 1:
        violations.append(f"{flag} {text} is below 1")
        return None
    return number


class ConsoleProgress(Progress):
    """Opening and start-up on the standard output, progress on the standard error."""

    def __init__(self, log_interval: int) -> None:
        self._interval = log_interval
        self._next_line_at = _SECONDS_BETWEEN_LINES
        self._last_documents = 0

    def note(self, text: str) -> None:
        warn(f"note: {text}")

    def opening(self, path: str, about: str) -> None:
        print(f"Opening {path}", flush=True)
        print(f"  {about}", flush=True)

    def started(self, seconds: float, workers: int) -> None:
        print(f"Time to startup: {seconds}", flush=True)

    def advanced(self, standing: Standing) -> None:
        if standing.documents - self._last_documents >= self._interval and standing.seconds >= self._next_line_at:
            self._next_line_at = standing.seconds + _SECONDS_BETWEEN_LINES
            self._last_documents = standing.documents
            warn(f"{_processed(standing)} {_left(standing)}")

    def skipped(self, place: str, reason: str, count: int) -> None:
        if count <= _SHOWN_BAD_LINES:
            warn(f"left out: {place}: {reason}")
        elif count == _SHOWN_BAD_LINES + 1:
            warn("left out: more, which are listed in the file named at the end")

    def finished(self, standing: Standing) -> None:
        warn(_processed(standing))


def summary(report: PreprocessReport) -> str:
    lines = [
        f"Wrote {prefix}.bin and .idx: {report.num_documents} documents, {report.num_tokens[key]} tokens"
        for key, prefix in report.prefixes.items()
    ]
    if report.num_skipped:
        lines.append(f"Left out {report.num_skipped} documents that cannot be read: {report.skipped_list}")
    speed = report.num_bytes / report.seconds / _MEGABYTE
    written = f"{speed:.1f} MB/s, {report.workers} processes"
    if report.num_new_tokens:
        written += f", {report.num_bytes / report.num_new_tokens:.2f} bytes of text a token"
    lines.append(f"{report.num_bytes} bytes in {report.seconds:.1f} s ({written})")
    return "\n".join(lines)


def _processed(standing: Standing) -> str:
    """Megatron's line; the speeds are those of this run."""
    documents = standing.documents - standing.documents_before
    speed = (standing.bytes - standing.bytes_before) / standing.seconds / _MEGABYTE
    return f"Processed {standing.documents} documents ({documents / standing.seconds} docs/s, {speed} MB/s)."


def _left(standing: Standing) -> str:
    done = standing.disk - standing.disk_before
    seconds = standing.seconds * (standing.disk_total - standing.disk) / max(1, done)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{standing.disk / max(1, standing.disk_total):.1%} done, {hours}:{minutes:02}:{rest:02} left"
