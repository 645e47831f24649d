"""`megalith quickstart`: from the text on this machine to a trained model that was killed, resumed and sampled.

It runs the other commands as a user would, each a process of its own, and keeps their lines in `commands.sh`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from megalith.cli.threads import wait_asleep
from megalith.config.values import local_path
from megalith.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "--data",
        nargs="+",
        type=local_path,
        metavar="FILE",
        help="train on these .jsonl or .txt files (also .gz, .xz, ...) instead of Python's standard library",
    )
    parser.add_argument("--json-key", default="text", help="field of a JSON line that holds the text (%(default)s)")
    parser.add_argument(
        "--encoding", default="auto", help="of these files, such as gb18030; by default it is found out"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="time to train for (%(default)s)")
    parser.add_argument(
        "--out", type=local_path, default=Path("quickstart"), help="folder for all output (%(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on")
    parser.add_argument("--prompt", help="text to continue at the end (by default one that fits the data)")


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of `megalith quickstart`."""
    parser = argparse.ArgumentParser(
        prog="megalith quickstart",
        description=(
            "Train a GPT on text of this machine, end to end: tokenizer, preprocessing, training that is killed "
            "half-way and resumed, evaluation, generated text, and the loss curve."
        ),
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the quickstart; its own errors and those of the commands it runs end it."""
    arguments = build_parser().parse_args(argv)
    if not 0.0 < arguments.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {arguments.minutes:g} is not between 0 and 1440 (a day)")

    from megalith.assemble.model import choose_device
    from megalith.cli.quickstart.story import Quickstart, Wishes  # rich is not needed for --help

    choose_device(arguments.device)  # refused before the output of an earlier quickstart is removed

    wait_asleep()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the training is stopped, too
    Quickstart(
        Wishes(
            files=tuple(arguments.data or ()),
            json_key=arguments.json_key,
            encoding=arguments.encoding,
            seconds=arguments.minutes * 60.0,
            out=arguments.out,
            prompt=arguments.prompt,
            device=arguments.device,
        )
    ).run()
    return 0
