"""Chunks of text into tokens, in this process or in several, and the tokens into their files.

A chunk has two moments: it is encoded, and how long it became is told; then, when its turn comes, its place is given
and the process that has its tokens writes them. Until then a process works on the chunks that follow.

Each worker has a pipe of its own: when it dies, even in the middle of a message, its end closes and the reader sees
the end of the file. (The pool of the standard library shares one pipe among all workers; a worker killed while it
writes leaves half a message there, and the reader waits for the other half for ever.)
"""

from __future__ import annotations

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
from megalith.data.output import Partitions, Placement, TokenFile, TokenFiles
from megalith.data.shares import Located
from megalith.data.sources import Payload
from megalith.errors import DataError, MegalithError

_SECONDS_TO_END = 10.0  # a worker that is told to end and does not is killed
_QUEUED = 2  # chunks that a worker has and has not encoded: one at work, one that it need not wait for
_HELD = 4  # chunks that a worker has and has not been given a place for
_SWITCH_SECONDS = 0.0005  # until the thread of a worker that takes chunks from the pipe may do so


@dataclass(frozen=True)
class Turn:
    """A chunk that is encoded and waits for its place; `write` has its tokens written by the end of `settle`."""

    located: Located
    report: ChunkReport
    write: Callable[[Placement], None]


class ThisProcess:
    """One process that does it all."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self._encoder = encoder

    def turns(self, chunks: Iterable[Located], files: TokenFiles) -> Iterator[Turn]:
        for located in chunks:
            chunk = self._encoder.encode(located.chunk.payload)

            def write(placement: Placement, chunk: EncodedChunk = chunk) -> None:
                files.write(chunk, placement)

            yield Turn(located, chunk.report, write)

    def settle(self) -> None:
        """What has been placed is written already."""


class Processes:
    """Worker processes, which begin to start when this is made."""

    def __init__(self, settings: EncodeSettings, workers: int) -> None:
        self._pool = [_Worker(settings) for _ in range(workers)]

    def turns(self, chunks: Iterable[Located], files: TokenFiles) -> Iterator[Turn]:
        """The chunks in their order; each is given its place before the next is asked for.

        Raises:  MegalithError if a process dies, DataError if a file cannot be read or written.
        """
        for worker in self._pool:
            worker.give_files(files)
        ahead: deque[tuple[Located, _Worker]] = deque()
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
                yield Turn(located, worker.reports.popleft(), worker.write)
                continue
            self._receive()

    def settle(self) -> None:
        """Wait until all is written. Raises what `turns` does."""
        for worker in self._pool:
            worker.is_settled = False
            worker.send(_Settled())
        while not all(worker.is_settled for worker in self._pool):
            self._receive()

    def close(self, *, finished: bool) -> None:
        """End the processes, in peace if all is done."""
        for worker in self._pool:
            worker.end(_SECONDS_TO_END if finished else 0.0)

    def _receive(self) -> None:
        by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in self._pool}
        for ready in connection.wait(list(by_connection)):
            by_connection[ready].receive()


Encoders: TypeAlias = ThisProcess | Processes


class _Settled:
    """The answer of a worker that has done all it was asked for."""


class _Worker:
    """A process that encodes and writes, seen from the process that started it."""

    def __init__(self, settings: EncodeSettings) -> None:
        # Fresh interpreters: a fork would copy the threads' locks of this one in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, other_end), daemon=True)
        self._process.start()
        other_end.close()  # or this process would hold the pipe of a dead worker open
        self.reports: deque[ChunkReport] = deque()
        self.queued = self.held = 0
        self.is_settled = True

    @property
    def has_room(self) -> bool:
        """Whether it can be given one more chunk."""
        return self.queued < _QUEUED and self.held < _HELD

    def give_files(self, files: TokenFiles) -> None:
        """Pass on the descriptors, and with them the locks of the files."""
        self.send(([[file.name for file in row] for row in files.files], files.partitions))
        for row in files.files:
            for file in row:
                try:
                    reduction.send_handle(self.connection, file.descriptor, self._process.pid)
                except OSError as error:
                    raise _dead() from error

    def encode(self, payload: Payload) -> None:
        self.send(payload)
        self.queued += 1
        self.held += 1

    def write(self, placement: Placement) -> None:
        """Let it write the oldest chunk that it holds."""
        self.send(placement)
        self.held -= 1

    def receive(self) -> None:
        """Take an answer. Raises MegalithError if the process died, DataError if it cannot read or write a file."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _dead() from error
        if isinstance(answer, str):
            raise DataError(answer)
        if isinstance(answer, _Settled):
            self.is_settled = True
            return
        assert isinstance(answer, ChunkReport)
        self.queued -= 1
        self.reports.append(answer)

    def end(self, seconds: float) -> None:
        """Let the process end by itself for so long, then kill it."""
        self.connection.close()
        if seconds:
            self._process.join(seconds)
        self._process.kill()
        self._process.join()

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise _dead() from error


def _dead() -> MegalithError:
    return MegalithError("a worker process died; if it was killed for its memory, give --workers 1")


def _serve(settings: EncodeSettings, parent: Connection[Any, Any]) -> None:
    """What a worker process does: leave Ctrl-C to the parent, end with it, do what comes in the order it comes in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        encoder = ChunkEncoder(settings)
        files = _received_files(parent)
        # A thread empties the pipe, so that parent and worker never wait for each other to read.
        sys.setswitchinterval(_SWITCH_SECONDS)
        messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_receive_all, args=(parent, messages), daemon=True).start()
        chunks: deque[EncodedChunk] = deque()
        while (message := messages.get()) is not None:
            if isinstance(message, Placement):
                files.write(chunks.popleft(), message)
            elif isinstance(message, _Settled):
                parent.send(message)
            else:
                chunks.append(encoder.encode(message))
                parent.send(chunks[-1].report)
        os._exit(0)  # the parent waits for the end, and to take the encoder apart takes a tenth of a second
    except DataError as error:
        parent.send(str(error))
    except (EOFError, OSError):
        return  # the parent is gone


def _received_files(parent: Connection[Any, Any]) -> TokenFiles:
    names: list[list[str]]
    partitions: Partitions
    names, partitions = parent.recv()
    return TokenFiles([[TokenFile(name, reduction.recv_handle(parent)) for name in row] for row in names], partitions)


def _receive_all(parent: Connection[Any, Any], messages: SimpleQueue[Any]) -> None:
    while True:
        try:
            messages.put(parent.recv())
        except (EOFError, OSError):
            messages.put(None)
            return


def _end_with_parent() -> None:
    """Without this, workers of a killed parent that are busy would work on."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
