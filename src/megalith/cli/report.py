"""`megalith report RUN`: an HTML page about one run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalith.cli.arguments import CommandParser
from megalith.errors import ConfigError, DataError
from megalith.report import find_run, read_history, render_page, run_name


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith report",
        description="Write an HTML page of a run: curves, restarts, skipped steps, checkpoints, changes of the "
        "configuration. The file is self-contained. The run may still be in progress.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="save folder (--save), run folder, or metrics.jsonl")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="page (default: report.html in the run folder)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = make_parser()
    if not argv:
        parser.print_help()
        return 0
    options = parser.parse_args(list(argv))
    folder = find_run(Path(options.run))
    history = read_history(folder)
    if not history.num_steps and not history.events:
        raise DataError(f"{folder / 'metrics.jsonl'} has no readable record")
    output = folder / "report.html" if options.output is None else Path(options.output)
    write_page(output, render_page(history, run_name(folder)), "-o")
    print(f"{output}: {history.num_steps:,} steps, {len(history.events):,} events")
    return 0


def write_page(output: Path, text: str, flag: str) -> None:
    """Write a page whole or not at all; ConfigError names the flag that chooses another path.

    A link, device or pipe is written where it is.
    """
    if output.is_dir():
        raise ConfigError(f"{output}: is a folder; name a file in it with {flag} FILE")
    # A file renamed to /dev/stdout or /dev/null would replace it.
    in_place = output.is_symlink() or (output.exists() and not output.is_file())
    written = output if in_place else output.with_name(f".{output.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        if not in_place:
            written.replace(output)
    except OSError as error:
        if not in_place:
            with suppress(OSError):
                written.unlink()
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror}; choose another path with {flag} FILE"
        ) from error
