"""`megalith data verify PREFIX ...`: check the two files of a dataset field by field, and its index caches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalith.config.values import local_name, local_path
from megalith.errors import DataError


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    parser = commands.add_parser(
        "verify",
        help="check the structure of datasets, their tokens against the vocabulary, and their index caches",
        description="Check every field of the index, the size of the tokens' file, the checksums of the index caches "
        "and, where the dataset has a card or --vocab-size is given, every token. Memory stays small whatever the "
        "files claim.",
    )
    parser.add_argument(
        "prefixes", nargs="+", type=local_name, metavar="PREFIX", help="datasets, without .bin and .idx"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids are below it; that of the card by default")
    parser.add_argument("--structure-only", action="store_true", help="do not read the tokens")
    parser.add_argument(
        "--data-cache-path",
        type=local_path,
        metavar="DIR",
        help="check the index caches of this folder too; default: beside the data",
    )
    parser.add_argument("--multimodal", action="store_true", help="the indices end with modes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify; returns 3 if one is damaged."""
    sound = [_verify(prefix, options) for prefix in options.prefixes]
    folders = [folder for prefix in options.prefixes for folder in sorted(Path(prefix, "cache").glob("*_indices"))]
    if options.data_cache_path is not None:
        folders.append(options.data_cache_path)
    sound += [_verify_caches(folder) for folder in folders]
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


def _verify_caches(folder: Path) -> bool:
    """Whether no index cache of a folder is damaged."""
    from megalith.data.index_cache import verify_caches

    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "no such folder")
        found = verify_caches(folder)
    except OSError as error:
        print(f"damaged  {folder}: {error.strerror}")
        return False
    for path in found.damaged:
        what = "differs from its checksum" if path.exists() else "is missing"
        print(f"damaged  {path}: {what}; the next run that reads it builds it again")
    without = f"; {found.without_checksums} have no checksums, the next run that reads them checks them"
    more = without if found.without_checksums else ""
    print(f"{'damaged' if found.damaged else 'sound  '}  {folder}: {found.intact} index caches intact{more}")
    return not found.damaged


def _empty(dataset: Any) -> int:
    entries = dataset.document_index
    return int((entries[1:] == entries[:-1]).sum())
