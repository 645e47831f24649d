"""`megalith data COMMAND`: looking at datasets, checking them and putting them together.

Each sub-command is a module with `add_arguments(commands)`, which declares it, and `run(options)`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import NoReturn

from megalith.errors import ConfigError

_MODULES = ("data_inspect", "data_verify", "data_merge")


def run(argv: Sequence[str]) -> int:
    """Run the command; 3 if a dataset is damaged.

    Raises:
        ConfigError: the arguments cannot work.
        DataError: a dataset is missing or damaged.
    """
    options = make_parser().parse_args(argv)
    exit_code: int = options.run(options)
    return exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    parser = _Parser(
        prog="megalith data", description="Inspect, verify and merge .bin/.idx datasets; make them with preprocess."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _MODULES:
        importlib.import_module(f"megalith.cli.{name}").add_arguments(commands)
    return parser
