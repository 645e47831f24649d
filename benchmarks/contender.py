"""A command measured from outside: started as users start it, timed by the lines that it prints.

Contenders take turns. All but one are stopped (SIGSTOP), so that each has the machine to itself while what else the
machine does falls on all of them.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

_SECONDS_TO_START, _SECONDS_BETWEEN_LOOKS = 300.0, 0.05


class Contender:
    """A running command that prints a line at the end of each step.

    Attributes:
        times: when each step ended.
    """

    def __init__(self, command: Sequence[str], step_line: str) -> None:
        self.command = list(command)
        self._pattern, self._tail = re.compile(step_line), deque[str](maxlen=30)
        self._ended, self.times, self._changed = False, list[float](), threading.Condition()
        self._carried = 0.0
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            now = time.perf_counter()
            with self._changed:
                self._tail.append(line)
                if self._pattern.search(line):
                    self.times.append(now)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, count: int, seconds: float = _SECONDS_TO_START) -> None:
        """Wait until `count` steps are done in all."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._ended or len(self.times) >= count, seconds)
            if not there or len(self.times) < count:
                raise RuntimeError(f"{' '.join(self.command)} does not step:\n{''.join(self._tail)}")

    def warm_up(self, steps: int) -> None:
        """Let it start and take its first steps, then stop it."""
        self.wait(steps)
        self._stop()

    def take_turn(self) -> float:
        """Continue until a step ends, and return its seconds: those since the last step in which it was not stopped."""
        done, resumed = len(self.times), time.perf_counter()
        self._signal(signal.SIGCONT)
        self.wait(done + 1)
        seconds = self._carried + self.times[done] - resumed
        self._stop()
        return seconds

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self._carried = time.perf_counter() - self.times[-1]  # of the step that has begun meanwhile

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def peak_mib(self) -> float:
        """Return the most resident memory that one of its processes had so far."""
        return max(self._memory("status", "VmHWM"), default=0.0)

    def largest_mib(self) -> float:
        """Return the greatest proportional set size of its processes: a page that they share counts once over all."""
        return max(self._memory("smaps_rollup", "Pss"), default=0.0)

    def _memory(self, file: str, name: str) -> list[float]:
        """Return a figure of /proc, in MiB, of each of its processes; those that end meanwhile are left out."""
        return [mib for number in self._processes() for mib in _memory_of(number, file, name)]

    def _processes(self) -> list[int]:
        """Return the process and its descendants; ranks have sessions of their own."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.parent.name))
        found = [self._process.pid]
        for number in found:
            found += children.get(number, [])
        return found

    def wait_for_end(self) -> None:
        """Let it go on and wait until it has ended by itself."""
        self._signal(signal.SIGCONT)
        self._process.wait(_SECONDS_TO_START)

    def close(self) -> None:
        """End all of its processes; what a killed launcher leaves would go on for a while beside the next turn."""
        processes = self._processes()
        self._signal(signal.SIGKILL)
        for number in processes[1:]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._process.wait()


def _memory_of(process: int, file: str, name: str) -> list[float]:
    """Return a figure of /proc/PROCESS/FILE in MiB; none if the process has ended."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text()
    except OSError:
        return []
    return [int(kib) / 1024 for kib in re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)]


def alternate(
    turns: Mapping[str, Callable[[], float]], until: float, rounds: tuple[int, int] = (2, 15)
) -> dict[str, list[float]]:
    """Return the seconds that the turns of each contender return, round by round; their order changes.

    Args:
        until: no round begins that would end after this time (of `time.perf_counter`).
        rounds: least and most of them, whatever the time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    number, took = 0, 0.0
    while number < rounds[0] or (number < rounds[1] and time.perf_counter() + took < until):
        began = time.perf_counter()
        for name in sorted(turns, reverse=bool(number % 2)):
            seconds[name].append(turns[name]())
        number, took = number + 1, time.perf_counter() - began
    return seconds


def in_turns(
    commands: Mapping[str, Sequence[str]],
    step_line: str,
    until: float,
    *,
    rounds: tuple[int, int] = (2, 15),
    warm_up: int = 1,
    left_out: dict[str, str] | None = None,
    peaks: dict[str, float] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of the steps of each command, one a round.

    They start one after the other, and the first `warm_up` steps do not count.

    Args:
        step_line: pattern of the line at the end of a step.
        until, rounds: as for `alternate`.
        left_out: receives the commands that do not start, with the reason; the first command must. Without it all must.
        peaks: receives the most resident memory of a process of each, in MiB.
    """
    contenders = dict[str, Contender]()
    try:
        for name, command in commands.items():
            contender = contenders[name] = Contender(command, step_line)
            try:
                contender.warm_up(warm_up)
            except RuntimeError as error:
                if left_out is None or len(contenders) == 1:
                    raise
                contenders.pop(name).close()
                left_out[name] = str(error)
        seconds = alternate({name: one.take_turn for name, one in contenders.items()}, until, rounds)
        if peaks is not None:
            peaks |= {name: one.peak_mib() for name, one in contenders.items()}
        return seconds
    finally:
        for contender in contenders.values():
            contender.close()


def run_seconds(command: Sequence[str], until: str = "") -> float:
    """Return the seconds from the start of a command to its end, or to the line that matches `until`."""
    began = time.perf_counter()
    if until:
        contender = Contender(command, until)
        try:
            contender.wait(1)
            return contender.times[0] - began
        finally:
            contender.close()
    return run(command).seconds


class Ran(NamedTuple):
    """A command that has ended: how long it took, and the most resident memory of its first process."""

    seconds: float
    peak_mib: float


def run(command: Sequence[str]) -> Ran:
    """Run a command to its end.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    with TemporaryFile("w+", errors="replace") as output:
        began, peak = time.perf_counter(), 0.0
        process = subprocess.Popen(command, stdout=output, stderr=output)
        ended = os.pidfd_open(process.pid)
        while not select.select([ended], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            # ru_maxrss would count this process too, from which it was forked
            peak = max([peak, *_memory_of(process.pid, "status", "VmHWM")])
        seconds = time.perf_counter() - began
        os.close(ended)
        process.wait()
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-2000:]}")
    return Ran(seconds, peak)


def megalith(*arguments: str) -> list[str]:
    """Return the command line of a megalith command, with the program beside this Python; as a module without one."""
    program = Path(sys.executable).with_name("megalith")
    return [*([str(program)] if program.exists() else [sys.executable, "-m", "megalith"]), *arguments]
