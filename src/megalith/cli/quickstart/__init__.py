"""`megalith quickstart`: from the text on this machine to a trained model that was killed, resumed and sampled."""

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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megalith quickstart",
        description=(
            "Train a GPT on text of this machine, end to end: tokenizer, preprocessing, training that is killed "
            "half-way and resumed, evaluation, generated text, and the loss curve."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        type=local_path,
        metavar="FILE",
        help="train on these .jsonl or .txt files (also .gz, .xz, ...) instead of Python's standard library",
    )
    add("--json-key", default="text", help="field of a JSON line that holds the text (%(default)s)")
    add("--encoding", default="auto", help="of these files, such as gb18030; detected by default")
    add("--minutes", type=float, default=3.0, help="time to train for (%(default)s)")
    add("--out", type=local_path, default=Path("quickstart"), help="folder for all output (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on")
    add("--prompt", help="text to continue at the end (by default one that fits the data)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the quickstart; its own errors and those of the commands it runs end it."""
    options = build_parser().parse_args(argv)
    if not 0.0 < options.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {options.minutes:g} is not between 0 and 1440 (a day)")
    wait_asleep()  # before torch is imported

    from megalith.assemble.model import choose_device
    from megalith.cli.quickstart.story import Quickstart

    choose_device(options.device)  # refused before the output of an earlier quickstart is removed
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the training is stopped, too
    Quickstart(options).run()
    return 0
