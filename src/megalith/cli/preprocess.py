"""`megalith preprocess` and tools/preprocess_data.py: Megatron's command line for preparing data."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megalith.cli.preprocess_flags import OTHER_FLAGS, Parser, make_parser
from megalith.cli.preprocess_screen import ConsoleProgress, summary
from megalith.config import TokenizerConfig
from megalith.config.tokenizer_flags import read_tokenizer_flags
from megalith.data.encoding import SentenceSettings
from megalith.data.preprocess import PreprocessOptions, find_violations, preprocess
from megalith.data.shares import Share, read_share
from megalith.data.sources import Limits, SourceOptions
from megalith.errors import ConfigError

_NUMBERS = ("--workers", "--partitions", "--log-interval", "--max-document-bytes", "--max-expansion")


class CommandLine(NamedTuple):
    """A command line, understood.

    Attributes:
        options: what to do.
        log_interval: documents between progress lines.
        notes: one line for each flag that has no effect.
    """

    options: PreprocessOptions
    log_interval: int
    notes: list[str]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None, *, files: bool = True) -> CommandLine:
    """Understand a command line.

    Args:
        argv: its words.
        environ: the environment, where a launcher tells the share, and NLTK_DATA where nltk's data are.
        files: whether files and folders are checked.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
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
    """Preprocess as the command line says; returns the exit code.

    Raises:  ConfigError, DataError or MegalithError, which `megalith.cli.main` prints.
    """
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


_OF_PUNKT = ("--keep-newlines", "--lang", "--punkt-parameters")


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


def _unknown(word: str, parser: Parser) -> str:
    flags = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    guesses = difflib.get_close_matches(word.split("=")[0], flags, n=1)
    hint = f"; did you mean {guesses[0]}?" if guesses else ""
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
