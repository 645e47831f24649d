"""No hang without a named rank: every rank says what it does, and the first to see that another one is missing reports.

A thread of each process looks at a board (`board.py`). A rank that waits for others longer than the timeout sounds an
alarm; every process that can answers with the Python stack of its main thread, one prints them all with the cause as
the last line, and all leave with the exit code of `PeerError`. A process that is stopped or dead is told from one that
is busy elsewhere. When a connection breaks instead, the rank that lost it finds out which rank failed first.

The hot path costs a few assignments for each collective and one short line for each point of a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from megalith.distributed.board import (
    MESSAGE,
    STORE_SECONDS,
    Board,
    BoardGone,
    Identity,
    Status,
    process_state,
    read_identity,
    to_stderr,
    write_identity,
)
from megalith.distributed.context import Axis, Observer
from megalith.errors import ConfigError, MegalithError, PeerError

ALARM, CAUSE, FAILURE = "alarm", "cause", "failure"
"""Documents on the board: that all shall show their stacks, why the run ended, the error of the first rank that had
one."""

_GONE = ("dead", "left", "stopped", "silent")
"""States of a rank that all others wait for in vain, the surest sign first."""

_FROZEN_SECONDS = 5.0
"""A pause of the thread that looks, beyond its own, after which this process was not running: it was stopped, or its
machine suspended, and most likely the other ranks with it."""

_STACK_FRAMES = 10
_SECONDS_FOR_STACKS = 2.5
_SECONDS_FOR_CAUSE = 3.0
_SECONDS_TO_FOLLOW = 1.0  # after so long a wait a rank asks the board whether another one has failed
# gloo raises plain RuntimeErrors: a lost connection is known by its words alone, capitals cut off where they vary.
_SIGNS_OF_A_PEER = ("onnection", "Timed out", "timed out", "Read error", "Write error", "Broken pipe", "NCCL", "peer")


@dataclass(frozen=True)
class View:
    """A rank, seen from another one."""

    identity: Identity
    status: Status
    # "running", "stopped", "dead", "silent" (its machine or its interpreter does not answer), "left", or "failed" (it
    # has reported an error of its own, or a broken connection)
    state: str

    def describe(self, now: float, *, same_clock: bool) -> str:
        """What the rank does, and for how long."""
        ends = {
            "stopped": "; the process is stopped",
            "dead": "; the process is dead",
            "silent": "; it does not answer",
        }
        age = f" for {now - self.status.since:.1f} s" if same_clock and self.state not in ("left", "failed") else ""
        return f"{self.status.doing}{age}{ends.get(self.state, '')}"


class Watch(Observer):
    """Observer of collectives and of the points of a step, and the thread that looks after both.

    Args:
        timeout: seconds that a rank may wait for others in the steps of a run.
        start_timeout: the same until the first step is done, where one rank may build what the others wait for.
        supervised: whether a supervisor reads the board and says the cause as the last words of the run.

    Attributes:
        on_gpu: collectives run in the background, so that a wait shows only in that nothing more happens.
    """

    def __init__(self, timeout: float, start_timeout: float | None = None, *, supervised: bool = False) -> None:
        self.timeout, self._supervised = timeout, supervised
        self._start_timeout = max(timeout, start_timeout or 0.0)
        self.on_gpu = False
        self._step, self._phase = 0, "start"
        self._operation, self._axis, self._count, self._waits = "-", "-", 0, False
        self._since, self._beat = time.monotonic(), 0
        self._in_collective = False
        self._starting, self._first_step = True, 0
        self._board: Board | None = None
        self._identity, self._size = Identity(0, os.uname().nodename, os.getpid()), 1
        self._done, self._changed = False, threading.Event()
        self._first_rank = "rank 0"
        self._ran_at = time.monotonic()  # when the thread that looks last noticed that the process runs
        self._awake_since = 0.0  # `time.monotonic()` at the end of the last time that this process did not run
        self._leaving = threading.RLock()  # the thread that has it ends this process

    # What the run tells.

    def at(self, point: str, step: int) -> None:
        """A point of a step is passed (train/faults.py)."""
        if point == "data":
            self._first_step = self._first_step or step
            self._starting = self._starting and step == self._first_step
        self._step, self._phase, self._waits, self._in_collective = step, point, False, False
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
        self._since, self._waits, self._in_collective = time.monotonic(), True, True

    def waited(self) -> None:
        self._since, self._waits = time.monotonic(), False

    def status(self) -> Status:
        waits = self._waits or (self.on_gpu and self._in_collective)
        return Status(self._step, self._phase, waits, self._operation, self._axis, self._count, self._since, self._beat)

    # The life of the watch.

    @contextmanager
    def attend(self, board: Board, rank: int, size: int) -> Iterator[None]:
        """Look after the block; a PeerError replaces an exception of the block that another rank has caused."""
        self._board, self._size = board, size
        self._identity = Identity(rank, os.uname().nodename, os.getpid())
        with suppress(BoardGone):
            write_identity(board, self._identity)
            board.post(self.status().encode())
        self._ran_at = time.monotonic()  # here: the process may be stopped before the thread first runs
        looking = threading.Thread(target=self._look, name="watch", daemon=True)
        looking.start()
        end = "left"
        try:
            yield
        except Exception as error:
            end = "failed"
            self._explain(error)
            raise
        finally:
            self.at(end, self._step)
            with suppress(BoardGone):
                board.post(self.status().encode())
            self._done = True
            self._changed.set()
            looking.join(3.0)  # a thread in native code would abort the end of the interpreter

    @property
    def _pause(self) -> float:
        """Seconds between two beats."""
        # At least ten beats in a timeout; in large runs at most 200 posts a second reach the one store.
        return min(self.timeout / 10.0, max(1.0, self._size / 200.0))

    def _look(self) -> None:
        board = self._board
        assert board is not None
        troubled = False
        with suppress(BoardGone, RuntimeError):
            self._first_rank = str(read_identity(board, 0))
        while not self._done:
            if self._changed.wait(self._pause) and not self._done:
                time.sleep(max(0.05, self._size / 2000.0))  # a store hears of a change soon, but not of every one
            self._notice_pause(self._pause)
            self._changed.clear()
            try:
                self._beat_once(board)
            except Exception:  # such as no thread left to ask the store with; torch alone would wait for a day
                if not troubled or self._overdue:
                    to_stderr(f"{self._identity}, {self.status().doing}: {traceback.format_exc()}")
                if self._overdue:
                    self._leave()
                troubled = True

    def _notice_pause(self, expected: float) -> None:
        """Start all waits anew if this process did not run since the last call: others could not answer it meanwhile.

        Args:
            expected: seconds that the calls are apart while the process runs.
        """
        now = time.monotonic()
        if now - self._ran_at > expected + min(_FROZEN_SECONDS, 0.5 * self.timeout):
            self._awake_since = now
        self._ran_at = now

    def _beat_once(self, board: Board) -> None:
        """Post the status, read whether there is an alarm, and sound one if this rank has waited too long."""
        self._beat += 1
        with suppress(BoardGone):
            board.post(self.status().encode())
            if not self._done and board.read(ALARM):
                self._answer()
        if self._waited > _SECONDS_TO_FOLLOW:
            with suppress(BoardGone):
                self._follow(board)
        self._notice_pause(0.0 if board.immediate else 2 * STORE_SECONDS)  # both of the above may ask in vain
        if self._overdue:
            self.sound_alarm()

    @property
    def _waited(self) -> float:
        """Seconds that this rank has waited for others, without those in which it did not run."""
        status = self.status()
        return time.monotonic() - max(status.since, self._awake_since) if status.waits else 0.0

    @property
    def _overdue(self) -> bool:
        return self._waited > (self._start_timeout if self._starting else self.timeout)

    # A hang.

    def sound_alarm(self) -> NoReturn:
        """Have every rank show its stack, say who is missing, and leave."""
        with self._leaving:
            try:
                assert self._board is not None
                if self._board.write(ALARM, str(self._identity.rank)):
                    self._report(self._board)
                else:
                    self._answer()
            except BoardGone:
                to_stderr(
                    f"{_stack()}{self._identity} has waited too long, {self.status().doing}; {self._first_rank}, which "
                    "holds the store of the run, does not answer either: it is stopped, dead or cut off"
                )
            self._leave()

    def _answer(self) -> NoReturn:
        """Show this rank's stack to the one that reports; wait for its report, and leave."""
        assert self._board is not None
        with self._leaving:
            with suppress(BoardGone):
                self._board.post(self.status().encode())
                self._board.write(f"stack-{self._identity.rank}", _stack())
                # `_report` waits for stacks, and for 2.5 pauses in each of two `_views`.
                deadline = time.monotonic() + _SECONDS_FOR_STACKS + 6.0 * self._pause + 2.0
                while self._board.read(CAUSE) is None and time.monotonic() < deadline:
                    self._beat += 1
                    self._board.post(self.status().encode())
                    time.sleep(0.05)
            self._leave()

    def _report(self, board: Board) -> None:
        own = self.status()
        board.write(f"stack-{self._identity.rank}", _stack())
        views = self._views(board)
        stacks = self._stacks(board, views)
        views = self._views(board)
        cause = self._cause(views)
        waited = f"{self._identity} has waited {time.monotonic() - own.since:.1f} s {own.doing}"
        to_stderr("\n".join([f"{waited}. Where every rank is:", *self._lines(views, stacks)]))
        if not self._supervised:
            to_stderr(cause)
        board.write(CAUSE, cause)
        time.sleep(0.2)  # the others read it
        for view in views:
            self.dismiss(view)
        if not self._supervised:
            board.remove()

    def dismiss(self, view: View) -> None:
        """End a process of this machine that is stopped: it could not leave by itself."""
        if view.state == "stopped" and view.identity.host == self._identity.host:
            with suppress(OSError):
                os.kill(view.identity.pid, signal.SIGKILL)

    def absent(self) -> tuple[View, str] | None:
        """A rank that can take part in nothing now, with what to say of it; over several machines a few beats late."""
        if self._board is None or self._done:
            return None
        try:
            views = self._views(self._board)
        except BoardGone:
            return None
        gone = sorted((view for view in views if view.state in _GONE), key=lambda view: _GONE.index(view.state))
        return (gone[0], self._cause(views)) if gone else None

    def blame(self) -> str | None:
        """Return which rank a broken connection comes from, as soon as that shows; None if it does not in seconds."""
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while self._board is not None:
            with suppress(BoardGone):
                if text := self._board.read(FAILURE):
                    return self._failed_first(text)
            found = self.absent()
            if found is not None and found[0].state != "stopped":  # a stopped process keeps its connections open
                return found[1]
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return None

    def _stacks(self, board: Board, views: Sequence[View]) -> dict[int, str]:
        """The stacks of all ranks that can show one."""
        able = [view.identity.rank for view in views if view.state == "running"]
        deadline = time.monotonic() + _SECONDS_FOR_STACKS
        stacks: dict[int, str] = {}
        while len(stacks) < len(able) and time.monotonic() < deadline:
            for rank in able:
                if rank not in stacks and (text := board.read(f"stack-{rank}")):
                    stacks[rank] = text
            time.sleep(0.02)
        return stacks

    def _lines(self, views: Sequence[View], stacks: dict[int, str]) -> list[str]:
        """Every rank with its stack; ranks that are at the same place are said together."""
        now = time.monotonic()
        groups: dict[tuple[str, str, str], list[View]] = {}
        for view in views:
            place = (view.status.doing, view.state, stacks.get(view.identity.rank, ""))
            groups.setdefault(place, []).append(view)
        lines = []
        for (_, _, stack), alike in groups.items():
            names = ", ".join(str(view.identity) for view in alike[:4])
            more = f" and {len(alike) - 4} more" if len(alike) > 4 else ""
            here = alike[0].identity.host == self._identity.host
            lines.append(f"{names}{more}: {alike[0].describe(now, same_clock=here)}")
            lines += [f"    {line}" for line in stack.splitlines()]
        return lines

    def _views(self, board: Board) -> list[View]:
        identities = [read_identity(board, rank) for rank in range(self._size)]
        statuses = [Status.decode(board.status(rank)) for rank in range(self._size)]
        if not board.immediate:  # a rank of another machine that lives has posted again by then
            time.sleep(2.5 * self._pause)
        views = []
        for identity, before in zip(identities, statuses, strict=True):
            status = Status.decode(board.status(identity.rank)) or Status()
            views.append(View(identity, status, self._state(identity, before, status)))
        return views

    def _state(self, identity: Identity, before: Status | None, now: Status) -> str:
        if identity.rank == self._identity.rank:
            return "running"
        if now.phase in ("left", "failed"):
            return now.phase
        if identity.host == self._identity.host:
            kernel = process_state(identity.pid)  # letters of proc(5): T and t stopped, Z zombie, X dead, "" no process
            return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "": "dead"}.get(kernel, "running")
        return "silent" if before is None or before.beat == now.beat else "running"

    def _cause(self, views: Sequence[View]) -> str:
        """The rank that all others wait for: dead, gone or stopped ones first, then the one busy elsewhere longest."""
        absent = sorted((view for view in views if view.state in _GONE), key=lambda view: _GONE.index(view.state))
        busy = sorted(
            (view for view in views if not view.status.waits and view.state != "failed"),
            key=lambda view: view.status.since,
        )
        culprit = next(iter([*absent, *busy]), None)
        if culprit is None:
            places = {view.status.doing for view in views}
            if len(places) == 1:
                return f"all {self._size} ranks wait {places.pop()}: the network between them failed"
            return (
                f"the {self._size} ranks wait for each other in different collectives (above); --debug-collectives "
                "finds where they parted"
            )
        verbs = {"dead": "died", "left": "left the run", "stopped": "is stopped", "silent": "does not answer"}
        verb = verbs.get(culprit.state, "does not take part")
        late = culprit.state in ("dead", "silent") and self._board is not None and not self._board.immediate
        place = f"(last heard of {culprit.status.place})" if late else culprit.status.place
        return f"{culprit.identity} of {self._size} {verb} {place}; the others waited for it"

    def _leave(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(PeerError.exit_code)

    # A failure.

    def _follow(self, board: Board) -> None:
        """Leave if another rank has failed that this one still waits for: its connections may stay open for a while."""
        if text := board.read(FAILURE):
            with self._leaving:
                cause = self._failed_first(text)
                if board.write(CAUSE, cause) and not self._supervised:
                    to_stderr(cause)
                self._leave()

    def _failed_first(self, text: str) -> str:
        failure = json.loads(text)
        return f"{failure['who']} of {self._size} failed first, {failure['place']}: {failure['text']}"

    def _explain(self, error: Exception) -> None:
        """Tell the others what failed here, or find out which rank broke the connection: then a PeerError."""
        board = self._board
        assert board is not None
        lost = self._lost_a_peer(error)
        try:
            if lost and (cause := self._first_cause(board, error)):
                first = board.write(CAUSE, cause)
                raise PeerError(cause, said=self._supervised or not first) from error
            self._admit(board, error)
            if not board.immediate and self._identity.rank == 0:
                time.sleep(_SECONDS_TO_FOLLOW + 2 * self._pause)  # the store goes with this process: let others read
        except BoardGone:
            if lost:
                raise PeerError(
                    f"{self._first_rank} of {self._size}, which holds the store of the run, is gone; {self._identity} "
                    f"was {self.status().doing}"
                ) from error

    def _lost_a_peer(self, error: Exception) -> bool:
        if isinstance(error, PeerError):  # of whoever met a broken connection and does not know whose
            return isinstance(error.__cause__, RuntimeError)
        if isinstance(error, MegalithError) or not isinstance(error, RuntimeError):
            return False
        return self._waits or any(sign in str(error) for sign in _SIGNS_OF_A_PEER)

    def _first_cause(self, board: Board, error: Exception) -> str | None:
        """Who failed first; None if it was no one else."""
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while time.monotonic() < deadline and self._size > 1:
            if text := board.read(FAILURE):
                return self._failed_first(text)
            if board.read(ALARM):
                self._answer()
            views = self._views(board)
            if any(view.state in ("dead", "left", "silent") for view in views):
                return self._cause(views)
            time.sleep(0.05)
        # A timeout of the backend itself: nobody broke a connection, so ask everybody.
        if "imed out" in str(error) or "imeout" in str(error):
            self.sound_alarm()
        return None

    def _admit(self, board: Board, error: Exception) -> None:
        """Say on the board that this rank failed. Of equal errors on several ranks one is printed."""
        text = str(error) if isinstance(error, MegalithError) else traceback.format_exception_only(error)[-1].strip()
        status = self.status()
        failure = {
            "rank": self._identity.rank,
            "who": str(self._identity),
            "step": status.step,
            "place": status.place,
            "kind": type(error).__name__,
            "text": text,
            "ours": isinstance(error, MegalithError),
            "at": time.monotonic(),
        }
        document = json.dumps(failure)
        board.write(f"{FAILURE}-{self._identity.rank}", document)
        first = board.write(FAILURE, document)
        if isinstance(error, MegalithError):
            printed = not first and json.loads(board.read(FAILURE) or "{}").get("text") == text
            # Of a ConfigError the first rank of each machine speaks (cli/main.py).
            error.said = error.said or self._supervised or (printed and not isinstance(error, ConfigError))


def _stack() -> str:
    """Where the main thread of this process is, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_STACK_FRAMES:]) if frame is not None else ""
