"""`megalith data verify PREFIX ...`: whether the two files of a dataset can be true, field by field."""

from __future__ import annotations

import argparse
from typing import Any

from megalith.errors import DataError


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    parser = commands.add_parser(
        "verify",
        help="check the structure of datasets, and their tokens against the vocabulary",
        description="Check every field of the index, the size of the tokens' file and, where the dataset has a card or "
        "--vocab-size is given, every token. Memory stays small whatever the files claim.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="datasets, without .bin and .idx")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids are below it; that of the card by default")
    parser.add_argument("--structure-only", action="store_true", help="do not read the tokens")
    parser.add_argument("--multimodal", action="store_true", help="the indices end with modes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify; returns 3 if one is damaged."""
    sound = [_verify(prefix, options) for prefix in options.prefixes]
    return 0 if all(sound) else DataError.exit_code


def _verify(prefix: str, options: argparse.Namespace) -> bool:
    from megalith.data.indexed import IndexedDataset
    from megalith.data.survey import documents_without_end, verify_tokens
    from megalith.tokenizers.card import read_card

    try:
        dataset = IndexedDataset(prefix, multimodal=options.multimodal, mmap_bin=False)
        card = read_card(prefix)
        size = options.vocab_size or (card or {}).get("vocab_size")
        said = ["structure sound"]
        if options.structure_only or dataset.dtype.kind not in "iu":
            said.append("tokens not read")
        elif not isinstance(size, int):
            said.append("tokens not compared: no card, and no --vocab-size")
        else:
            largest = verify_tokens(dataset, size)
            said.append(f"largest id {largest} of {size}" if largest >= 0 else "no token")
            eod = (card or {}).get("special", {}).get("eod")
            if isinstance(eod, int):
                missing = documents_without_end(dataset, eod)
                filled = dataset.num_documents - _empty(dataset)
                said.append(f"{filled - missing} of {filled} documents end with {eod} (end of document)")
    except DataError as error:
        print(f"damaged  {error}")
        return False
    print(f"sound    {prefix}: {dataset.num_documents} documents, {dataset.num_tokens} tokens; {'; '.join(said)}")
    return True


def _empty(dataset: Any) -> int:
    entries = dataset.document_index
    return int((entries[1:] == entries[:-1]).sum())
