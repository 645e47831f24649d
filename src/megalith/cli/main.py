"""The `megalith` command: dispatch to a command, and map errors to messages and exit codes.

Only the module of the requested command is imported, so that help and configuration errors appear at once.
 Each command is a module of this folder with `run(argv) -> int`, argv without the name of the command.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from megalith import __version__
from megalith.cli.importing import collections_paused
from megalith.errors import ConfigError, DeviceError, MegalithError
from megalith.train.streams import drop, warn

# Command -> what it does, in the order of a first day's work.
COMMANDS: dict[str, str] = {
    "quickstart": "train a small GPT on text found on this machine and generate from it, in minutes",
    "preprocess": "turn text (jsonl, txt, csv, parquet, ...) into tokenised .bin/.idx files",
    "data": "inspect, verify and merge .bin/.idx datasets",
    "train": "train a model with Megatron's flags, --config RECIPE.toml, or both",
    "prove": "compare a command line, script or recipe in miniature with one process, before it runs",
    "generate": "continue a prompt with a trained checkpoint",
    "serve": "serve a trained checkpoint over HTTP: a page, OpenAI's API, Megatron's API",
    "evaluate": "measure a trained checkpoint",
    "checkpoint": "inspect, verify, compare and convert checkpoints of any format",
    "push": "upload an exported model folder to the Hugging Face Hub",
    "config": "print the complete configuration of a command line, or all flags",
    "from-megatron": "translate a launch script of Megatron: recipe, command and notes",
    "report": "write an HTML page of a run: curves, changes of the configuration, saves and restarts",
    "compare": "compare runs: losses, cost and settings, and whether they differ by more than their seeds do",
    "ladder": "train a family of sizes, fit the law of their losses, and predict and check a larger model",
    "doctor": "check this installation and this machine, and name what is missing for which feature",
    "plan": "say whether a run fits its devices, and what takes the memory, before they are there",
    "schedule": "draw a pipeline schedule with its bubble and live activations",
    "completion": "print the completion script for bash, zsh or fish, or the man page",
}
ABOUT = "megalith: pretraining of large transformer language models, from text to a trained model"

_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended
_FIRST_RANK_PRINTS_WITHIN_SECONDS = 5.0
# Commands whose output is all they do.
_PRINTING_COMMANDS = (
    "--version",
    "-V",
    "version",
    "completion",
    "config",
    "checkpoint",
    "generate",
    "compare",
    "plan",
    "schedule",
    "from-megatron",
    "doctor",
    "prove",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code, one of `megalith.errors.EXIT_CODES`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    words = words or ["--help"]
    try:
        if words[0] in ("-h", "--help"):
            print(_help())
            return 0
        if words[0] in ("--version", "-V", "version"):
            print(f"megalith {__version__}")
            return 0
        from megalith.progress import on_console

        with on_console():
            return _run(words[0], words[1:])
    except MegalithError as error:
        _report(error, words[0])
        return error.exit_code
    except KeyboardInterrupt:
        warn("megalith: interrupted")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        drop(sys.stdout)
        only_printing = words[0] in _PRINTING_COMMANDS or not {"-h", "--help", "--help-all"}.isdisjoint(words)
        return 0 if only_printing else _EXIT_BROKEN_PIPE
    except OSError as error:
        # Path.is_file and its like raise this one, where they return False for a path that does not exist.
        if error.errno != errno.ENAMETOOLONG or error.filename is None:
            raise
        refusal = ConfigError(f"no file can have this name ({error.strerror}): {error.filename}; give another path")
        _report(refusal, words[0])
        return refusal.exit_code


def available_commands() -> dict[str, str]:
    """Return the commands whose modules are installed, name -> description."""
    return {name: about for name, about in COMMANDS.items() if find_spec(module_of(name))}


def _run(name: str, argv: list[str]) -> int:
    commands = available_commands()
    if name not in commands:
        guesses = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean `megalith {guesses[0]}`?" if guesses else f"commands: {', '.join(commands)}"
        raise ConfigError(f"megalith has no command {name}; {hint}")
    with collections_paused():
        command = importlib.import_module(module_of(name))
    exit_code: int = command.run(argv)
    return exit_code


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"megalith.cli.{name.replace('-', '_')}"


def _help() -> str:
    commands = [f"  {name:15}{about}" for name, about in available_commands().items()]
    return "\n".join(
        [
            ABOUT,
            "",
            "usage: megalith COMMAND [options]",
            "",
            *commands,
            "",
            "`megalith help COMMAND` describes a command; `megalith version` names this version;",
            "`megalith completion` prints scripts that let Tab complete commands and flags, and a man page.",
        ]
    )


def _report(error: MegalithError, command: str) -> None:
    """Print an error. A ConfigError is the same on every rank, so only the first rank of each machine prints it.

    The other ranks wait for it: torchrun and mpirun kill all ranks of a machine as soon as one exits. A rank that is
    not killed may be the only one with the error (an impossible LOCAL_RANK), except under launchers that let it live.
    """
    from megalith.config.environment import first_of_machine

    if error.said:
        return
    if isinstance(error, DeviceError):
        traceback.print_exception(error.__cause__)
    if not isinstance(error, ConfigError):
        warn(f"megalith {command}: {error}")
    elif first_of_machine(os.environ):
        warn(_list_violations(error, command))
    else:
        with suppress(KeyboardInterrupt):
            time.sleep(_FIRST_RANK_PRINTS_WITHIN_SECONDS)
            if "SLURM_LOCALID" not in os.environ and os.environ.get("MEGALITH_LAUNCHER") != "megalith":
                warn(_list_violations(error, command))


def _list_violations(error: ConfigError, command: str) -> str:
    if len(error.violations) == 1:
        return f"megalith {command}: {error.violations[0]}"
    lines = [f"  {number}. {text}" for number, text in enumerate(error.violations, start=1)]
    return "\n".join([f"megalith {command}: {len(lines)} errors, nothing was started:", *lines])
