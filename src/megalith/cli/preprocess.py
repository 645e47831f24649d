"""`megalith preprocess` and tools/preprocess_data.py: Megatron's flags, one line for what does not apply here."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from megalith.config import TokenizerConfig
from megalith.data.encoding import EncodeSettings
from megalith.data.preprocess import PreprocessOptions, PreprocessReport, find_violations, preprocess
from megalith.data.sources import END_OF_TEXT_SEPARATOR, TXT
from megalith.errors import ConfigError

_MEGABYTE = 1024 * 1024
_SECONDS_BETWEEN_LINES = 1.0
_COMPLETE = "needs the complete data path, not in this version"


@dataclass(frozen=True)
class _Flag:
    """A flag of Megatron that has no effect here, and why.

    Attributes:
        values: how many words follow it: "0", "1" or "+".
        reason: what to say when it is used.
        refused: whether it stops the command, because ignoring it would change the result.
    """

    values: str
    reason: str
    refused: bool = False


_OTHER_FLAGS = {
    "--dataset-impl": _Flag("1", "obsolete; datasets are always memory-mapped"),
    "--chunk-size": _Flag("1", "obsolete; the work is cut by size"),
    "--legacy-tokenizer": _Flag("0", "the tokenizers give the same ids with and without it"),
    "--make-vocab-size-divisible-by": _Flag("1", "concerns the model; the data is the same for any value"),
    "--keep-sequential-samples": _Flag("0", "the order of the input is always kept"),
    "--keep-newlines": _Flag("0", "has no effect without --split-sentences"),
    "--lang": _Flag("1", "has no effect without --split-sentences"),
    "--split-sentences": _Flag("0", _COMPLETE, refused=True),
    "--vocab-extra-ids": _Flag("1", _COMPLETE, refused=True),
    "--find-optimal-num-workers": _Flag("0", _COMPLETE, refused=True),
    "--workers-to-check": _Flag("+", _COMPLETE, refused=True),
    "--max-documents": _Flag("1", _COMPLETE, refused=True),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="megalith preprocess",
        description="Turn a text file into tokens: PREFIX_text_document.bin and .idx.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", metavar="FILE", help="one JSON object per line (.jsonl, .json), or plain text (.txt); UTF-8")
    add("--output-prefix", metavar="PREFIX", help="beginning of the output paths")
    add("--json-keys", metavar="KEY", nargs="+", default=["text"], help="keys to take, a dataset for each (text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", metavar="N", help="processes, not more than the machine has cores (all); the output is the same")
    add("--log-interval", metavar="N", default="1000", help="documents between progress lines (1000)")
    add(
        "--tokenizer-type",
        metavar="TYPE",
        default="GPT2BPETokenizer",
        help="GPT2BPETokenizer (default), HuggingFaceTokenizer, NullTokenizer",
    )
    add("--vocab-file", metavar="FILE", help="vocab.json of the GPT2BPETokenizer")
    add("--merge-file", metavar="FILE", help="merges.txt of the GPT2BPETokenizer")
    add("--tokenizer-model", metavar="DIR", help="folder of the HuggingFaceTokenizer, with its tokenizer.json")
    add("--vocab-size", metavar="N", help="number of ids of the NullTokenizer")
    add("--partitions", metavar="N", default="1", help="only 1 in this version")
    add("--input-format", default="auto", help="jsonl, txt, or auto: by the ending of the file name (default)")
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"what separates the documents of a txt, \n is a line break; by default "
        f"{END_OF_TEXT_SEPARATOR} if the file has any, else blank lines",
    )
    add("--max-document-bytes", metavar="N", default=str(1 << 26), help="longest line or document taken (64 MiB)")
    for name, flag in _OTHER_FLAGS.items():
        nargs: dict[str, Any] = {"action": "store_true"} if flag.values == "0" else {}
        add(name, help=argparse.SUPPRESS, **(nargs or ({"nargs": "+"} if flag.values == "+" else {})))
    return parser


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


def parse(argv: Sequence[str]) -> CommandLine:
    """Understand a command line.

    Raises:  ConfigError with everything that is wrong with it.
    """
    parser = _parser()
    given, unknown = parser.parse_known_args([_hyphened(word) for word in argv])
    violations = [
        _unknown(word, parser) for word in unknown if word.startswith("--") or not unknown[0].startswith("--")
    ]
    notes: list[str] = []
    for name, flag in _OTHER_FLAGS.items():
        value = getattr(given, _dest(name))
        if value not in (None, False):
            (violations if flag.refused else notes).append(f"{name}: {flag.reason}")
    numbers = {
        name: _number(name, getattr(given, _dest(name)), violations)
        for name in ("--workers", "--vocab-size", "--partitions", "--log-interval", "--max-document-bytes")
    }
    if numbers["--partitions"] not in (None, 1):
        violations.append(f"--partitions {given.partitions}: {_COMPLETE}; --workers alone uses all cores")
    violations += [f"{name} is missing" for name in ("--input", "--output-prefix") if not getattr(given, _dest(name))]
    options = PreprocessOptions(
        input=given.input or "",
        output_prefix=given.output_prefix or "",
        tokenizer=TokenizerConfig(
            tokenizer_type=given.tokenizer_type,
            vocab_file=given.vocab_file,
            merge_file=given.merge_file,
            tokenizer_model=given.tokenizer_model,
            vocab_size=numbers["--vocab-size"],
        ),
        json_keys=tuple(given.json_keys),
        append_eod=given.append_eod,
        workers=numbers["--workers"] or os.cpu_count() or 1,
        input_format=given.input_format,
        document_separator=_unescaped(given.document_separator),
        max_document_bytes=numbers["--max-document-bytes"] or PreprocessOptions.max_document_bytes,
    )
    violations += find_violations(options)
    if violations:
        raise ConfigError(violations)
    assert numbers["--log-interval"] is not None
    return CommandLine(options, numbers["--log-interval"], notes)


def _hyphened(word: str) -> str:
    """A flag with its underscores as hyphens; both spellings are in use."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unescaped(separator: str | None) -> str | None:
    if separator is None:
        return None
    return separator.replace(r"\r", "\r").replace(r"\n", "\n").replace(r"\t", "\t")


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
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


class ConsoleProgress:
    """Megatron's lines: opening and start-up on the standard output, progress on the standard error."""

    def __init__(self, log_interval: int) -> None:
        self._interval = log_interval
        self._next_line_at = _SECONDS_BETWEEN_LINES
        self._last_documents = 0

    def opening(self, path: str) -> None:
        print(f"Opening {path}", flush=True)

    def started(self, seconds: float, settings: EncodeSettings, workers: int) -> None:
        if settings.input_format == TXT:
            how = "the whole file is one" if settings.separator is None else f"separated by {settings.separator!r}"
            print(f"Documents: {how}")
        print(f"Time to startup: {seconds}", flush=True)

    def advanced(self, documents: int, bytes_done: int, bytes_total: int, seconds: float) -> None:
        if documents - self._last_documents >= self._interval and seconds >= self._next_line_at:
            self._next_line_at = seconds + _SECONDS_BETWEEN_LINES
            self._last_documents = documents
            self.finished(documents, bytes_done, seconds)

    def finished(self, documents: int, bytes_done: int, seconds: float) -> None:
        speed = bytes_done / seconds / _MEGABYTE
        print(
            f"Processed {documents} documents ({documents / seconds} docs/s, {speed} MB/s).",
            file=sys.stderr,
            flush=True,
        )


def run(argv: Sequence[str]) -> int:
    """Preprocess as the command line says; returns the exit code.

    Raises:  ConfigError, DataError or MegalithError, which `megalith.cli.main` prints.
    """
    if not argv or "-h" in argv or "--help" in argv:
        print(_parser().format_help(), end="")
        return 0
    command = parse(argv)
    for note in command.notes:
        print(f"note: {note}", file=sys.stderr)
    report = preprocess(command.options, ConsoleProgress(command.log_interval))
    print(_summary(report))
    return 0


def _summary(report: PreprocessReport) -> str:
    speed = report.num_bytes / report.seconds / _MEGABYTE
    lines = [
        f"Wrote {prefix}.bin and .idx: {report.num_documents} documents, {report.num_tokens[key]} tokens"
        for key, prefix in report.prefixes.items()
    ]
    lines.append(f"{report.num_bytes} bytes in {report.seconds:.1f} s ({speed:.1f} MB/s, {report.workers} processes)")
    return "\n".join(lines)
