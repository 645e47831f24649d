"""The first signal asks, the second leaves, forwarded ones do not count twice, workers do not count at all."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.e2e.small_run import MODEL

from megalith.cli import train
from megalith.train.signals import STOP_SIGNALS, StopSignals


def wait_for(stop: StopSignals, seconds: float = 2.0) -> str | None:
    deadline = time.monotonic() + seconds
    while stop.requested is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return stop.requested


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_counted_as_soon_as_it_no_longer_kills(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = signal.signal

    def signal_at_once(installed: signal.Signals, handler: object) -> object:
        before = install(installed, handler)  # type: ignore[arg-type]
        if installed is number:
            os.kill(os.getpid(), number)
        return before

    monkeypatch.setattr(signal, "signal", signal_at_once)
    stop = StopSignals()
    monkeypatch.undo()
    try:
        assert wait_for(stop) == number.name
    finally:
        stop.close()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    heard: list[str] = []
    stop = StopSignals(on_request=heard.append)
    try:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert wait_for(stop) == number.name
        assert heard == [number.name]
    finally:
        stop.close()


@pytest.mark.parametrize("launcher", ["", "megalith"])
def test_a_launched_rank_ignores_signals_once_its_outcome_is_decided(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_train", lambda *_: 75)
    monkeypatch.setattr(train, "_stop_with_parent", lambda: None)
    monkeypatch.setattr(train, "limit_spinning", lambda _: None)  # sets an environment variable
    monkeypatch.setenv("MEGALITH_LAUNCHER", launcher)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        assert train.run([str(word) for word in [*MODEL, "--mock-data", "--train-iters", 1]]) == 75
        for number in {*STOP_SIGNALS} - {signal.SIGHUP}:  # which nohup ignores anyway
            assert (signal.getsignal(number) is signal.SIG_IGN) is bool(launcher)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_child(debounce: float, pause: float) -> int:
    """Exit code of a process that gets two signals `pause` seconds apart and would end with 7 by itself."""
    child = os.fork()
    if child == 0:
        stop = StopSignals(debounce)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stop)
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_second_signal_leaves_at_once() -> None:
    assert in_child(debounce=0.0, pause=0.0) == 130


def test_a_forwarded_signal_is_the_same_request() -> None:
    assert in_child(debounce=0.3, pause=0.0) == 7
    assert in_child(debounce=0.3, pause=0.4) == 130


def test_a_forked_worker_neither_counts_nor_survives_sigterm() -> None:
    stop = StopSignals()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)  # the terminal's Ctrl-C reaches workers too
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert stop.requested is None
    finally:
        stop.close()


def test_a_terminal_that_is_gone_does_not_deafen() -> None:
    def answer(name: str) -> None:
        raise BrokenPipeError

    child = os.fork()
    if child == 0:
        stop = StopSignals(on_request=answer)
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(stop)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_under_nohup_a_closed_terminal_is_no_request() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignals()
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            assert wait_for(stop, 0.1) is None
        finally:
            stop.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_close_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    StopSignals().close()
    assert signal.getsignal(signal.SIGINT) is before
