"""Stopping on request: the first signal asks for a clean stop, the second leaves at once.

Signals are counted by a thread behind a wake-up pipe, not by Python-level handlers: those run between two bytecodes of
the main thread, so a second Ctrl-C would wait for a backward pass of many seconds. The thread only needs the
interpreter for a moment, which every long torch call gives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SECOND_SIGNAL_EXIT_CODE = 130


class StopSignals:
    """Listens for `STOP_SIGNALS` from construction to `close`. Made once, before anything slow.

    Python lets only the main thread of a process take signals: in another one nothing is listened for.

    A closed terminal (SIGHUP) is a request like the others, unless `nohup` has had it ignored.

    Args:
        debounce_seconds: signals this soon after the first are taken for the same request. A launcher forwards the
            Ctrl-C that the terminal has already sent to its workers; without a launcher, 0.
        on_request: called with the name of the first signal, from the listening thread; an OSError of it (the
            terminal is gone) is passed over.
    """

    def __init__(self, debounce_seconds: float = 0.0, on_request: Callable[[str], None] | None = None) -> None:
        self._debounce, self._on_request = debounce_seconds, on_request
        self._first: signal.Signals | None = None
        self._first_at = 0.0
        self._closed = threading.current_thread() is not threading.main_thread()
        if self._closed:
            return
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._taken = tuple(number for number in STOP_SIGNALS if number is not signal.SIGHUP or not under_nohup)
        # The pipe comes first: a signal between a handler and its pipe would be taken and never counted.
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous: dict[signal.Signals, Any] = {number: signal.signal(number, _ignore) for number in self._taken}
        # A forked data worker shares the pipe: its own signals must not count as ours, and SIGTERM must end it.
        os.register_at_fork(after_in_child=self._detach)
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    @property
    def requested(self) -> str | None:
        """Name of the first signal received ("SIGINT"), or None."""
        return self._first.name if self._first else None

    def finish(self) -> None:
        """Make `close` ignore signals instead: the exit code of this process is decided, and it is about to exit."""
        if not self._closed:
            self._previous = dict.fromkeys(self._taken, signal.SIG_IGN)

    def close(self) -> None:
        """Restore the previous signal handlers. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._write_end)

    def _listen(self) -> None:
        while True:
            received = os.read(self._read_end, 64)
            if not received:
                os.close(self._read_end)
                return
            for number in received:
                self._count(number)

    def _count(self, number: int) -> None:
        if number not in self._taken:
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._first_at = signal.Signals(number), now
            if self._on_request is not None:
                with contextlib.suppress(OSError):  # this thread must live to hear the second signal
                    self._on_request(self._first.name)
        elif now - self._first_at >= self._debounce:
            os._exit(SECOND_SIGNAL_EXIT_CODE)

    def _detach(self) -> None:
        if self._closed:
            return
        signal.set_wakeup_fd(-1)
        for number in self._taken:
            signal.signal(number, signal.SIG_IGN if number is signal.SIGINT else signal.SIG_DFL)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal without action: Python only wakes the pipe for signals that have a handler."""
