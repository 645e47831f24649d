"""`megalith checkpoint diff A B`: whether two checkpoints of any formats and layouts hold the same."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config.values import local_path

_DIFFERENT = 1


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints tensor by tensor, whatever their formats and layouts",
        description="Compares the tensors of two checkpoints layer by layer, and what stands beside them. Exit code 0: "
        "equal bit by bit; 1: different.",
    )
    diff.add_argument(
        "one", type=local_path, metavar="A", help="a save folder, or one checkpoint folder, of any format"
    )
    diff.add_argument("other", type=local_path, metavar="B", help="the other one")
    diff.add_argument("--iteration", type=int, metavar="N", help="of save folders, this checkpoint")
    diff.add_argument("--weights", action="store_true", help="the weights and the architecture alone")
    diff.add_argument("--all", action="store_true", help="show every difference, not the first 20 of each kind")
    diff.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare and say what differs; returns 0 if nothing does.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    from megalith.checkpoint.diff import compared, in_one_precision, state_differences, tensor_differences
    from megalith.checkpoint.locate import locate
    from megalith.checkpoint.source import open_source

    paths = [locate(path, None if _is_single(path) else options.iteration) for path in (options.one, options.other)]
    sources = [open_source(path) for path in paths]
    for letter, path, source in zip("AB", paths, sources, strict=True):
        print(f"{letter}  {path} ({source.format})")
    first, second = (source.common() for source in sources)
    states = state_differences(first, second, _architecture, weights=options.weights)
    *pair, main = in_one_precision(*sources)
    if main is not None:
        print(
            f"the weights of {'AB'[main]} are in half precision: compared with those of {'BA'[main]}, which are in "
            "float32, are its main parameters"
        )
    one, other = (compared(source, weights=options.weights) for source in pair)
    names, elements, tensors = set[str](), 0, []
    for difference in tensor_differences(one, other):
        names.add(difference.name)
        elements += difference.elements
        if not difference.is_none:
            tensors.append(str(difference))
    shown = None if options.all else 20
    _list("beside the tensors", [str(state) for state in states], shown)
    _list("tensors", tensors, shown)
    optimizer = any(name.startswith("optimizer.") for name in names)
    what = "weights and optimizer state" if optimizer else "weights"
    alike = f"{len(names) - len(tensors)} of {len(names)} tensors (each layer counted by itself) are bit-identical"
    if not states and not tensors:
        print(f"equal: {alike}, {elements:,} elements of {what}")
        return 0
    print(f"different: {alike}")
    return _DIFFERENT


def _is_single(path: Path) -> bool:
    from megalith.checkpoint.locate import is_checkpoint

    return path.is_dir() and is_checkpoint(path)


def _list(head: str, lines: list[str], shown: int | None) -> None:
    if lines:
        print(f"{head}:")
        print("\n".join(f"  {line}" for line in lines[:shown]))
        if shown is not None and len(lines) > shown:
            print(f"  and {len(lines) - shown} more; --all shows them")


def _architecture(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the model; what the args do not say is not compared."""
    from megalith.config.foreign_args import model_of
    from megalith.errors import CheckpointError
    from megalith.train.checkpoint_fit import architecture

    try:
        return architecture(model_of(args))
    except (CheckpointError, KeyError):
        return {name: args.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
