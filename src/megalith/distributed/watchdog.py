"""Watchdog: names the rank that a hang or a broken connection comes from.

A thread of each process polls a status board (`board.py`). A rank that waits for others longer than the timeout raises
an alarm; every process that can publishes the Python stack of its main thread, one rank prints them all with the cause
as the last line, and all exit with the code of `PeerError`. Stopped and dead processes are distinguished from busy
ones. If a connection breaks, the rank that lost it determines which rank failed first.

The hot path costs a few assignments per collective and one short write per point of a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from megalith.distributed.board import (
    MESSAGE,
    STORE_SECONDS,
    Board,
    BoardUnavailable,
    Identity,
    Status,
    process_state,
    read_identity,
    to_stderr,
    write_identity,
)
from megalith.distributed.context import Axis, Observer
from megalith.distributed.device_errors import explain, is_of_nccl
from megalith.errors import ConfigError, DeviceError, MegalithError, PeerError

ALARM, CAUSE, FAILURE = "alarm", "cause", "failure"
"""Documents on the board: request for all stacks, reason why the run ended, error of the first rank that failed."""

_GONE_STATES = ("dead", "left", "stopped", "silent")
"""States of a rank that cannot take part any more, the most certain first."""

_FROZEN_SECONDS = 5.0
"""Delay of the polling thread from which this process counts as suspended (stopped, or its machine asleep); most likely
the other ranks were suspended too."""

_STACK_FRAMES = 10
_SECONDS_FOR_STACKS = 2.5
_SECONDS_FOR_CAUSE = 3.0
_CHECK_PEERS_AFTER_SECONDS = 1.0  # waiting time after which a rank checks the board for a failed peer
# gloo raises plain RuntimeErrors: lost connections are recognized by words of the message, without varying capitals.
_PEER_ERROR_WORDS = ("onnection", "Timed out", "timed out", "Read error", "Write error", "Broken pipe", "NCCL", "peer")


@dataclass(frozen=True)
class RankView:
    """Rank as seen from another one."""

    identity: Identity
    status: Status
    # "running", "stopped", "dead", "silent" (its machine or its interpreter does not answer), "left" or "failed" (it
    # has published an error or a broken connection)
    state: str

    def describe(self, now: float, *, same_clock: bool) -> str:
        """Return what the rank does and for how long, in seconds."""
        ends = {
            "stopped": "; the process is stopped",
            "dead": "; the process is dead",
            "silent": "; it does not answer",
        }
        age = f" for {now - self.status.since:.1f} s" if same_clock and self.state not in ("left", "failed") else ""
        return f"{self.status.activity}{age}{ends.get(self.state, '')}"


class Watchdog(Observer):
    """Observer of collectives and of the points of a step, with a thread that detects hangs.

    Args:
        timeout: seconds that a rank may wait for others during steps.
        start_timeout: the same until the first step is complete, while one rank may build what the others need.
        supervised: whether a supervisor reads the board and prints the cause as the last line of the run.

    Attributes:
        on_gpu: whether collectives are asynchronous, so that a rank counts as waiting until its next point or call.
        memory_flags: returns flags with which the run needs less memory, once a step has begun (True) or before.
    """

    def __init__(self, timeout: float, start_timeout: float | None = None, *, supervised: bool = False) -> None:
        self.timeout, self._supervised = timeout, supervised
        self._start_timeout = max(timeout, start_timeout or 0.0)
        self.on_gpu = False
        self.memory_flags: Callable[[bool], Sequence[str]] = lambda in_step: ()
        self._step, self._phase = 0, "start"
        self._operation, self._axis, self._count, self._is_waiting = "-", "-", 0, False
        self._since, self._heartbeat = time.monotonic(), 0
        self._in_collective = False
        self._starting, self._first_step = True, 0
        self._board: Board | None = None
        self._identity, self._size = Identity(0, os.uname().nodename, os.getpid()), 1
        self._done, self._changed = False, threading.Event()
        self._first_rank = "rank 0"
        self._last_run_at = time.monotonic()  # last time at which the polling thread ran
        self._awake_since = 0.0  # `time.monotonic()` at the end of the last suspension
        self._exiting = threading.RLock()  # its holder ends this process

    # Events of the run.

    def at(self, point: str, step: int) -> None:
        """Record that a point of a step is passed (train/faults.py)."""
        if point == "data":
            self._first_step = self._first_step or step
            self._starting = self._starting and step == self._first_step
        self._step, self._phase, self._is_waiting, self._in_collective = step, point, False, False
        self._since = time.monotonic()
        if self._board is not None and self._board.immediate:
            self._board.post(self.status().encode())
        else:
            self._changed.set()

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self._operation, self._axis = operation, axis.name
        self._count += 1
        self.waiting()

    def after(self, operation: str, axis: Axis) -> None:
        self.waited()

    def waiting(self, peer: int | None = None) -> None:
        if peer is not None:
            self._operation, self._axis = MESSAGE, str(peer)
        self._since, self._is_waiting, self._in_collective = time.monotonic(), True, True

    def waited(self) -> None:
        self._since, self._is_waiting = time.monotonic(), False

    def status(self) -> Status:
        waits = self._is_waiting or (self.on_gpu and self._in_collective)
        return Status(
            self._step, self._phase, waits, self._operation, self._axis, self._count, self._since, self._heartbeat
        )

    # Life cycle.

    @contextmanager
    def guard(self, board: Board, rank: int, size: int) -> Iterator[None]:
        """Watch the ranks during the block; a PeerError replaces an exception that another rank has caused."""
        self._board, self._size = board, size
        self._identity = Identity(rank, os.uname().nodename, os.getpid())
        with suppress(BoardUnavailable):
            write_identity(board, self._identity)
            board.post(self.status().encode())
        self._last_run_at = time.monotonic()  # the process may be stopped before the thread first runs
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        thread.start()
        end = "left"
        try:
            yield
        except Exception as error:
            end = "failed"
            self._attribute_failure(error)
            raise
        finally:
            self.at(end, self._step)
            with suppress(BoardUnavailable):
                board.post(self.status().encode())
            self._done = True
            self._changed.set()
            thread.join(3.0)  # a thread in native code would abort the interpreter's shutdown

    @contextmanager
    def name_device_errors(self) -> Iterator[None]:
        """Raise DeviceError, which names rank, step and phase, in place of an error of a GPU or of NCCL."""
        try:
            yield
        except RuntimeError as error:
            if not (what := explain(error, self.memory_flags(self._phase not in ("start", "load")))):
                raise
            where = f"{self._identity} of {self._size} failed {self.status().place}"
            raise DeviceError(what, where, perhaps_of_peer=is_of_nccl(error)) from error

    @property
    def _heartbeat_seconds(self) -> float:
        """Return the seconds between heartbeats."""
        # At least ten heartbeats per timeout; at most 200 posts per second to the store of a large run.
        return min(self.timeout / 10.0, max(1.0, self._size / 200.0))

    def _run(self) -> None:
        board = self._board
        assert board is not None
        troubled = False
        with suppress(BoardUnavailable, RuntimeError):
            self._first_rank = str(read_identity(board, 0))
        while not self._done:
            if self._changed.wait(self._heartbeat_seconds) and not self._done:
                time.sleep(max(0.05, self._size / 2000.0))  # a change reaches the store soon, but not every one does
            self._detect_suspension(self._heartbeat_seconds)
            self._changed.clear()
            try:
                self._beat_once(board)
            except Exception:  # such as no thread left for the store; torch's own timeout would be a day later
                if not troubled or self._is_overdue:
                    to_stderr(f"{self._identity}, {self.status().activity}: {traceback.format_exc()}")
                if self._is_overdue:
                    self._exit()
                troubled = True

    def _detect_suspension(self, expected: float) -> None:
        """Restart all waits if this process was suspended since the last call: it could not answer the others
        meanwhile.

        Args:
            expected: usual seconds between two calls.
        """
        now = time.monotonic()
        if now - self._last_run_at > expected + min(_FROZEN_SECONDS, 0.5 * self.timeout):
            self._awake_since = now
        self._last_run_at = now

    def _beat_once(self, board: Board) -> None:
        """Post the status, read alarms, and raise one if this rank has waited too long."""
        self._heartbeat += 1
        with suppress(BoardUnavailable):
            board.post(self.status().encode())
            if not self._done and board.read(ALARM):
                self._publish_stack()
        if self._waited > _CHECK_PEERS_AFTER_SECONDS:
            with suppress(BoardUnavailable):
                self._exit_if_peer_failed(board)
        self._detect_suspension(0.0 if board.immediate else 2 * STORE_SECONDS)  # both calls above may have timed out
        if self._is_overdue:
            self.raise_alarm()

    @property
    def _waited(self) -> float:
        """Return the seconds that this rank has waited for others, without those in which it was suspended."""
        status = self.status()
        return time.monotonic() - max(status.since, self._awake_since) if status.waits else 0.0

    @property
    def _is_overdue(self) -> bool:
        return self._waited > (self._start_timeout if self._starting else self.timeout)

    # Hangs.

    def raise_alarm(self) -> NoReturn:
        """Collect the stacks of all ranks, print the one that is missing, and exit."""
        with self._exiting:
            try:
                assert self._board is not None
                if self._board.write(ALARM, str(self._identity.rank)):
                    self._report(self._board)
                else:
                    self._publish_stack()
            except BoardUnavailable:
                to_stderr(
                    f"{_stack()}{self._identity} has waited too long, {self.status().activity}; {self._first_rank}, "
                    "which holds the store of the run, does not answer: it is stopped, dead or unreachable"
                )
            self._exit()

    def _publish_stack(self) -> NoReturn:
        """Publish this rank's stack, wait for the report of the rank that raised the alarm, and exit."""
        assert self._board is not None
        with self._exiting:
            with suppress(BoardUnavailable):
                self._board.post(self.status().encode())
                self._board.write(f"stack-{self._identity.rank}", _stack())
                # `_report` waits for stacks, and for 2.5 pauses in each of two `_view_ranks`.
                deadline = time.monotonic() + _SECONDS_FOR_STACKS + 6.0 * self._heartbeat_seconds + 2.0
                while self._board.read(CAUSE) is None and time.monotonic() < deadline:
                    self._heartbeat += 1
                    self._board.post(self.status().encode())
                    time.sleep(0.05)
            self._exit()

    def _report(self, board: Board) -> None:
        own = self.status()
        board.write(f"stack-{self._identity.rank}", _stack())
        views = self._view_ranks(board)
        stacks = self._stacks(board, views)
        views = self._view_ranks(board)
        cause = self._cause(views)
        waited = f"{self._identity} has waited {time.monotonic() - own.since:.1f} s {own.activity}"
        to_stderr("\n".join([f"{waited}. Where every rank is:", *self._stack_lines(views, stacks)]))
        if not self._supervised:
            to_stderr(cause)
        board.write(CAUSE, cause)
        time.sleep(0.2)  # for the others to read it
        for view in views:
            self.kill_stopped(view)
        if not self._supervised:
            board.remove()

    def kill_stopped(self, view: RankView) -> None:
        """Kill a stopped process of this machine, which cannot exit by itself."""
        if view.state == "stopped" and view.identity.host == self._identity.host:
            with suppress(OSError):
                os.kill(view.identity.pid, signal.SIGKILL)

    def find_absent(self) -> tuple[RankView, str] | None:
        """Return a rank that cannot take part any more, with a description; across machines after some heartbeats."""
        if self._board is None or self._done:
            return None
        try:
            views = self._view_ranks(self._board)
        except BoardUnavailable:
            return None
        gone = sorted(
            (view for view in views if view.state in _GONE_STATES), key=lambda view: _GONE_STATES.index(view.state)
        )
        return (gone[0], self._cause(views)) if gone else None

    def find_lost_peer(self) -> str | None:
        """Return a description of the rank that broke a connection; None if it cannot be determined within seconds."""
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while self._board is not None:
            with suppress(BoardUnavailable):
                if text := self._board.read(FAILURE):
                    return self._describe_failure(text)
            found = self.find_absent()
            if found is not None and found[0].state != "stopped":  # a stopped process keeps its connections open
                return found[1]
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return None

    def _stacks(self, board: Board, views: Sequence[RankView]) -> dict[int, str]:
        """Return the stacks of all running ranks, by rank."""
        able = [view.identity.rank for view in views if view.state == "running"]
        deadline = time.monotonic() + _SECONDS_FOR_STACKS
        stacks: dict[int, str] = {}
        while len(stacks) < len(able) and time.monotonic() < deadline:
            for rank in able:
                if rank not in stacks and (text := board.read(f"stack-{rank}")):
                    stacks[rank] = text
            time.sleep(0.02)
        return stacks

    def _stack_lines(self, views: Sequence[RankView], stacks: dict[int, str]) -> list[str]:
        """Return the lines for all ranks with their stacks; ranks at the same place share one."""
        now = time.monotonic()
        groups: dict[tuple[str, str, str], list[RankView]] = {}
        for view in views:
            place = (view.status.activity, view.state, stacks.get(view.identity.rank, ""))
            groups.setdefault(place, []).append(view)
        lines = []
        for (_, _, stack), alike in groups.items():
            names = ", ".join(str(view.identity) for view in alike[:4])
            more = f" and {len(alike) - 4} more" if len(alike) > 4 else ""
            here = alike[0].identity.host == self._identity.host
            lines.append(f"{names}{more}: {alike[0].describe(now, same_clock=here)}")
            lines += [f"    {line}" for line in stack.splitlines()]
        return lines

    def _view_ranks(self, board: Board) -> list[RankView]:
        identities = [read_identity(board, rank) for rank in range(self._size)]
        statuses = [Status.decode(board.status(rank)) for rank in range(self._size)]
        if not board.immediate:  # live ranks of other machines post again in this time
            time.sleep(2.5 * self._heartbeat_seconds)
        views = []
        for identity, before in zip(identities, statuses, strict=True):
            status = Status.decode(board.status(identity.rank)) or Status()
            views.append(RankView(identity, status, self._state(identity, before, status)))
        return views

    def _state(self, identity: Identity, before: Status | None, now: Status) -> str:
        if identity.rank == self._identity.rank:
            return "running"
        if now.phase in ("left", "failed"):
            return now.phase
        if identity.host == self._identity.host:
            kernel = process_state(identity.pid)  # proc(5): T and t stopped, Z zombie, X dead
            return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "": "dead"}.get(kernel, "running")
        return "silent" if before is None or before.beat == now.beat else "running"

    def _cause(self, views: Sequence[RankView]) -> str:
        """Describe the rank that all others wait for: dead, gone or stopped ones first, then the longest busy one."""
        missing = sorted(
            (view for view in views if view.state in _GONE_STATES), key=lambda view: _GONE_STATES.index(view.state)
        )
        busy = sorted(
            (view for view in views if not view.status.waits and view.state != "failed"),
            key=lambda view: view.status.since,
        )
        culprit = next(iter([*missing, *busy]), None)
        if culprit is None:
            places = {view.status.activity for view in views}
            if len(places) == 1:
                return f"all {self._size} ranks wait {places.pop()}: the network between them failed"
            return (
                f"the {self._size} ranks wait for each other in different collectives (above); --debug-collectives "
                "finds the first difference"
            )
        verbs = {"dead": "died", "left": "left the run", "stopped": "is stopped", "silent": "does not answer"}
        verb = verbs.get(culprit.state, "does not take part")
        late = culprit.state in ("dead", "silent") and self._board is not None and not self._board.immediate
        place = f"(last heard of {culprit.status.place})" if late else culprit.status.place
        return f"{culprit.identity} of {self._size} {verb} {place}; the others waited for it"

    def _exit(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(PeerError.exit_code)

    # Failures.

    def _exit_if_peer_failed(self, board: Board) -> None:
        """Exit if another rank has failed: connections that this rank waits on may stay open for a while."""
        if text := board.read(FAILURE):
            with self._exiting:
                cause = self._describe_failure(text)
                if board.write(CAUSE, cause) and not self._supervised:
                    to_stderr(cause)
                self._exit()

    def _describe_failure(self, text: str) -> str:
        failure = json.loads(text)
        return f"{failure['who']} of {self._size} failed first, {failure['place']}: {failure['text']}"

    def _attribute_failure(self, error: Exception) -> None:
        """Publish a failure of this rank, or raise PeerError for the rank that broke the connection."""
        board = self._board
        assert board is not None
        lost = self._is_peer_error(error)
        try:
            if lost and (cause := self._first_cause(board, error)):
                first = board.write(CAUSE, cause)
                raise PeerError(cause, said=self._supervised or not first) from error
            self._publish_failure(board, error)
            if not board.immediate and self._identity.rank == 0:
                time.sleep(
                    _CHECK_PEERS_AFTER_SECONDS + 2 * self._heartbeat_seconds
                )  # the store ends with this process: let others read it
        except BoardUnavailable:
            if lost:
                raise PeerError(
                    f"{self._first_rank} of {self._size}, which holds the store of the run, is gone; {self._identity} "
                    f"was {self.status().activity}"
                ) from error

    def _is_peer_error(self, error: Exception) -> bool:
        if isinstance(error, PeerError):  # raised for a broken connection of an unknown rank
            return isinstance(error.__cause__, RuntimeError)
        if isinstance(error, DeviceError):
            return error.perhaps_of_peer
        if isinstance(error, MegalithError) or not isinstance(error, RuntimeError):
            return False
        return self._is_waiting or any(sign in str(error) for sign in _PEER_ERROR_WORDS)

    def _first_cause(self, board: Board, error: Exception) -> str | None:
        """Return a description of the rank that failed first; None if no other one did."""
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while time.monotonic() < deadline and self._size > 1:
            if text := board.read(FAILURE):
                return self._describe_failure(text)
            if board.read(ALARM):
                self._publish_stack()
            views = self._view_ranks(board)
            if any(view.state in ("dead", "left", "silent") for view in views):
                return self._cause(views)
            time.sleep(0.05)
        # A timeout of the backend: no connection broke, so collect all stacks.
        if "imed out" in str(error) or "imeout" in str(error):
            self.raise_alarm()
        return None

    def _publish_failure(self, board: Board, error: Exception) -> None:
        """Publish that this rank failed. Equal errors of several ranks are printed once."""
        text = error.what if isinstance(error, DeviceError) else str(error)
        if not isinstance(error, MegalithError):
            text = traceback.format_exception_only(error)[-1].strip()
        status = self.status()
        failure = {
            "rank": self._identity.rank,
            "who": str(self._identity),
            "step": status.step,
            "place": status.place,
            "kind": type(error).__name__,
            "text": text,
            "ours": isinstance(error, MegalithError) and not isinstance(error, DeviceError),  # else the rank is named
            "at": time.monotonic(),
        }
        document = json.dumps(failure)
        board.write(f"{FAILURE}-{self._identity.rank}", document)
        first = board.write(FAILURE, document)
        if isinstance(error, MegalithError):
            printed = not first and json.loads(board.read(FAILURE) or "{}").get("text") == text
            # The first rank of each machine prints a ConfigError (cli/main.py).
            error.said = error.said or self._supervised or (printed and not isinstance(error, ConfigError))


def _stack() -> str:
    """Return the stack of the main thread, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_STACK_FRAMES:]) if frame is not None else ""
