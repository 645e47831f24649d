"""A command measured from outside: started as users start it, timed by the lines that it prints.

Contenders take turns. All but one are stopped (SIGSTOP), so that each has the machine to itself while what else the
machine does falls on all of them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_SECONDS_TO_START = 300.0


class Contender:
    """A running command that prints a line at the end of each step.

    Attributes:
        seconds: of each step that counted.
        times: when each step ended.
    """

    def __init__(self, command: Sequence[str], step_line: str, env: Mapping[str, str] | None = None) -> None:
        self.command, self.seconds = list(command), list[float]()
        self._pattern, self._tail = re.compile(step_line), deque[str](maxlen=30)
        self._ended, self.times, self._changed = False, list[float](), threading.Condition()
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
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

    def wait(self, count: int) -> None:
        """Wait until `count` steps are done in all."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._ended or len(self.times) >= count, _SECONDS_TO_START)
            if not there or len(self.times) < count:
                raise RuntimeError(f"{' '.join(self.command)} does not step:\n{''.join(self._tail)}")

    def warm_up(self, steps: int) -> None:
        """Let it start and take its first steps, then stop it."""
        self.wait(steps)
        self._signal(signal.SIGSTOP)

    def take_turn(self, steps: int) -> None:
        """Continue, let the step that was interrupted end, and time so many steps."""
        begun = len(self.times)
        self._signal(signal.SIGCONT)
        self.wait(begun + 1 + steps)
        self._signal(signal.SIGSTOP)
        times = self.times[begun : begun + 1 + steps]
        self.seconds += [after - before for before, after in zip(times, times[1:], strict=False)]

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def process_ids(self) -> list[int]:
        """Return the processes of the command that have no children of their own: the ranks of a launch.

        Ranks are in sessions of their own, so they are found by their parents.
        """
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.parent.name))
        found, unseen = list[int](), [self._process.pid]
        while unseen:
            number = unseen.pop()
            unseen += children.get(number, [])
            if number not in children:
                found.append(number)
        return found

    def close(self) -> None:
        """Kill the command, and the ranks that would end in their own time beside what is measured next."""
        ranks = self.process_ids()
        self._signal(signal.SIGKILL)
        for number in ranks:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._process.wait()


def in_turns(
    commands: Mapping[str, Sequence[str]], step_line: str, rounds: int, steps: int, warm_up: int
) -> dict[str, list[float]]:
    """Return the seconds of `rounds` x `steps` steps of each command, in turns whose order changes.

    They start one after the other, and the first `warm_up` steps do not count.
    """
    contenders = dict[str, Contender]()
    try:
        for name, command in commands.items():
            contenders[name] = Contender(command, step_line)
            contenders[name].warm_up(warm_up)
        for number in range(rounds):
            for name in sorted(contenders, reverse=bool(number % 2)):
                contenders[name].take_turn(steps)
    finally:
        for contender in contenders.values():
            contender.close()
    return {name: contender.seconds for name, contender in contenders.items()}


def run_seconds(command: Sequence[str], until: str = "", env: Mapping[str, str] | None = None) -> float:
    """Return the seconds from the start of a command to its end, or to the line that matches `until`."""
    began = time.perf_counter()
    if until:
        contender = Contender(command, until, env)
        try:
            contender.wait(1)
            return contender.times[0] - began
        finally:
            contender.close()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return time.perf_counter() - began


def megalith(*arguments: str) -> list[str]:
    """Return the command line of a megalith command, with the program beside this Python."""
    return [str(Path(sys.executable).with_name("megalith")), *arguments]
