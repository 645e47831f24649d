"""Progress of work that takes longer than two seconds, on stderr: a bar in a terminal, elsewhere a line now and then.

A command turns it on (`on_console`); in a program that imports megalith nothing is shown. A piece of work is a `task`,
and code far below it reports by `advance`: as in logging, nothing is passed through the layers and no result depends on
it. Of several ranks the first shows its own. rich is imported when the first bar appears.

In a terminal the bar, or the status of a training, is the last line; what Python prints meanwhile appears above it
unchanged. NO_COLOR and TERM=dumb ask for plain lines.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

SECONDS_BEFORE_A_BAR = 2.0
_SECONDS_BETWEEN_BARS = 0.2
_SECONDS_BEFORE_A_LINE, _MOST_BETWEEN_LINES = 30.0, 480.0  # plain lines: the pause doubles, for logs of long work
_LEAST_BAR = 10  # columns
_ERASE = "\x1b[K"


class Task:
    """A piece of work in progress. Threads may report at the same time."""

    def __init__(self, what: str, total: float | None, unit: str, counts: str, done: float) -> None:
        self.what, self.total, self.unit, self.counts = what, total, unit, counts
        self.done, self.note = done, ""
        self._first, self._began, self._lock = done, time.monotonic(), threading.Lock()

    def advance(self, amount: float, note: str = "") -> None:
        """Add to what is done; `note` is a short text beside it, such as a running score."""
        with self._lock:
            self.done += amount
        self.note = note or self.note

    def reach(self, done: float, note: str = "") -> None:
        """Set how much is done, out of the total."""
        self.done, self.note = done, note or self.note

    @property
    def seconds(self) -> float:
        """Seconds since the task began."""
        return time.monotonic() - self._began

    def figures(self) -> list[str]:
        """Return share and amount, remaining or elapsed time, rate, note and memory, the most important first."""
        seconds, total = self.seconds, self.total
        done = self.done if total is None else min(self.done, total)
        rate, left, found = (done - self._first) / max(seconds, 1e-9), "", list[str]()
        if total:
            found.append(f"{done / total:.0%}")
            left = f"{duration((total - done) / rate)} left" if rate > 0 else ""
        if self.unit and (done or total):
            of = "" if total is None else f"/{short(total)}"
            found.append(f"{short(done)}{of}{self.unit}")
        found.append(left or duration(seconds))
        if self.unit and rate > 0:
            found.append(f"{short(rate)}{self.unit}/s")
        return [*found, *([self.note] if self.note else []), f"{short(_resident_bytes())}B RAM"]


def duration(seconds: float) -> str:
    """Format seconds in their two largest units: `3 d 4 h`, `2 min 5 s`, `7 s`."""
    whole = round(seconds)
    parts = [("d", whole // 86400), ("h", whole // 3600 % 24), ("min", whole // 60 % 60), ("s", whole % 60)]
    first = next((place for place, (_, number) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for unit, number in parts[first : first + 2])


def short(value: float) -> str:
    """Format a number with three digits and a decimal prefix: `34.5M`."""
    prefixes = iter("kMGTPE")
    prefix = ""
    while value >= 999.5 and (larger := next(prefixes, "")):
        value, prefix = value / 1000, larger
    return f"{value:.3g}{prefix}"


def _resident_bytes() -> int:
    """Return the memory of this process, its maximum where the system does not tell the current one."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _Above:
    """A stream of a terminal whose text is written above the last line."""

    def __init__(self, stream: TextIO, line: _LastLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.write_above(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LastLine:
    """The last line of the terminal. While it is shown, `sys.stdout` and `sys.stderr` write above it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._text, self._drawn, self._in_a_line = "", False, False
        self._replaced: dict[str, tuple[TextIO, _Above]] = {}
        self._out: TextIO = sys.stderr

    def show(self, text: str) -> None:
        """Show a text, which must be shorter than the terminal is wide."""
        with self._lock:
            if not self._replaced:
                self._out = sys.stderr
                for name in ("stdout", "stderr"):
                    if (stream := getattr(sys, name)) is not None and stream.isatty():
                        self._replaced[name] = stream, _Above(stream, self)
                        setattr(sys, name, self._replaced[name][1])
            self._text = text
            self._draw()

    def hide(self) -> None:
        """Remove the line. Safe to call again."""
        with self._lock:
            self._erase()
            self._text = ""
            self.release()

    def release(self) -> None:
        """Put the streams back in their places."""
        for name, (stream, above) in self._replaced.items():
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        self._replaced = {}

    def write_above(self, stream: TextIO, text: str) -> int:
        """Write a text to a stream of the same terminal; the line is back when the text's last line has ended."""
        with self._lock:
            self._erase()
            written = stream.write(text)
            stream.flush()
            self._in_a_line = not text.endswith("\n") if text else self._in_a_line
            self._draw()
            return written

    def _draw(self) -> None:
        if self._text and not self._in_a_line:
            self._put(f"\r{self._text}{_ERASE}")
            self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._put(f"\r{_ERASE}")
            self._drawn = False

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone; who prints to it finds out
            self._out.write(text)
            self._out.flush()


class _Console:
    """Tasks in progress, and where they are shown."""

    def __init__(self) -> None:
        self.on, self.line = False, _LastLine()
        self.tasks: list[Task] = []

    def forget(self) -> None:
        """Leave the tasks and the line to the process that this one is a fork of; its locks may be held there."""
        self.line.release()
        self.line, self.tasks = _LastLine(), []

    def speaks(self) -> bool:
        """Return whether this process shows progress: a command has turned it on, and it is the first rank."""
        if not self.on or sys.stderr is None:
            return False
        from megalith.config.environment import read_launch
        from megalith.errors import ConfigError

        with suppress(ConfigError):
            return read_launch(os.environ).get("RANK", "0") == "0"
        return True

    def follow(self, task: Task, ended: threading.Event) -> None:
        """Show a task until it has ended; of several in progress, the last that takes its time."""
        if in_terminal():
            if ended.wait(SECONDS_BEFORE_A_BAR):
                return
            draw = _bars()
            while True:
                if self._is_in_front(task):
                    self.line.show(draw(task, _columns()))
                if ended.wait(_SECONDS_BETWEEN_BARS):
                    break
            self.line.hide()
            return
        pause = _SECONDS_BEFORE_A_LINE
        while not ended.wait(pause):
            if self._is_in_front(task):
                with suppress(OSError, ValueError):
                    print(f"{task.what}: {', '.join(task.figures())}", file=sys.stderr, flush=True)
            pause = min(2 * pause, _MOST_BETWEEN_LINES)

    def _is_in_front(self, task: Task) -> bool:
        old = [other for other in list(self.tasks) if other.seconds >= SECONDS_BEFORE_A_BAR]
        return bool(old) and old[-1] is task


_console = _Console()
os.register_at_fork(after_in_child=_console.forget)


@contextmanager
def on_console() -> Iterator[None]:
    """Show the progress of tasks within the block."""
    before, _console.on = _console.on, True
    try:
        yield
    finally:
        _console.on = before
        _console.line.hide()


@contextmanager
def task(
    what: str, total: float | None = None, unit: str = "", *, counts: str = "", done: float = 0.0
) -> Iterator[Task]:
    """Show the progress of the block, if it takes longer than two seconds.

    Args:
        what: short name, such as "loading the checkpoint".
        total: amount of work, None if it is not known.
        unit: what is counted, such as "B" or " samples"; empty to show no amounts.
        counts: kind of `advance` that reports to this task.
        done: what an earlier run has done of it.
    """
    made = Task(what, total, unit, counts, done)
    if not _console.speaks():
        yield made
        return
    ended = threading.Event()
    thread = threading.Thread(target=_console.follow, args=(made, ended), name="progress", daemon=True)
    _console.tasks.append(made)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()
        _console.tasks.remove(made)


def is_counted(kind: str) -> bool:
    """Return whether a task in progress counts `advance` of a kind: whether a note for it is worth computing."""
    return any(one.counts == kind for one in _console.tasks)


def advance(kind: str, amount: float, note: str = "") -> None:
    """Report work to the task in progress that counts this kind, if there is one."""
    for one in reversed(_console.tasks):
        if one.counts == kind:
            one.advance(amount, note)
            return


def in_terminal() -> bool:
    """Return whether stderr is a terminal that can redraw its last line and whose user does not ask for plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stderr is not None and sys.stderr.isatty() and not plain


def show_status(parts: Sequence[str]) -> None:
    """Show texts in the last line of a terminal until `hide_status`; those that do not fit are left out."""
    if _console.speaks() and in_terminal():
        _console.line.show("  ".join(_fitting(parts, _columns(), gap=2)))


def hide_status() -> None:
    """Remove what `show_status` shows."""
    _console.line.hide()


def _columns() -> int:
    """Return the columns of the terminal that may be used: with the last one some terminals begin a new line."""
    with suppress(OSError, ValueError):
        return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
    return 79


def _fitting(parts: Sequence[str], columns: int, gap: int) -> list[str]:
    kept, used = list[str](), -gap
    for part in parts:
        if used + gap + len(part) <= columns:
            kept.append(part)
            used += gap + len(part)
    return kept


def _bars() -> Callable[[Task, int], str]:
    """Return a function that draws a task in one line of so many columns."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(file=sys.stderr, force_terminal=True, legacy_windows=False)

    def draw(task: Task, columns: int) -> str:
        what = task.what[:columns]
        figures = " ".join(_fitting(task.figures(), columns - len(what) - 1 - _LEAST_BAR - 1, gap=1))
        width = columns - len(what) - len(figures) - 2
        if width < _LEAST_BAR:
            return what
        bar = ProgressBar(task.total, min(task.done, task.total or 0), width=width)
        with console.capture() as captured:
            console.print(bar, width=width, end="")
        return f"{what} {captured.get().rstrip(chr(10))} {figures}"

    return draw
