"""Runs a training command as a user would, follows its metrics.jsonl while it works, and kills it when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import MegalithError

POLL_SECONDS = 0.05
Record = dict[str, Any]
"""One line of metrics.jsonl: "event" and its values."""


class CommandFailed(MegalithError):
    """A command that the quickstart ran ended with an error; carries that command's exit code."""

    def __init__(self, command: Sequence[str], exit_code: int, log: Path) -> None:
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code
        super().__init__(
            f"`{' '.join(command[:2])}` ended with exit code {exit_code}:\n{last_lines(log)}\n(all in {log})"
        )


def last_lines(path: Path, count: int = 12) -> str:
    """Give the end of a log file."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def run_command(command: Sequence[str], arguments: Sequence[str], log: Path) -> None:
    """Run a command to its end, its screen going to `log`.

    Args:
        command: the program, as `python -m megalith`.
        arguments: the command's name and flags.

    Raises:
        CommandFailed: its exit code is not 0.
    """
    with start_command(command, arguments, log) as process:
        exit_code = process.wait()
    if exit_code != 0:
        raise CommandFailed(["megalith", *arguments], exit_code, log)


def start_command(command: Sequence[str], arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command whose screen is appended to `log`."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as screen:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env=environment,
        )


@dataclass
class MetricsTail:
    """Reads the lines that a growing metrics.jsonl gained since the last look.

    Attributes:
        path: the file, which need not exist yet.
    """

    path: Path
    _position: int = 0
    _torn: bytes = b""

    def new_records(self) -> Iterator[Record]:
        """Yield the complete new lines; what a kill tore is passed over."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        *lines, self._torn = (self._torn + added).split(b"\n")
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


@dataclass
class Followed:
    """What a followed training told.

    Attributes:
        records: all lines, in the order of writing.
        exit_code: of the process; negative for the signal that killed it.
    """

    records: list[Record] = field(default_factory=list)
    exit_code: int = 0

    def of(self, event: str) -> list[Record]:
        """Give the records of one kind."""
        return [record for record in self.records if record.get("event") == event]


def follow_training(
    command: Sequence[str],
    arguments: Sequence[str],
    tail: MetricsTail,
    log: Path,
    *,
    on_record: Callable[[Record], None],
    kill_at: int | None = None,
) -> Followed:
    """Run a training command; kill it (SIGKILL, which nothing can answer) once it has done `kill_at` steps.

    Raises:
        CommandFailed: it ended by itself with an error.
    """
    followed = Followed()
    killed = False
    with start_command(command, arguments, log) as process:
        try:
            while True:
                ended = process.poll() is not None
                for record in tail.new_records():
                    followed.records.append(record)
                    on_record(record)
                    if kill_at is not None and not killed and reached(record, kill_at):
                        process.kill()
                        killed = True
                if ended:
                    break
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()  # an interrupt or an error of ours: the run saves and leaves
            process.wait()
            raise
    followed.exit_code = process.returncode
    if followed.exit_code != 0 and not killed:
        raise CommandFailed(["megalith", *arguments], followed.exit_code, log)
    return followed


def reached(record: Record, iteration: int) -> bool:
    """Tell whether a record is of a step at or after the iteration."""
    return record.get("event") == "step" and int(record["iteration"]) >= iteration


@dataclass(frozen=True)
class ResumeProof:
    """How the steps that were done twice, before the kill and after the resume, compare.

    Attributes:
        resumed_from: iteration of the checkpoint.
        killed_at: last step before the kill.
        num_repeated: steps done twice.
        num_equal: those whose loss and gradient norm were equal to the last bit.
        largest_difference: of two losses of the same step.
    """

    resumed_from: int
    killed_at: int
    num_repeated: int
    num_equal: int
    largest_difference: float


def compare_repeated_steps(before: Followed, after: Followed) -> ResumeProof:
    """Compare the steps after the last checkpoint with their repetition."""
    first = {step["iteration"]: step for step in before.of("step")}
    second = {step["iteration"]: step for step in after.of("step")}
    repeated = sorted(first.keys() & second.keys())
    equal = [
        number
        for number in repeated
        if all(first[number][name] == second[number][name] for name in ("loss", "grad_norm", "learning_rate"))
    ]
    return ResumeProof(
        resumed_from=min(second) - 1,
        killed_at=max(first),
        num_repeated=len(repeated),
        num_equal=len(equal),
        largest_difference=max((abs(first[n]["loss"] - second[n]["loss"]) for n in repeated), default=0.0),
    )
