"""The processes of one machine and what became of them: started, signalled, waited for, and the first cause found.

Used by `megalith train --nproc N`. It does without torch and without torchrun's agent (docs/decisions): the agent ends
the other ranks by the signal that asks ours to save, and does not tell which rank failed first, nor at which step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megalith.config.environment import listen, loopback
from megalith.distributed.board import FolderBoard, Identity, Status, make_folder
from megalith.distributed.machine import memory_limit, oom_kills

SECOND_SIGNAL = 130
PEER_FAILED = 6
STOPPED = 75

_GRACE_SECONDS = 10.0  # for the others to find out what happened, after the first rank has failed
_GRACE_AFTER_DEATH = 1.0  # the same after a signal: the first cause is known
_GRACE_OF_SECOND_SIGNAL = 0.5  # ranks that can answer end at once; with the debounce this is below two seconds
_DEBOUNCE_SECONDS = 1.1  # workers take two signals within a second for one
_POLL_SECONDS = 0.02
_MEMORY_WORDS = ("out of memory", "not enough memory", "allocate memory", "MemoryError", "bad_alloc")


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    rank: int
    pid: int
    code: int  # exit code, negative for a signal
    peak_bytes: int  # most memory that it held
    at: float  # `time.monotonic()` then
    by_us: bool = False  # the supervisor has killed it


@dataclass(frozen=True)
class Cause:
    """Why a run ended before its end."""

    text: str  # for the user, in one or a few lines; empty if a rank has said it
    exit_code: int  # of the first failing rank, 128 + n for signal n
    kind: str  # what is equal when the same thing happens again
    step: int  # at which it happened, 0 for before the first
    hopeless: bool = False  # it was a mistake that a restart cannot mend
    from_outside: bool = False  # somebody killed a rank, which says nothing about the program


@dataclass
class Signals:
    """The signals that the supervisor has been sent and not yet passed on."""

    taken: Sequence[signal.Signals]  # those that ask for a stop
    received: list[signal.Signals] = field(default_factory=list)  # of these
    suspended: bool = False  # whether Ctrl-Z was pressed

    def __enter__(self) -> Signals:
        wanted = (*self.taken, signal.SIGTSTP) if threading.current_thread() is threading.main_thread() else ()
        kept = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._receive) for number in kept}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self.suspended = True
        else:
            self.received.append(signal.Signals(number))


class Attempt:
    """One start of all ranks, of which `attempt` came before; a rank has `environ` and the variables of its place."""

    def __init__(
        self, command: Sequence[str], count: int, attempt: int, environ: Mapping[str, str], signals: Signals
    ) -> None:
        self._stop_signals = signals.taken
        self.count, self.ended = count, list[Ended]()
        self.board = FolderBoard(Path(make_folder()), of_size=count)
        self.signals: list[signal.Signals] = []
        self._killed: set[int] = set()
        self._signalled_at = 0.0
        self._oom_kills = oom_kills()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        with listen(loopback(), 0, 1024) as listener:
            listener.set_inheritable(True)
            for rank in range(count):
                self._running[rank] = subprocess.Popen(
                    list(command),
                    env={**environ, **self._variables(rank, attempt, listener)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    start_new_session=True,
                )
        self._pids = {rank: process.pid for rank, process in self._running.items()}

    def _variables(self, rank: int, attempt: int, listener: socket.socket) -> dict[str, str]:
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.count,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self.count,
            "MASTER_ADDR": loopback(),
            "MASTER_PORT": listener.getsockname()[1],
            "MEGALITH_LAUNCHER": "megalith",
            "MEGALITH_SUPERVISOR": os.getpid(),
            "MEGALITH_BOARD": self.board.folder,
            "MEGALITH_ATTEMPT": attempt,
        }
        if rank == 0:
            variables["MEGALITH_STORE_FD"] = listener.fileno()
        return {name: str(value) for name, value in variables.items()}

    def wait(self, signals: Signals, say: Callable[[str], None]) -> None:
        """Wait until all have ended, passing signals on; after a failure the others get some seconds to follow."""
        try:
            while self._running:
                if signals.suspended:
                    signals.suspended = False
                    self._suspend()
                self._pass_on(signals, say)
                self._reap()
                if self._out_of_patience():
                    self._kill()
                time.sleep(_POLL_SECONDS)
        finally:
            self._kill()
            self._reap(hang=True)
            for pid in self._pids.values():  # what a rank has started itself
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _suspend(self) -> None:
        """Stop all ranks and then this process, until somebody continues it (`fg`, `bg`, SIGCONT).

        The ranks by SIGSTOP: they are in sessions of their own, where the kernel ignores what a terminal would send.
        This process by SIGTSTP, which the kernel ignores where no shell could continue it (`ssh -t HOST megalith ...`).
        """
        self._signal_groups(signal.SIGSTOP)
        taken = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, taken)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _pass_on(self, signals: Signals, say: Callable[[str], None]) -> None:
        if not signals.received:
            return
        if not self.signals:
            doing = "finishing this step and saving" if self._step_of_all() else "stopping before the first step"
            say(f"\n{signals.received[0].name}: {doing}; once more to leave at once")
        elif time.monotonic() - self._signalled_at < _DEBOUNCE_SECONDS:
            return
        number = signals.received.pop(0)
        self.signals.append(number)
        self._signalled_at = time.monotonic()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _reap(self, *, hang: bool = False) -> None:
        for rank, process in list(self._running.items()):
            pid, status, usage = os.wait4(process.pid, 0 if hang else os.WNOHANG)
            if pid == 0:
                continue
            process.returncode = os.waitstatus_to_exitcode(status)
            unit = 1 if sys.platform == "darwin" else 1024
            killed = rank in self._killed
            self.ended.append(
                Ended(rank, pid, process.returncode, usage.ru_maxrss * unit, time.monotonic(), by_us=killed)
            )
            del self._running[rank]

    def _out_of_patience(self) -> bool:
        now = time.monotonic()
        if len(self.signals) > 1:
            return now - self._signalled_at > _GRACE_OF_SECOND_SIGNAL
        failed = [end.at for end in self.ended if end.code not in (0, STOPPED)]
        died = [end.at for end in self.ended if end.code < 0]
        late = bool(failed) and now - min(failed) > _GRACE_SECONDS
        return late or (bool(died) and now - min(died) > _GRACE_AFTER_DEATH)

    def _kill(self) -> None:
        self._killed.update(self._running)
        self._signal_groups(signal.SIGKILL)

    # Why.

    @property
    def stopped(self) -> int | None:
        """The exit code of ranks that ended as they were asked to; None if a rank failed."""
        codes = {end.code for end in self.ended}
        if codes <= {0, STOPPED}:
            return max(codes)
        if len(self.signals) > 1 and codes <= {0, STOPPED, SECOND_SIGNAL, -signal.SIGKILL}:
            return SECOND_SIGNAL
        without_save = {128 + number for number in self._stop_signals}
        return codes.pop() if len(codes) == 1 and codes <= without_save else None

    def cause(self) -> Cause:
        """The first thing that went wrong in an attempt that was not `stopped`."""
        bad = [end for end in self.ended if end.code not in (0, STOPPED)]
        failure = json.loads(self.board.read("failure") or "null")
        died = next((end for end in bad if end.code < 0 and not end.by_us), None)
        if self.board.read("alarm") and (hang := self.board.read("cause")):
            return Cause(hang, PEER_FAILED, "hang", self._step_of_all())
        if failure is not None and (died is None or failure["at"] <= died.at):
            return self._failure(failure)
        if died is not None:
            return self._death(died)
        odd = next((end for end in bad if end.code != PEER_FAILED and not end.by_us), None)
        if odd is not None:
            return self._odd_end(odd)
        text = self.board.read("cause") or f"{self._name(bad[0])} lost the others"
        return Cause(text, PEER_FAILED, "lost", self._step_of_all())

    def _name(self, end: Ended) -> str:
        return f"{Identity(end.rank, socket.gethostname(), end.pid)} of {self.count}"

    def _status(self, rank: int) -> Status:
        return Status.decode(self.board.status(rank)) or Status()

    def _step_of_all(self) -> int:
        return max(self._status(rank).step for rank in range(self.count))

    def _failure(self, failure: Mapping[str, object]) -> Cause:
        texts = [json.loads(self.board.read(f"failure-{rank}") or "{}").get("text") for rank in range(self.count)]
        text, rank = str(failure["text"]), int(str(failure["rank"]))
        end = next(end for end in self.ended if end.rank == rank)
        code = end.code if end.code > 0 else 1
        if any(word in text for word in _MEMORY_WORDS):
            text += f" ({self._memory(end)})"
        everywhere = failure["ours"] and all(other == failure["text"] for other in texts)
        who = "" if everywhere else f"{failure['who']} of {self.count} failed {failure['place']}: "
        return Cause(who + text, code, f"{failure['kind']}: {text}", int(str(failure["step"])), hopeless=2 <= code <= 5)

    def _death(self, end: Ended) -> Cause:
        number = signal.Signals(-end.code)
        status = self._status(end.rank)
        text = f"{self._name(end)} was killed by signal {number.value} ({number.name}) {status.place}"
        if number == signal.SIGKILL:
            text += f", {self._memory(end)}"
        outside = number in (signal.SIGKILL, *self._stop_signals) and not self._kernel_killed()
        return Cause(text, 128 + number.value, f"signal {number.value}", status.step, from_outside=outside)

    def _odd_end(self, end: Ended) -> Cause:
        status, mistake = self._status(end.rank), 2 <= end.code <= 5  # before the watch began: it has said so itself
        text = "" if mistake else f"{self._name(end)} ended with exit code {end.code} {status.place}"
        return Cause(text, end.code, f"exit code {end.code}", status.step, hopeless=mistake)

    def _kernel_killed(self) -> bool:
        """Whether the kernel has killed a process for want of memory since the ranks were started."""
        return oom_kills() > self._oom_kills

    def _memory(self, end: Ended) -> str:
        total = memory_limit()
        held = f"{_gib(end.peak_bytes)} of {_gib(total)}"
        if self._kernel_killed() or end.peak_bytes * self.count > 0.7 * total:
            return f"likely out of memory: RSS {held}"
        return f"by someone, or for want of memory: RSS {held}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
