"""`megalith checkpoint convert SRC DST`: any format and layout into another, without a model in memory."""

from __future__ import annotations

import argparse
from typing import Any

from megalith.config.values import local_path


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another format, layout or precision",
        description="Reads a checkpoint of any format and writes it in another format, layout or precision, one tensor "
        "at a time. The source is not changed.",
    )
    convert.add_argument("source", type=local_path, metavar="SRC", help="a save folder, or one checkpoint folder")
    convert.add_argument("destination", type=local_path, metavar="DST", help="the save folder to put the result into")
    convert.add_argument("--format", default="torch_dist", metavar="F", help="torch_dist (default) or torch")
    convert.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size; by default that of SRC")
    convert.add_argument("--pp", type=int, metavar="N", help="pipeline-parallel size; by default that of SRC")
    convert.add_argument("--ep", type=int, metavar="N", help="expert-parallel size; by default that of SRC")
    convert.add_argument("--no-optim", action="store_true", help="leave the optimizer and the random states out")
    convert.add_argument("--dtype", metavar="D", help="of the weights: float32, bfloat16 or float16")
    convert.add_argument("--iteration", type=int, metavar="N", help="of a save folder, this checkpoint")
    convert.add_argument(
        "--true-vocab-size",
        type=int,
        metavar="N",
        help="tokens of the vocabulary, which are padded for --tp; by default those of SRC's tokenizer",
    )
    convert.add_argument("--release", action="store_true", help="write weights to begin from, without an iteration")
    convert.add_argument(
        "--upcycle",
        type=int,
        metavar="N",
        help="make a mixture of N experts of a dense model, each a copy; weights only",
    )
    convert.add_argument(
        "--moe-router-topk", type=int, default=2, metavar="K", help="of --upcycle: experts for each token (2)"
    )
    convert.add_argument("--replace", action="store_true", help="replace a checkpoint of DST with the same iteration")
    convert.add_argument("--no-verify", action="store_true", help="do not compare SRC with its hashes first")
    convert.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was made.

    Raises:
        CheckpointError: SRC is missing or damaged, or DST cannot be written.
        ConfigError, LayoutError: what is asked cannot be.
    """
    from megalith.checkpoint.convert import Wanted, convert
    from megalith.checkpoint.upcycled import Upcycling
    from megalith.train.streams import warn

    upcycling = None if options.upcycle is None else Upcycling(options.upcycle, options.moe_router_topk)
    wanted = Wanted(
        format=options.format,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        optimizer=not (options.no_optim or options.release or upcycling),
        dtype=options.dtype,
        true_vocab_size=options.true_vocab_size,
        release=options.release or upcycling is not None,
        replace=options.replace,
        upcycling=upcycling,
    )
    made = convert(
        options.source, options.destination, wanted, iteration=options.iteration, verify=not options.no_verify
    )
    for note in made.notes:
        warn(f"note: {note}")
    print(f"{made.path}: {made.bytes / 2**20:.1f} MiB in {made.seconds:.1f} s")
    return 0
