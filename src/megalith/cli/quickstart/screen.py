"""What the quickstart shows: one line for each step done, a bar while it trains, and the curve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from megalith.cli.quickstart.follow import Record

NAME_WIDTH = 11
WIDEST = 110


@dataclass
class Line:
    """The line of a step, filled while the step runs."""

    text: str = ""


class Screen:
    """Writes to a terminal, or plainly to a file or pipe."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    @property
    def width(self) -> int:
        return min(self.console.width, WIDEST)

    @property
    def has_braille(self) -> bool:
        return not self.console.options.ascii_only

    def title(self, text: str) -> None:
        self.console.print(f"[bold]{escape(text)}[/]")

    def line(self, name: str, text: str, seconds: float | None = None, *, style: str = "bold cyan") -> None:
        """Print the result of a step: its name, what came out and, at the right, how long it took."""
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=NAME_WIDTH, no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        took = "" if seconds is None else f"[dim]{seconds:.1f} s[/]"
        grid.add_row(f"[{style}]{escape(name)}[/]", escape(text), took)
        self.console.print(grid, width=self.width)

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[Line]:
        """Show what is being done, then the line that the step filled in."""
        line = Line()
        started = time.perf_counter()
        with self.console.status(f"{escape(name)}: {escape(doing)} ..."):
            yield line
        self.line(name, line.text, time.perf_counter() - started)

    def text(self, lines: list[str], style: str = "") -> None:
        """Print lines as they stand, cut at the width."""
        for text in lines:
            self.console.print(text[: self.width], style=style, markup=False, no_wrap=True)

    def command(self, about: str, command: str) -> None:
        """Print a command to try; it is never broken, so that it can be copied."""
        self.console.print(f"  [dim]# {escape(about)}[/]")
        self.console.print(f"  {escape(command)}", soft_wrap=True)


class TrainingBar:
    """The bar of a training run, moved by the records of its metrics; it outlives the process that is killed."""

    def __init__(self, screen: Screen, iterations: int) -> None:
        self._progress = Progress(
            TextColumn("[bold cyan]{task.description}[/]"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            console=screen.console,
            transient=True,
            expand=True,
            disable=not screen.console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("train".ljust(NAME_WIDTH), total=iterations, loss="-", speed="")

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: Record) -> None:
        """Take one line of metrics.jsonl."""
        event = record.get("event")
        if event == "step" and record["loss"] is not None:
            self._progress.update(self._task, completed=record["iteration"], loss=f"{record['loss']:.3f}")
        elif event == "throughput":
            self._progress.update(self._task, speed=f"{record['tokens_per_second']:,.0f} tokens/s")
