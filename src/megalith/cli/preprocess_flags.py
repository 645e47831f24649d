"""The flags of `megalith preprocess`: Megatron's, those of the further sources, and what is said of the others."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, NoReturn

from megalith.config.known import known_flags
from megalith.config.tokenizer_flags import add_tokenizer_flags
from megalith.config.values import local_name
from megalith.data.sources import END_OF_TEXT_SEPARATOR, FORMATS, Limits
from megalith.errors import ConfigError


@dataclass(frozen=True)
class OtherFlag:
    """A flag of Megatron that has no effect here, and why.

    Attributes:
        values: how many words follow it: "0", "1" or "+".
        reason: what to say when it is used.
        refused: whether it stops the command, because ignoring it would change what is done.
    """

    values: str
    reason: str
    refused: bool = False


def _as_in_training(name: str) -> OtherFlag:
    """A flag of the tokenizer that says the same here as in training, for the reason that is given there."""
    known = known_flags()[name]
    return OtherFlag(known.arity, known.why or known.refusal, refused=not known.why)


_OF_THE_TOKENIZER = (
    *("--trust-remote-code", "--tokenizer-metadata", "--tokenizer-sentencepiece-legacy", "--use-gigatoken"),
    *("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", "--tokenizer-hf-no-use-fast"),
)
_OF_THE_MODEL = "concerns the model; the data is the same for any value"
_MEASURE = "nothing to find: without --workers all cores work, and more processes than cores bring nothing"
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


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser() -> Parser:
    """The parser; numbers come out as words, so that all that is wrong with them is said at once."""
    parser = Parser(
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
    add_tokenizer_flags(parser)
    for name, flag in OTHER_FLAGS.items():
        nargs: dict[str, Any] = {"action": "store_true"} if flag.values == "0" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **(nargs or ({"nargs": "+"} if flag.values == "+" else {})))
    return parser


def _add_output(parser: Parser) -> None:
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


def _add_sources(parser: Parser) -> None:
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


def _add_sentences(parser: Parser) -> None:
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


def _add_course(parser: Parser) -> None:
    add = parser.add_argument_group("how it is done").add_argument
    add("--workers", metavar="N", help="processes, not more than the machine has cores (all); the output is the same")
    add("--bad-lines", default="stop", metavar="POLICY", help="stop (default) at the first, or skip and list them")
    add("--share", metavar="K/N", help="part of the input that this process takes, where no launcher says it")
    add("--restart", action="store_true", help="begin anew even where an unfinished run could be gone on with")
    add("--partitions", metavar="N", default="1", help="deal documents out as Megatron does, which changes their order")
    add("--keep-sequential-samples", action="store_true", help="partitions that keep the order of the documents")
    add("--log-interval", metavar="N", default="1000", help="documents between progress lines, one a second (1000)")
