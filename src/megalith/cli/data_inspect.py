"""`megalith data inspect PREFIX`: counts, lengths, the card of the tokenizer, and documents as text."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from megalith.config.tokenizer_flags import add_tokenizer_flags, tokenizer_of_flags
from megalith.config.values import local_name

if TYPE_CHECKING:
    from megalith.data.indexed import IndexedDataset
    from megalith.data.survey import Survey
    from megalith.tokenizers import Tokenizer

_BAR = 40
_SHOWN_TOKENS = 200


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    parser = commands.add_parser("inspect", help="counts, lengths, tokenizer card and documents of a dataset")
    parser.add_argument("prefix", type=local_name, metavar="PREFIX", help="of the dataset, without .bin and .idx")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="documents to show (3)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="the first of them, from 0")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_tokenizer_flags(parser, about="to show documents as text instead of ids")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Inspect.

    Raises:
        ConfigError: the tokenizer flags are wrong.
        DataError: the dataset is missing or damaged, or was made with another tokenizer.
    """
    from megalith.data.indexed import IndexedDataset
    from megalith.data.survey import survey
    from megalith.tokenizers import build_tokenizer
    from megalith.tokenizers.card import read_card, require_tokenizer_of_data

    dataset = IndexedDataset(options.prefix, mmap_bin=False)
    config = tokenizer_of_flags(options)
    tokenizer = None if config is None else build_tokenizer(config)
    if tokenizer is not None:
        note = require_tokenizer_of_data(options.prefix, tokenizer.card())
        if note:
            print(f"note: {note}")
    found, card = survey(dataset), read_card(options.prefix)
    if options.json:
        print(json.dumps(_record(dataset, found, card)))
        return 0
    _print_counts(dataset, found)
    print("tokenizer " + (json.dumps(card) if card else "unknown: there is no .card beside the files"))
    for number in range(options.first, min(options.first + options.documents, found.documents)):
        _print_document(dataset, number, tokenizer)
    return 0


def _record(dataset: IndexedDataset, found: Survey, card: dict[str, Any] | None) -> dict[str, Any]:
    histogram = [[part.low, part.high, part.documents, part.tokens] for part in found.histogram]
    return {
        "prefix": dataset.prefix,
        "dtype": dataset.dtype.name,
        "documents": found.documents,
        "empty_documents": found.empty,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "shortest": found.shortest,
        "longest": found.longest,
        "lengths": histogram,
        "tokenizer": card,
    }


def _print_counts(dataset: IndexedDataset, found: Survey) -> None:
    print(dataset.prefix)
    print(f"documents {found.documents:,} ({found.empty:,} of them empty)")
    print(f"sequences {found.sequences:,}")
    print(f"tokens    {found.tokens:,} as {dataset.dtype.name} ({found.tokens * dataset.dtype.itemsize:,} bytes)")
    filled = found.documents - found.empty
    if not filled:
        return
    print(f"lengths   {found.shortest:,} to {found.longest:,} tokens, {found.tokens / filled:,.1f} on average")
    most = max(part.documents for part in found.histogram)
    for part in found.histogram:
        bar = "#" * max(1, round(_BAR * part.documents / most))
        print(f"  {part.low:>9,} to {part.high:>9,}  {part.documents:>11,}  {part.tokens / found.tokens:6.1%}  {bar}")
    print("  (tokens of a document, documents, their part of all tokens)")


def _print_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> None:
    first, last = (int(entry) for entry in dataset.document_index[number : number + 2])
    ids: list[int] = []
    length = int(dataset.lengths[first:last].sum(dtype="int64"))
    for sequence in range(first, last):
        ids += dataset.get(sequence, 0, min(int(dataset.lengths[sequence]), _SHOWN_TOKENS - len(ids))).tolist()
        if len(ids) >= _SHOWN_TOKENS:
            break
    sentences = f", {last - first} sequences" if last - first > 1 else ""
    more = f" ... {length - len(ids):,} tokens more" if length > len(ids) else ""
    shown = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.decode(ids))
    print(f"document {number}: {length:,} tokens{sentences}\n  {shown}{more}")
