"""Worker processes of preprocessing live and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess

import pytest

from megalith.data.encoding import ChunkEncoder
from megalith.data.workers import WorkerPool


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_group_is_left_to_the_parent(number: signal.Signals) -> None:
    pool = WorkerPool(object.__new__(ChunkEncoder), 1)
    process = pool._pool[0]._process
    try:
        os.kill(process.pid, number)
        process.join(0.2)
        assert process.is_alive()
        assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        pool.close(finished=False)
    assert not process.is_alive()


def test_workers_end_where_a_further_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = multiprocessing.get_context("fork").Process.start, list[BaseProcess]()

    def start_one(process: BaseProcess) -> None:
        if started:
            raise OSError("no memory for another process")
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", start_one)
    with pytest.raises(OSError, match="no memory"):
        WorkerPool(object.__new__(ChunkEncoder), 2)
    (first,) = started
    assert not first.is_alive()
