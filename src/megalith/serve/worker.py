"""The thread that steps an engine, its answers as asyncio streams, and a watchdog of the ranks that share the model.

A process that has the whole model steps the engine in its main thread, and runs the event loop in another
(`serve_beside`). libgomp counts the threads of all teams: with a second team beside that of the main thread, which
loaded the model, there are more threads than cores, and then idle threads sleep at once. On two cores a token of a 124M
model in bf16 took 14 ms in another thread and 11.5 in the main thread.

Only this thread uses the engine. Between two steps it executes submitted commands; events are passed to the event
loop once per step. After many events the next step waits until they are sent; otherwise loop and engine contend for the
GIL at every packet. An idle engine steps twice a second as a heartbeat for other ranks.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

from megalith.distributed.watchdog import Watchdog
from megalith.errors import DeviceError, MegalithError, PeerError
from megalith.serve.engine import Engine, RequestHandle, Stats
from megalith.serve.request import Event, Finished, Request

_IDLE_SECONDS, _SECONDS_TO_END = 0.5, 10.0
_MANY, _SECONDS_TO_SEND = 4, 0.01
"""Number of events from which a step waits until they are sent (for one event this only adds two wake-ups to each
token), and the maximum wait, so that a busy event loop does not delay the engine."""


NameErrors = Callable[[], AbstractContextManager[object]]
"""Returns a context that raises errors of a device as messages."""


class WorkerFailed(MegalithError):
    """The engine has failed; no further request can be served."""


class Answer:
    """Asynchronous iterator over the events of one request; ends after the last `Finished`."""

    def __init__(self, request: Request, cancel: Callable[[Answer], None]) -> None:
        # samples that the engine still computes; used by its thread only
        self.left = 1 if request.beam_width else request.n
        self._open = set(range(self.left))
        self._cancel, self._events = cancel, asyncio.Queue[Event]()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._stream()

    async def _stream(self) -> AsyncIterator[Event]:
        while self._open or not self._events.empty():
            yield await self._events.get()

    def put(self, event: Event) -> None:
        """Add an event. Call it on the event loop."""
        if isinstance(event, Finished):
            self._open.discard(event.sample)
        self._events.put_nowait(event)

    def fail(self, message: str) -> None:
        """End all open samples with an error. Call it on the event loop."""
        for sample in sorted(self._open):
            self.put(Finished("error", message, sample=sample))

    def cancel(self) -> None:
        """Cancel the request. Safe to call at any time and more than once."""
        if self._open:
            self._cancel(self)


class Worker:
    """Steps an engine from `start` or `run` to `close`. Construct and use it (but for `run`) on a running event loop.

    `find_lost_peer` finds out which of the ranks that share the model broke a connection; the engine runs in a context
    of `name_errors`, such as `Watchdog.name_device_errors`. `failure` says why nothing can be served any more; None
    while all is well.
    """

    def __init__(
        self,
        engine: Engine,
        find_lost_peer: Callable[[], str | None] | None = None,
        name_errors: NameErrors = nullcontext,
    ) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._blame, self._name_errors = find_lost_peer or (lambda: None), name_errors
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[RequestHandle, Answer] = {}
        self._handles: dict[Answer, RequestHandle] = {}
        self._sent = threading.Event()
        self._stats, self._failure = engine.stats(), self._loop.create_future()
        self.ended = threading.Event()
        self.failure: str | None = None

    def start(self) -> Worker:
        """Start a thread that steps the engine; return the worker."""
        threading.Thread(target=self.run, name="engine", daemon=True).start()
        return self

    async def submit(self, request: Request) -> Answer:
        """Submit a request. Raise RequestError, QueueFullError, or WorkerFailed if the engine has failed."""
        answer = Answer(request, self._request_cancel)

        def submit(engine: Engine) -> None:
            handle = engine.submit(request)
            self._answers[handle], self._handles[answer] = answer, handle

        try:
            await self.call(submit)
        except asyncio.CancelledError:
            self._request_cancel(answer)
            raise
        return answer

    async def call(self, command: Callable[[Engine], None]) -> None:
        """Execute a command between two steps; raise its MegalithError, or WorkerFailed if the engine has failed."""
        if self.failure is not None:
            raise WorkerFailed(self.failure)
        done: asyncio.Future[None] = self._loop.create_future()

        def execute() -> None:
            try:
                command(self._engine)
            except MegalithError as error:
                self._post(_settle, done, error)
            else:
                self._post(_settle, done, None)

        self._inbox.put(execute)
        await asyncio.wait({done, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise WorkerFailed(self._failure.result())
        done.result()

    def stats(self) -> Stats:
        """Return the engine's counters after its last step."""
        return self._stats

    @property
    def full(self) -> bool:
        """True if another request would raise QueueFullError, by the counters of the last step."""
        return self._stats.waiting >= self._engine.limits.max_waiting

    async def failed(self) -> str:
        """Wait until the engine fails; return the reason."""
        message: str = await asyncio.shield(self._failure)
        return message

    def fail(self, message: str) -> None:
        """End all answers with an error. Call it on the event loop; the engine's thread may hang."""
        if self.failure is not None:
            return
        self.failure = message
        self._failure.set_result(message)
        for answer in list(self._answers.values()):
            answer.fail(message)

    def close(self) -> None:
        """End `run` and the loops of the other ranks, without waiting for a failed engine."""
        self._inbox.put(None)
        if self.failure is None:
            self.ended.wait(_SECONDS_TO_END)

    def _request_cancel(self, answer: Answer) -> None:
        def cancel() -> None:
            handle = self._handles.get(answer)
            if handle is not None:
                self._engine.cancel(handle)

        self._inbox.put(cancel)

    # --- the thread ---

    def run(self) -> None:
        """Step the engine in this thread until `close` or a failure of the engine."""
        try:
            with self._name_errors():
                while self._take_inbox():
                    self._step()
                self._engine.close()
        except BaseException as error:  # of any kind: afterwards no request would be answered
            self._fail(error)
        finally:
            self.ended.set()

    def _step(self) -> None:
        found = [(self._answers[handle], event) for handle, event in self._engine.step()]
        self._stats = self._engine.stats()
        if found:
            for answer, event in found:
                if isinstance(event, Finished):
                    answer.left -= 1
                    if not answer.left:
                        del self._answers[self._handles.pop(answer)]
            self._sent.clear()
            self._post(self._deliver, found)
            if len(found) >= _MANY:
                self._sent.wait(_SECONDS_TO_SEND)

    def _take_inbox(self) -> bool:
        """Execute the submitted commands, waiting for one if the engine is idle; return False at the end."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(timeout=_IDLE_SECONDS) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _fail(self, error: BaseException) -> None:
        of_peer = isinstance(error, PeerError) or (isinstance(error, DeviceError) and error.perhaps_of_peer)
        culprit = self._blame() if of_peer else None
        self._post(self.fail, culprit or str(error) or type(error).__name__)
        if not isinstance(error, MegalithError):
            traceback.print_exception(error)

    def _post(self, what: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(what, *arguments)

    # --- the event loop ---

    def _deliver(self, found: list[tuple[Answer, Event]]) -> None:
        for answer, event in found:
            answer.put(event)
        self._loop.call_soon(self._sent.set)  # after the tasks that wait for these events


Outcome = TypeVar("Outcome")


def serve_beside(
    engine: Engine,
    serving: Callable[[Worker], Coroutine[object, object, Outcome]],
    name_errors: NameErrors = nullcontext,
) -> Outcome:
    """Step the engine in this thread while `serving(worker)` runs on an event loop in another; return its outcome.

    `name_errors` as of `Worker`.

    If a device hangs and the last step does not return, the process exits with the exit code of `PeerError`.
    """
    made: Future[Worker] = Future()
    outcome: Future[Outcome] = Future()

    async def on_loop() -> Outcome:
        made.set_result(Worker(engine, name_errors=name_errors))
        try:
            return await serving(made.result())
        finally:
            made.result().close()

    def run_loop() -> None:
        try:
            outcome.set_result(asyncio.run(on_loop()))
        except BaseException as error:
            outcome.set_exception(error)
        if not made.result().ended.wait(_SECONDS_TO_END):
            print("the engine does not return from its last step", file=sys.stderr, flush=True)
            os._exit(PeerError.exit_code)

    threading.Thread(target=run_loop, name="event loop", daemon=True).start()
    made.result().run()
    return outcome.result()


def _settle(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


_SECONDS_BETWEEN_LOOKS = 0.5
_PATIENCE_SECONDS = 3.0
"""Time that a process may be stopped: after Ctrl-Z, `fg` does not resume all processes of a terminal at once."""

_FOR_GOOD = ("dead", "left")


async def look_after(watchdog: Watchdog, worker: Worker, patience: float = _PATIENCE_SECONDS) -> None:
    """Fail the worker and return when a rank is gone, or was stopped or silent for `patience` seconds.

    A broken connection raises in the step that uses it. A stopped process (SIGSTOP, a debugger, a frozen container)
    keeps its connections and hangs every step, and an unreachable machine is silent. The first rank detects these here,
    long before the timeout of a collective, so that clients receive an error instead of waiting.
    """
    since: float | None = None
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        found = await asyncio.to_thread(watchdog.find_absent)
        if found is None:
            since = None
            continue
        view, cause = found
        since = since or time.monotonic()
        if view.state in _FOR_GOOD or time.monotonic() - since >= patience:
            worker.fail(cause)
            watchdog.kill_stopped(view)
            return
