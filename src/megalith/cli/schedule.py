"""`megalith schedule`: drawing of a pipeline schedule with its bubble and its live activations, by simulation."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from fractions import Fraction

from megalith.cli.arguments import CommandParser, closest_flag
from megalith.errors import ConfigError
from megalith.schedules.pipeline import SCHEDULES, SizeNames, default_schedule, make_schedule, violations
from megalith.schedules.simulator import Costs, draw, simulate, summary

_FLAGS = SizeNames(stages="--pp", chunks="--vp", micro_batches="--microbatches")
_COSTS = ("forward", "input gradient", "weight gradient")


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="megalith schedule",
        description="Draw a pipeline schedule by simulation: F, B and W are forward pass, backward pass and weight "
        "gradient, followed by the micro-batch (chunk.micro-batch with --vp); dots are idle time.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pp", "--pipeline-model-parallel-size", default="4", metavar="P", help="pipeline stages (default: 4)")
    add(
        "--vp",
        "--num-virtual-stages-per-pipeline-rank",
        default="1",
        metavar="V",
        help="chunks of a stage (default 1)",
    )
    add("--microbatches", "--micro-batches", default="8", metavar="M", help="micro-batches per step (default: 8)")
    add("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)} (default: 1f1b; interleaved with --vp)")
    add(
        "--costs",
        nargs=3,
        default=("1", "1", "1"),
        metavar=("F", "B", "W"),
        help="relative times of forward, input gradient and weight gradient per stage and micro-batch (default: 1 1 1)",
    )
    add("--width", metavar="N", help="columns (default: the terminal's; 0: one line per stage)")
    add("--color", choices=("auto", "always", "never"), default="auto", help="colored output (default: auto)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the schedule that the flags describe and a summary; ConfigError lists all invalid values."""
    parser = make_parser()
    options, unknown = parser.parse_known_args(list(argv))
    found = [_unknown(word, parser) for word in unknown]
    sizes = [
        _integer(flag, text, found)
        for flag, text in (("--pp", options.pp), ("--vp", options.vp), ("--microbatches", options.microbatches))
    ]
    columns = None if options.width is None else _integer("--width", options.width, found)
    if columns is not None and columns < 0:
        found.append(f"--width {columns} is below 0; give a number of columns, or 0 for one line per stage")
    costs = Costs(*(_cost(name, text, found) for name, text in zip(_COSTS, options.costs, strict=True)))
    stages, chunks, micro_batches = (1 if size is None else size for size in sizes)
    name = options.schedule or default_schedule(chunks)
    if sizes[2] is None:  # still check the other values
        micro_batches = max(1, stages)
    found += violations(name, stages, chunks, micro_batches, _FLAGS)
    if found:
        raise ConfigError(found)
    simulation = simulate(make_schedule(name, stages, chunks, micro_batches), costs)
    print(draw(simulation, width=_width(columns), color=_use_color(options.color)))
    print(summary(simulation, costs))
    return 0


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    guess = closest_flag(word, parser)
    hint = f"did you mean {guess}?" if guess else "see megalith schedule --help"
    return f"{word} is not a flag; {hint}" if word.startswith("-") else f"{word} is an argument of no flag; {hint}"


def _integer(flag: str, text: str, found: list[str]) -> int | None:
    try:
        return int(text)
    except ValueError:
        found.append(f"{flag} {text} is not an integer; give an integer")
        return None


def _cost(name: str, text: str, found: list[str]) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        found.append(f"--costs: {text} for the {name} is not a number; give a number above 0")
        return Fraction(1)
    if value <= 0:
        found.append(f"--costs: {text} for the {name} is not above 0; give a number above 0")
    return value


def _width(columns: int | None) -> int | None:
    if columns is None:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None
    return columns or None


def _use_color(choice: str) -> bool:
    capable = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return choice == "always" or (choice == "auto" and capable)
