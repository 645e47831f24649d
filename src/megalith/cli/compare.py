"""`megalith compare RUN RUN ...`: whether runs differ by more than their seeds do, at which cost, in which settings."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from megalith.cli.arguments import CommandParser
from megalith.cli.report import write_page
from megalith.errors import ConfigError, DataError
from megalith.report import find_run, run_name
from megalith.report.comparison import Experiment, Measure, group_runs, read_run
from megalith.report.comparison_page import render_comparison
from megalith.report.settings import differing
from megalith.report.verdict import Table, sentences, tables

_MOST_COLUMNS = 80  # of a sentence
T = TypeVar("T")


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith compare",
        description="Compare runs: losses and costs, losses at equal steps, tokens, FLOPs and seconds, settings that "
        "differ, and whether losses differ by more than seed noise (Welch's t-test, 5 %%). Runs that differ in --seed "
        "only are one configuration; that of the first run is the baseline.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="save folder (--save), run folder, or metrics.jsonl")
    add(
        "--baseline",
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="runs of the baseline, in place of the first RUN",
    )
    add("--best", action="store_true", help="test the lowest validation loss in place of the final one")
    add("--html", metavar="FILE.html", help="also write a page with curves")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the comparison, and write the page."""
    parser = make_parser()
    if not argv:
        parser.print_help()
        return 0
    options = parser.parse_args(list(argv))
    experiments = _experiments(options)
    measure = Measure(all(len(run.validation[0]) for each in experiments for run in each.runs), options.best)
    if options.best and not measure.validation:
        raise ConfigError("--best: not all runs have validation losses; train with --eval-iters 1 or more")
    said, found = sentences(experiments, measure), tables(experiments, measure)
    if options.html is not None:
        write_page(Path(options.html), render_comparison(experiments, measure, said, found), "--html")
    show(said, found)
    return 0


def _experiments(options: argparse.Namespace) -> list[Experiment]:
    """Read the runs and group them, the baseline first."""
    paths = [Path(path) for path in (*options.baseline, *options.runs)]
    if not options.runs or len(paths) < 2:
        remedy = "write it before --baseline, which takes all that follow" if options.baseline else "give two or more"
        raise ConfigError(f"{len(options.runs)} RUN to compare; {remedy}")
    folders = [folder.resolve() for folder in _all_of(find_run, paths)]
    folder, uses = Counter(folders).most_common(1)[0]
    if uses > 1:
        raise ConfigError(f"{folder} is given {uses} times; give each RUN once")
    names = [run_name(folder) for folder in folders]
    distinct = len(set(names)) == len(names)
    named = dict(zip(paths, names if distinct else map(str, paths), strict=True))
    runs = _all_of(lambda path: read_run(path, named[path]), paths)
    baseline, others = runs[: len(options.baseline)], runs[len(options.baseline) :]
    if len(group_runs(baseline)) > 1:
        flags = ", ".join(differing([run.settings for run in baseline]))
        raise ConfigError(f"--baseline: these runs differ in {flags}; give runs that differ in --seed only")
    found = [*group_runs(baseline), *group_runs(others)]
    uses_of_names = Counter(experiment.name for experiment in found)
    return [each if uses_of_names[each.name] == 1 else Experiment(each.runs[0].name, each.runs) for each in found]


def _all_of(read: Callable[[Path], T], paths: Iterable[Path]) -> list[T]:
    """Read each path; DataError with all that cannot be read."""
    found, problems = list[T](), list[str]()
    for path in paths:
        try:
            found.append(read(path))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found


def show(said: Iterable[str], found: Iterable[Table]) -> None:
    """Print sentences and tables."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False, markup=False, emoji=False)
    for sentence in said:
        console.print(sentence, width=min(console.width, _MOST_COLUMNS))
    for table in found:
        console.print(f"\n{table.title}", style="bold")
        grid = Grid(box=None, pad_edge=False)
        for number, name in enumerate(table.columns):
            grid.add_column(name, justify="left" if number < table.texts else "right", overflow="fold")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
