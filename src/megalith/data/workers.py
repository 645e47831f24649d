"""Encoding of chunks and writing of their tokens, in this process or in several.

A chunk is handled in two steps: a process encodes it and reports its length; when all earlier chunks are known, the
parent reserves its place and the same process writes the tokens. Meanwhile processes encode later chunks.

Workers are forked where that is safe, so that all of them share what the parent has loaded and start in milliseconds.

Each worker has its own pipe: when it dies, even within a message, its end closes and the reader sees the end of the
file. (The pool of the standard library shares one pipe among all workers: a worker killed while writing leaves half a
message there, and the reader waits for the other half for ever.)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, parent_process, reduction
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, TypeAlias

from megalith.data.encoding import ChunkEncoder, ChunkReport, EncodedChunk, EncodeSettings
from megalith.data.output import ChunkOffsets, Partitions, TokenFile, TokenFiles
from megalith.data.shares import LocatedChunk
from megalith.data.sources import Payload
from megalith.errors import DataError, MegalithError

# Signals that reach a whole group (Ctrl-C, SLURM); the parent decides, and a worker ends with it.
_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SECONDS_TO_END = 10.0  # then a worker that should exit is killed
_QUEUED_CHUNKS = 2  # chunks sent to a worker and not yet encoded: one in work, one waiting
_UNWRITTEN_CHUNKS = 4  # chunks sent to a worker and not yet requested to be written
_SWITCH_SECONDS = 0.0005  # GIL switch interval, so that the thread that reads the pipe is not delayed


@dataclass(frozen=True)
class PendingChunk:
    """Encoded chunk that waits for its place; `write` has its tokens written by the end of `wait_until_written`."""

    located: LocatedChunk
    report: ChunkReport
    write: Callable[[ChunkOffsets], None]


class InProcessEncoder:
    """Encoder in this process."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self._encoder = encoder

    def encode_all(self, chunks: Iterable[LocatedChunk], files: TokenFiles) -> Iterator[PendingChunk]:
        for located in chunks:
            chunk = self._encoder.encode(located.chunk.payload)

            def write(offsets: ChunkOffsets, chunk: EncodedChunk = chunk) -> None:
                files.write(chunk, offsets)

            yield PendingChunk(located, chunk.report, write)

    def wait_until_written(self) -> None:
        """Return at once: reserved chunks are already written."""


def can_fork() -> bool:
    """Return whether workers can be forked: a fork copies the locks of other threads in whatever state they are."""
    return sys.platform == "linux" and threading.active_count() == 1


class WorkerPool:
    """Worker processes, which start when the pool is made: forks share an encoder, spawned ones make their own."""

    def __init__(self, encoder: ChunkEncoder | EncodeSettings, workers: int) -> None:
        self._pool = list[_Worker]()
        try:
            for _ in range(workers):
                self._pool.append(_Worker(encoder))
        except BaseException:
            self.close(finished=False)  # Python would end them with SIGTERM, which they leave to this process
            raise

    def encode_all(self, chunks: Iterable[LocatedChunk], files: TokenFiles) -> Iterator[PendingChunk]:
        """Yield the chunks in order; the place of each must be reserved before the next is requested.

        Raises:  MegalithError if a process dies, DataError if a file cannot be read or written.
        """
        for worker in self._pool:
            worker.give_files(files)
        ahead: deque[tuple[LocatedChunk, _Worker]] = deque()
        coming = iter(chunks)
        exhausted = False
        while True:
            while not exhausted and (worker := min(self._pool, key=attrgetter("queued", "held"))).has_room:
                located = next(coming, None)
                if located is None:
                    exhausted = True
                else:
                    worker.encode(located.chunk.payload)
                    ahead.append((located, worker))
            if not ahead:
                return
            located, worker = ahead[0]
            if worker.reports:
                ahead.popleft()
                yield PendingChunk(located, worker.reports.popleft(), worker.write)
                continue
            self._receive()

    def wait_until_written(self) -> None:
        """Wait until all reserved chunks are written. Raises what `encode_all` does."""
        for worker in self._pool:
            worker.has_written = False
            worker.send(_Written())
        while not all(worker.has_written for worker in self._pool):
            self._receive()

    def close(self, *, finished: bool) -> None:
        """Stop the processes, gracefully if all is done."""
        for worker in self._pool:
            worker.stop(_SECONDS_TO_END if finished else 0.0)

    def _receive(self) -> None:
        by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in self._pool}
        for ready in connection.wait(list(by_connection)):
            by_connection[ready].receive()


Encoder: TypeAlias = InProcessEncoder | WorkerPool


class _Written:
    """Message of a worker: all requests before it are done."""


class _Worker:
    """Worker process, seen from its parent."""

    def __init__(self, encoder: ChunkEncoder | EncodeSettings) -> None:
        context: Any = multiprocessing.get_context("fork" if isinstance(encoder, ChunkEncoder) else "spawn")
        self.connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(encoder, other_end), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)  # a process inherits what is blocked
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()  # or this process would hold the pipe of a dead worker open
        self.reports: deque[ChunkReport] = deque()
        self.queued = self.held = 0
        self.has_written = True

    @property
    def has_room(self) -> bool:
        """Return whether it can take one more chunk."""
        return self.queued < _QUEUED_CHUNKS and self.held < _UNWRITTEN_CHUNKS

    def give_files(self, files: TokenFiles) -> None:
        """Send the file descriptors and, with them, the locks of the files."""
        self.send(([[file.name for file in row] for row in files.files], files.partitions))
        for row in files.files:
            for file in row:
                try:
                    reduction.send_handle(self.connection, file.descriptor, self._process.pid)
                except OSError as error:
                    raise _worker_died() from error

    def encode(self, payload: Payload) -> None:
        self.send(payload)
        self.queued += 1
        self.held += 1

    def write(self, offsets: ChunkOffsets) -> None:
        """Request the oldest unwritten chunk to be written."""
        self.send(offsets)
        self.held -= 1

    def receive(self) -> None:
        """Receive an answer. Raises MegalithError if the process died, DataError if it cannot read or write a file."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _worker_died() from error
        if isinstance(answer, str):
            raise DataError(answer)
        if isinstance(answer, _Written):
            self.has_written = True
            return
        assert isinstance(answer, ChunkReport)
        self.queued -= 1
        self.reports.append(answer)

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to exit, then kill it."""
        if seconds:
            self.send(None)  # closing the pipe is not enough: workers that were forked later hold a copy of this end
            self._process.join(seconds)
        self.connection.close()
        self._process.kill()
        self._process.join()

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise _worker_died() from error


def _worker_died() -> MegalithError:
    return MegalithError("a worker process died; if the kernel killed it for lack of memory, give --workers 1")


def _serve(encoder: ChunkEncoder | EncodeSettings, parent: Connection[Any, Any]) -> None:
    """Run a worker process: exit with the parent, handle messages in order."""
    gc.freeze()  # or the first collection would write to, and so copy, the pages of all objects of the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if isinstance(encoder, EncodeSettings):
            encoder = ChunkEncoder(encoder)
        files = _received_files(parent)
        # A thread empties the pipe, so that parent and worker never wait for each other to read.
        sys.setswitchinterval(_SWITCH_SECONDS)
        messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_receive_messages, args=(parent, messages), daemon=True).start()
        chunks: deque[EncodedChunk] = deque()
        while (message := messages.get()) is not None:
            if isinstance(message, ChunkOffsets):
                files.write(chunks.popleft(), message)
            elif isinstance(message, _Written):
                parent.send(message)
            else:
                chunks.append(encoder.encode(message))
                parent.send(chunks[-1].report)
        os._exit(0)  # the parent waits for the exit, and freeing the encoder takes 0.1 s
    except DataError as error:
        parent.send(str(error))
    except (EOFError, OSError):
        return  # the parent is gone


def _received_files(parent: Connection[Any, Any]) -> TokenFiles:
    names: list[list[str]]
    partitions: Partitions
    names, partitions = parent.recv()
    return TokenFiles([[TokenFile(name, reduction.recv_handle(parent)) for name in row] for row in names], partitions)


def _receive_messages(parent: Connection[Any, Any], messages: SimpleQueue[Any]) -> None:
    while True:
        try:
            messages.put(parent.recv())
        except (EOFError, OSError):
            messages.put(None)
            return


def _end_with_parent() -> None:
    """Exit when the parent is gone: a worker that is busy would otherwise continue."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
