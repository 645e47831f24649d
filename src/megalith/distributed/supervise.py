"""Supervisor of the ranks on one machine: starts, signals and awaits processes, and finds the first cause of a failure.

Used by `megalith train --nproc N`. It needs neither torch nor torchrun's agent, which ends the other ranks with the
signal that makes ours save, and reports neither which rank failed first nor the step (docs/decisions).

Ranks are separate programs, or forks of this process, which share the memory pages of its imports.
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
from megalith.distributed.board import FolderBoard, Identity, Status, make_board_folder
from megalith.distributed.machine import memory_limit, oom_kills
from megalith.errors import DeviceError

SECOND_SIGNAL = 130
PEER_FAILED = 6
STOPPED = 75

_GRACE_SECONDS = 10.0  # for the others to determine the cause after the first rank has failed
_GRACE_AFTER_DEATH = 1.0  # the same if a rank was killed: the first cause is known
_GRACE_OF_SECOND_SIGNAL = 0.5  # ranks that can answer end at once; with the debounce this is below two seconds
_DEBOUNCE_SECONDS = 1.1  # workers count two signals within a second as one
_POLL_SECONDS = 0.02
_OOM_WORDS = ("out of memory", "not enough memory", "allocate memory", "MemoryError", "bad_alloc")


@dataclass(frozen=True)
class EndedProcess:
    """Process that has ended."""

    rank: int
    pid: int
    code: int  # exit code, negative for a signal
    peak_bytes: int  # maximum resident memory
    at: float  # `time.monotonic()` at the end
    killed_by_supervisor: bool = False


@dataclass(frozen=True)
class FailureCause:
    """Reason why a run failed."""

    text: str  # message of one or a few lines; empty if a rank has printed it
    exit_code: int  # of the first failing rank, 128 + n for signal n
    kind: str  # equal if the same failure occurs again
    step: int  # of the failure; 0 before the first step
    permanent: bool = False  # a restart would fail in the same way
    external: bool = False  # a rank was killed from outside, which is no fault of the program


@dataclass
class Signals:
    """Signals that the supervisor has received and not yet forwarded."""

    stop_signals: Sequence[signal.Signals]  # signals that request a stop
    received: list[signal.Signals] = field(default_factory=list)  # not yet forwarded
    suspended: bool = False  # whether Ctrl-Z was pressed

    def __enter__(self) -> Signals:
        wanted = (*self.stop_signals, signal.SIGTSTP) if threading.current_thread() is threading.main_thread() else ()
        kept = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._receive) for number in kept}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers. Safe to call again."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self.suspended = True
        else:
            self.received.append(signal.Signals(number))


def suspend_with(signal_groups: Callable[[signal.Signals], None]) -> None:
    """Stop the processes that `signal_groups` reaches and then this one, until it is continued (`fg`, `bg`, SIGCONT).

    The others get SIGSTOP: they are in their own sessions, which a terminal's signals do not reach. This process gets
    SIGTSTP, which the kernel ignores if no shell could continue it (`ssh -t HOST megalith ...`).
    """
    signal_groups(signal.SIGSTOP)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
    signal_groups(signal.SIGCONT)


class ForkedRank(BaseException):
    """Raised in a process that `Attempt` has forked as a rank: leaves the supervisor's stack."""


@dataclass
class _Fork:
    """The part of `subprocess.Popen` that is used here, of a forked process."""

    pid: int
    returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Attempt:
    """One start of all ranks, preceded by `attempt` others; each gets `environ` and the variables of its rank.

    Args:
        command: Program of the ranks; None forks this process, which must have a single thread. In each rank the
            constructor then raises ForkedRank.
    """

    def __init__(
        self, command: Sequence[str] | None, count: int, attempt: int, environ: Mapping[str, str], signals: Signals
    ) -> None:
        self._stop_signals = signals.stop_signals
        self.count, self.ended = count, list[EndedProcess]()
        self.board = FolderBoard(Path(make_board_folder()), of_size=count)
        self.signals: list[signal.Signals] = []
        self._killed: set[int] = set()
        self._signalled_at = 0.0
        self._oom_kills = oom_kills()
        self._running: dict[int, subprocess.Popen[bytes] | _Fork] = {}
        with listen(loopback(), 0, 1024) as listener:
            listener.set_inheritable(True)
            for rank in range(count):
                variables = {**environ, **self._variables(rank, attempt, listener)}
                if command is None:
                    self._running[rank] = _fork(variables, listener, signals)
                    continue
                self._running[rank] = subprocess.Popen(
                    list(command),
                    env=variables,
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
        """Wait until all ranks have ended, forwarding signals; after a failure the others get a grace period."""
        try:
            while self._running:
                if signals.suspended:
                    signals.suspended = False
                    suspend_with(self._signal_groups)
                self._forward(signals, say)
                self._reap()
                if self._grace_is_over():
                    self._kill()
                time.sleep(_POLL_SECONDS)
        finally:
            self._kill()
            self._reap(hang=True)
            for pid in self._pids.values():  # processes that a rank has started
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _forward(self, signals: Signals, say: Callable[[str], None]) -> None:
        if not signals.received:
            return
        if not self.signals:
            activity = "finishing this step and saving" if self._last_step() else "stopping before the first step"
            say(f"\n{signals.received[0].name}: {activity}; repeat to exit at once")
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
                EndedProcess(
                    rank, pid, process.returncode, usage.ru_maxrss * unit, time.monotonic(), killed_by_supervisor=killed
                )
            )
            del self._running[rank]

    def _grace_is_over(self) -> bool:
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

    # The cause of a failure.

    @property
    def stopped(self) -> int | None:
        """Return the exit code of ranks that ended as requested; None if a rank failed."""
        codes = {end.code for end in self.ended}
        if codes <= {0, STOPPED}:
            return max(codes)
        if len(self.signals) > 1 and codes <= {0, STOPPED, SECOND_SIGNAL, -signal.SIGKILL}:
            return SECOND_SIGNAL
        without_save = {128 + number for number in self._stop_signals}
        if len(codes) == 1 and codes <= without_save:
            return codes.pop()
        if self.signals and not self._last_step():  # ranks start at different speeds: some miss a rank that has stopped
            number, own = self.signals[0], {end.code for end in self.ended if not end.killed_by_supervisor}
            return 128 + number if own <= {0, STOPPED, PEER_FAILED, 128 + number, -number} else None
        return None

    def cause(self) -> FailureCause:
        """Return the first failure of an attempt that was not `stopped`."""
        bad = [end for end in self.ended if end.code not in (0, STOPPED)]
        failure = json.loads(self.board.read("failure") or "null")
        died = next((end for end in bad if end.code < 0 and not end.killed_by_supervisor), None)
        if self.board.read("alarm") and (hang := self.board.read("cause")):
            return FailureCause(hang, PEER_FAILED, "hang", self._last_step())
        if failure is not None and (died is None or failure["at"] <= died.at):
            return self._cause_of_exception(failure)
        if died is not None:
            return self._cause_of_signal(died)
        odd = next((end for end in bad if end.code != PEER_FAILED and not end.killed_by_supervisor), None)
        if odd is not None:
            return self._cause_of_exit_code(odd)
        text = self.board.read("cause") or f"{self._name(bad[0])} lost the connection to the other ranks"
        return FailureCause(text, PEER_FAILED, "lost", self._last_step())

    def _name(self, end: EndedProcess) -> str:
        return f"{Identity(end.rank, socket.gethostname(), end.pid)} of {self.count}"

    def _status(self, rank: int) -> Status:
        return Status.decode(self.board.status(rank)) or Status()

    def _last_step(self) -> int:
        return max(self._status(rank).step for rank in range(self.count))

    def _cause_of_exception(self, failure: Mapping[str, object]) -> FailureCause:
        texts = [json.loads(self.board.read(f"failure-{rank}") or "{}").get("text") for rank in range(self.count)]
        text, rank = str(failure["text"]), int(str(failure["rank"]))
        end = next(end for end in self.ended if end.rank == rank)
        code = end.code if end.code > 0 else 1
        if failure["kind"] != DeviceError.__name__ and any(word in text for word in _OOM_WORDS):  # of the host
            text += f" ({self._memory_text(end)})"
        everywhere = failure["ours"] and all(other == failure["text"] for other in texts)
        who = "" if everywhere else f"{failure['who']} of {self.count} failed {failure['place']}: "
        return FailureCause(
            who + text, code, f"{failure['kind']}: {text}", int(str(failure["step"])), permanent=2 <= code <= 5
        )

    def _cause_of_signal(self, end: EndedProcess) -> FailureCause:
        number = signal.Signals(-end.code)
        status = self._status(end.rank)
        text = f"{self._name(end)} was killed by signal {number.value} ({number.name}) {status.place}"
        if number == signal.SIGKILL:
            text += f", {self._memory_text(end)}"
        outside = number in (signal.SIGKILL, *self._stop_signals) and not self._oom_killed()
        return FailureCause(text, 128 + number.value, f"signal {number.value}", status.step, external=outside)

    def _cause_of_exit_code(self, end: EndedProcess) -> FailureCause:
        status, mistake = (
            self._status(end.rank),
            2 <= end.code <= 5,
        )  # before the watchdog started: the rank has printed it
        text = "" if mistake else f"{self._name(end)} ended with exit code {end.code} {status.place}"
        return FailureCause(text, end.code, f"exit code {end.code}", status.step, permanent=mistake)

    def _oom_killed(self) -> bool:
        """Return whether the OOM killer has ended a process since the ranks were started."""
        return oom_kills() > self._oom_kills

    def _memory_text(self, end: EndedProcess) -> str:
        total = memory_limit()
        held = f"{_gib(end.peak_bytes)} of {_gib(total)}"
        if self._oom_killed() or end.peak_bytes * self.count > 0.7 * total:
            return f"likely out of memory: RSS {held}"
        return f"from outside, or out of memory: RSS {held}"


def _fork(variables: Mapping[str, str], listener: socket.socket, signals: Signals) -> _Fork:
    """Fork a rank as a session of its own; raise ForkedRank in it."""
    blocked = (*signals.stop_signals, signal.SIGTSTP)  # the rank must not take them for signals to this process
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is buffered must not be written twice
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    pid = os.fork()
    if pid == 0:
        signals.restore()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return _Fork(pid)
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(variables)
    if "MEGALITH_STORE_FD" in variables:  # the supervisor's copy is closed after the constructor
        os.environ["MEGALITH_STORE_FD"] = str(os.dup(listener.fileno()))
    raise ForkedRank


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
