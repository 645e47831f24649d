"""`megalith checkpoint COMMAND`: looking at checkpoints, comparing and converting them.

Each sub-command is a module with `add_arguments(commands)`, which declares it, and `run(options)`; the ones that read
checkpoints take those of any format: a save folder, one checkpoint folder in it, or a Hugging Face model folder.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from importlib.util import find_spec

_MODULES = (
    "checkpoint_verify",
    "checkpoint_inspect",
    "checkpoint_diff",
    "checkpoint_convert",
    "checkpoint_huggingface",
)
_TOOLS_OF_MEGATRON = ("checkpoint_util.py", "convert.py")
"""The words by which the forwarders in `tools/` ask for Megatron's command lines."""


def run(argv: Sequence[str]) -> int:
    """Run the command; 1 if two checkpoints differ, 4 if one is damaged.

    Raises:
        CheckpointError: there is no checkpoint at the given place, or it cannot be read or written.
    """
    if argv and argv[0] in _TOOLS_OF_MEGATRON:
        from megalith.compat.megatron.convert import run_tool

        return run_tool(argv[0], argv[1:])
    parser = argparse.ArgumentParser(
        prog="megalith checkpoint", description="Verify, inspect, compare and convert checkpoints of any format."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _MODULES:
        if find_spec(f"megalith.cli.{name}"):
            importlib.import_module(f"megalith.cli.{name}").add_arguments(commands)
    options = parser.parse_args(argv)
    exit_code: int = options.run(options)
    return exit_code
