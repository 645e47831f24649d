"""Worker processes of preprocessing live and end with their parent."""

from __future__ import annotations

import os
import signal

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
