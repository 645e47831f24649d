"""Argument parser of the commands, and flags shared by those that load a trained model."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megalith.config.tokenizer_flags import add_import_flag, add_tokenizer_flags
from megalith.config.values import DEVICES, model_path
from megalith.errors import ConfigError
from megalith.registry import EMPTY, Registry
from megalith.train.streams import warn

if TYPE_CHECKING:
    import torch

    from megalith.assemble.trained import Trained
    from megalith.config import TokenizerConfig
    from megalith.distributed.context import ParallelContext


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` instead of ending the process, and notes flags that are repeated."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", args or ())]
        for action in self._actions:
            if isinstance(action, argparse._StoreAction) and sum(map(words.count, action.option_strings)) > 1:
                warn(f"{self.prog}: {action.option_strings[0]} is given more than once; the last value is used")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True)
class Option:
    """A flag, or an argument (without spellings), as --help shows it."""

    spellings: tuple[str, ...]
    placeholder: str
    help: str
    choices: tuple[str, ...]


def options_of(parser: argparse.ArgumentParser) -> list[Option]:
    """Return flags and arguments of a parser, without sub-commands and what its help hides."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        choices = tuple(map(str, action.choices or ()))
        named = action.metavar or (f"{{{','.join(choices)}}}" if choices else action.dest)
        placeholder = "" if action.nargs == 0 else named if isinstance(named, str) else " ".join(named)
        about = (action.help or "") % {**vars(action), "prog": parser.prog}
        found.append(Option(tuple(action.option_strings), placeholder, about, choices))
    return found


def subcommands_of(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Return name, help and parser of each sub-command."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    about = {each.dest: each.help or "" for group in groups for each in group._choices_actions}
    return [(name, about.get(name, ""), command) for group in groups for name, command in group.choices.items()]


def closest_flag(word: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the flag of a parser that an unknown word most resembles, or None."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    return next(iter(difflib.get_close_matches(word.partition("=")[0], flags, n=1)), None)


def below_one(options: argparse.Namespace, *flags: str) -> list[str]:
    """Return a message for each of these flags whose value is below 1."""
    return _below(1, options, flags)


def below_zero(options: argparse.Namespace, *flags: str) -> list[str]:
    """Return a message for each of these flags whose value is below 0."""
    return _below(0, options, flags)


def _below(least: int, options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    values = {flag: getattr(options, flag.removeprefix("--").replace("-", "_")) for flag in flags}
    return [
        f"{flag} {n} is below {least}; give {least} or more"
        for flag, n in values.items()
        if n is not None and n < least
    ]


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a checkpoint, its tokenizer and the device."""
    add = parser.add_argument
    add(
        "checkpoint",
        type=model_path,
        help="save folder (--save), an iter_* folder in it, a Hugging Face folder, or hf:ORG/NAME[@REVISION]",
    )
    add("--iteration", type=int, metavar="N", help="iteration of the checkpoint (default: the newest intact one)")
    add("--device", choices=DEVICES, default="auto", help="device (default: auto)")
    add_import_flag(parser)
    add_tokenizer_flags(parser, about="where the checkpoint does not have its own")


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for tensor- and pipeline-parallel sizes and the dtype of the weights."""
    add = parser.add_argument
    add("--tp", "--tensor-model-parallel-size", type=int, default=1, metavar="N", help="tensor-parallel size (1)")
    add("--pp", "--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: the checkpoint's)")


def layout_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return parallel sizes and device under the names of the settings of `megalith train`."""
    return {
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "device": options.device,
    }


def load_model(
    checkpoint: Path,
    device: torch.device,
    iteration: int | None,
    tokenizer: TokenizerConfig | None,
    context: ParallelContext | None = None,
    dtype: str | None = None,
    registry: Registry = EMPTY,
) -> Trained:
    """Load a trained model as `load_trained` does, with the dtype given by name; rank 0 prints the warnings."""
    import torch

    from megalith.assemble.trained import load_trained

    weights = getattr(torch, dtype) if dtype else None
    trained = load_trained(checkpoint, device, iteration, tokenizer, context=context, dtype=weights, registry=registry)
    for note in trained.notes if context is None or context.rank == 0 else ():
        warn(f"WARNING: {note}")
    return trained
