"""Worker processes that turn chunks of text into tokens, in order.

Each worker has a pipe of its own: when it dies, even in the middle of a message, its end closes and the reader sees
the end of the file. (The pool of the standard library shares one pipe among all workers; a worker killed while it
writes leaves half a message there, and the reader waits for the other half for ever.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue

from megalith.data.encoding import ChunkEncoder, EncodedChunk, EncodeSettings
from megalith.data.shares import Located
from megalith.data.sources import Payload
from megalith.errors import DataError, MegalithError

_SECONDS_TO_END = 10.0  # a worker that is told to end and does not is killed


def encode_in_processes(
    settings: EncodeSettings, chunks: Iterable[Located], workers: int
) -> Generator[tuple[Located, EncodedChunk], None, None]:
    """The chunks encoded by `workers` processes, in the order in which they come. Closing it ends the processes.

    Raises:  MegalithError if a process dies; what reading `chunks` raises.
    """
    pool = [_Worker(settings) for _ in range(workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in pool:
        idle.put(worker)

    def encode(located: Located) -> tuple[Located, EncodedChunk]:
        worker = idle.get()
        try:
            return located, worker.encode(located.chunk.payload)
        finally:
            idle.put(worker)

    ahead: deque[Future[tuple[Located, EncodedChunk]]] = deque()
    threads = ThreadPoolExecutor(workers, "encode")
    finished = False
    try:
        for chunk in chunks:
            ahead.append(threads.submit(encode, chunk))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
        finished = True
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in pool:
            worker.end(_SECONDS_TO_END if finished else 0.0)


class _Worker:
    """A process that encodes, seen from the process that started it."""

    def __init__(self, settings: EncodeSettings) -> None:
        # Fresh interpreters: a fork would copy the threads' locks of this one in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, other_end), daemon=True)
        self._process.start()
        other_end.close()  # or this process would hold the pipe of a dead worker open

    def encode(self, payload: Payload) -> EncodedChunk:
        """Tokens of a chunk. Raises MegalithError if the process dies, DataError if it cannot read the file."""
        try:
            self._connection.send(payload)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise MegalithError("a worker process died; if it was killed for its memory, give --workers 1") from error
        if isinstance(answer, str):
            raise DataError(answer)
        assert isinstance(answer, EncodedChunk)
        return answer

    def end(self, seconds: float) -> None:
        """Let the process end by itself for so long, then kill it."""
        if seconds:
            self._connection.close()
            self._process.join(seconds)
        self._process.kill()
        self._process.join()


def _serve(settings: EncodeSettings, parent: Connection[EncodedChunk | str, Payload]) -> None:
    """What a worker process does: leave Ctrl-C to the parent, end with it, encode what comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    encoder = ChunkEncoder(settings)
    while True:
        try:
            payload = parent.recv()
        except EOFError:
            return
        try:
            parent.send(encoder.encode(payload))
        except DataError as error:
            parent.send(str(error))


def _end_with_parent() -> None:
    """Without this, workers of a killed parent that are busy would work on."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
