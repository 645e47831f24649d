"""`megalith data merge` and tools/merge_datasets.py: several datasets as one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalith.config.values import local_name, local_path
from megalith.errors import ConfigError


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    parser = commands.add_parser(
        "merge",
        help="put datasets together",
        description="Put datasets together: those of a folder in the order of their names, those named in the order "
        "given, or the shares that several machines made of one command.",
    )
    parser.add_argument(
        "prefixes", nargs="*", type=local_name, metavar="PREFIX", help="datasets, without .bin and .idx"
    )
    parser.add_argument("--input", type=local_path, metavar="DIR", help="a folder: all datasets in it")
    parser.add_argument(
        "--output-prefix", type=local_name, required=True, metavar="PREFIX", help="of the whole, without .bin and .idx"
    )
    parser.add_argument(
        "--shares", action="store_true", help="the shares of this output prefix, as `megalith preprocess` made them"
    )
    parser.add_argument("--remove", action="store_true", help="remove the shares when they are put together")
    parser.add_argument("--multimodal", action="store_true", help="the indices end with modes")
    parser.set_defaults(run=run)


def check(options: argparse.Namespace) -> None:
    """Check the flags, without a look at the files.

    Raises:
        ConfigError: not exactly one of the ways to name the parts is used, or --remove with parts that are named.
    """
    ways = [bool(options.prefixes), options.input is not None, options.shares]
    if sum(ways) != 1:
        raise ConfigError("name the parts in one way: PREFIX ..., or --input DIR, or --shares")
    if options.remove and not options.shares:
        raise ConfigError("--remove is for --shares; parts that you name stay")


def run(options: argparse.Namespace) -> int:
    """Merge.

    Raises:
        ConfigError: not exactly one of the ways to name the parts is used, or parts are missing.
        DataError: a part is damaged or does not fit the others.
    """
    from megalith.data.merge import merge, pairs_in
    from megalith.data.shares import find_shares

    check(options)
    if options.shares:
        wanted = find_shares(options.output_prefix)
    else:
        wanted = {options.output_prefix: options.prefixes or pairs_in(options.input)}
    for output_prefix, prefixes in wanted.items():
        merged = merge(
            prefixes,
            output_prefix,
            multimodal=options.multimodal,
            advanced=lambda prefix: print(f"adding {prefix}", flush=True),
        )
        print(f"Wrote {merged.prefix}.bin and .idx: {merged.num_documents} documents, {merged.num_tokens} tokens")
        if options.remove:
            for prefix in prefixes:
                for ending in (".idx", ".bin", ".card"):
                    Path(prefix + ending).unlink(missing_ok=True)
    return 0
